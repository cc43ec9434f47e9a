"""Small random models of every family, made with transformers.

transformers runs in a process of its own: the stand-ins for CUDA of the trainer's tests break its rotary embeddings.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainer.distributed.device import hide_gpus

VOCAB_SIZE = 300
"""Not a multiple of 128, so that the embedding is padded."""

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
}
GPT2_SHAPE: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "vocab_size": VOCAB_SIZE,
    "n_positions": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}

DEEPSEEK: dict[str, Any] = {
    **SHAPE,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_nextn_predict_layers": 0,
}

DEEPSEEK_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
QWEN3_MOE: dict[str, Any] = {
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2_SHAPE),
    "gpt2-exact-gelu": ("gpt2", GPT2_SHAPE | {"activation_function": "gelu", "n_inner": 96}),
    "gpt2-squared-relu-untied": (
        "gpt2",
        GPT2_SHAPE | {"activation_function": "relu2", "tie_word_embeddings": False},
    ),
    "llama2": ("llama", SHAPE | {"num_key_value_heads": 4}),
    "llama3.2": ("llama", SHAPE | {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-with-biases": ("llama", SHAPE | {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}),
    "llama-linear": (
        "llama",
        SHAPE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral": ("mistral", SHAPE | {"sliding_window": 16}),
    "mistral-without-window": ("mistral", SHAPE | {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", SHAPE),
    "qwen2-yarn": ("qwen2", SHAPE | {"rope_parameters": YARN}),
    "qwen2-window": (
        "qwen2",
        SHAPE | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    ),
    "deepseek": ("deepseek_v3", DEEPSEEK),
    "deepseek-without-query-latent": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek-yarn": ("deepseek_v3", DEEPSEEK | {"rope_parameters": YARN}),
    "deepseek-yarn-mscale": (
        "deepseek_v3",
        DEEPSEEK | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "deepseek-experts": ("deepseek_v3", DEEPSEEK | DEEPSEEK_EXPERTS),
    "deepseek-groups": (
        "deepseek_v3",
        DEEPSEEK
        | DEEPSEEK_EXPERTS
        | {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 0, "n_shared_experts": 2},
    ),
    "mixtral": ("mixtral", SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", SHAPE | {"num_local_experts": 4, "sliding_window": 16}),
    "qwen3-moe": ("qwen3_moe", SHAPE | QWEN3_MOE),
    "qwen3-moe-with-dense-layers": (
        "qwen3_moe",
        SHAPE | QWEN3_MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "deepseek-llama3": ("deepseek_v3", DEEPSEEK | {"rope_parameters": LLAMA3}),
    "qwen3": ("qwen3", SHAPE | {"head_dim": 32, "tie_word_embeddings": True}),
}
"""Family and config.json by name."""


@functools.cache
def transformers_process() -> ProcessPoolExecutor:
    """The process, which ends with this one. It computes on the CPU, also where there are GPUs."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=hide_gpus)


def save_model(
    case: str, directory: Path, dtype: torch.dtype = torch.float32, *, original_format: bool = True
) -> Path:
    """Writes a model whose weights are far from their usual initial values, biases and norms included.

    Without `original_format`, tensors have the names of transformers 5, which stacks experts.
    """
    return transformers_process().submit(_save_model, case, directory, dtype, original_format).result()


def huggingface_logits(directory: Path) -> torch.Tensor:
    """Logits of `prompts` in transformers, in fp32."""
    return torch.from_numpy(transformers_process().submit(_huggingface_logits, directory).result())


def huggingface_tokens(directory: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The `count` most likely tokens after each prompt, from `generate` of transformers in fp32."""
    return transformers_process().submit(_huggingface_tokens, directory, prompts, count).result()


def save_adapter(base: Path, directory: Path, **config: Any) -> Path:
    """Writes adapters for the model in `base` with PEFT's `config`. All of their matrices are random."""
    return transformers_process().submit(_save_adapter, base, directory, config).result()


def adapter_logits(base: Path, adapter: Path) -> torch.Tensor:
    """Logits of `prompts` in transformers with an adapter in PEFT, in fp32."""
    return torch.from_numpy(transformers_process().submit(_adapter_logits, base, adapter).result())


def _save_adapter(base: Path, directory: Path, config: dict[str, Any]) -> Path:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(6)
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.2)
        adapted.save_pretrained(directory)
    return directory


def _adapter_logits(base: Path, adapter: Path) -> Any:
    import peft
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return model(prompts()).logits.numpy()


def _huggingface_tokens(directory: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    continued = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
        )
        continued.append(output[0, len(prompt) :].tolist())
    return continued


def _save_model(case: str, directory: Path, dtype: torch.dtype, original_format: bool) -> Path:
    import transformers

    family, config = CASES[case]
    configuration = transformers.AutoConfig.for_model(family, **config)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(configuration)
        for parameter in model.parameters():
            parameter.data.normal_(mean=float(parameter.dim() == 1), std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    model.to(dtype).save_pretrained(directory, save_original_format=original_format)
    return directory


def save_tokenizer(directory: Path, size: int = VOCAB_SIZE) -> Path:
    """Writes a tokenizer.json with `size` tokens, the last of which ends a document."""
    vocabulary = {f"t{number}": number for number in range(size - 1)}
    added = [{"id": size - 1, "content": "<eod>", "special": True}]
    for token in added:
        token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path


def prompts() -> torch.Tensor:
    """Four prompts of 64 tokens."""
    return torch.randint(0, VOCAB_SIZE, (4, 64), generator=torch.Generator().manual_seed(1))


def _huggingface_logits(directory: Path) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(prompts()).logits.numpy()


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_weights(one: Path, other: Path) -> None:
    """All tensors are bit-identical."""
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
