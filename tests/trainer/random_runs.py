"""Random runs that obey hpcgen's rules: a model with its data and optimizer, and two layouts for it.

Many combinations of the values below break a rule. They are drawn again until hpcgen accepts them.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.trainer.chat_pairs import random_chats, write_chats
from tests.trainer.runs import write_corpus
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.rules.engine import ERRORS, facts_of

STEPS, SAVED = 4, 2
"""Steps of a run, and the step at which it saves a checkpoint."""
EOD = 999
LR = 2e-4
"""Higher rates amplify rounding within few steps, since AdamW moves weights with tiny gradients as fast as others."""
TRIES = 200
"""Number of draws of the values of a model with certain features, or of a layout, before others are chosen."""

Document = dict[str, Any]
Choices = list[Document]
"""Alternative values of keys ("key" or "section.key")."""


def key(name: str, *values: Any) -> Choices:
    """The values of one key. None leaves it out."""
    return [{} if value is None else {name: value} for value in values]


def keys(section: str, *choices: Document) -> Choices:
    """Values of several keys of a section."""
    return [{f"{section}.{name}": value for name, value in choice.items()} for choice in choices]


LLAMA3 = {
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SCALINGS = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", **LLAMA3},
    YARN,
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
)
ROPE = {"position_embedding_type": "rope"}
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS = SIGMOID | {"moe_router_enable_expert_bias": True}
AUX = "moe_router_load_balancing_type"
CAPACITY = {"moe_expert_capacity_factor": 1.0}
GROUPS = {"moe_router_num_groups": 2}

BASE = (
    key("model.num_layers", 2, 3, 4, 4),
    key("model.hidden_size", 32),
    key("model.num_attention_heads", 2, 4, 4, 8),
    key("model.seq_length", 32),
    key("model.vocab_size", 1000),
    key("model.padded_vocab_size", None, None, 1004),
    key("model.normalization", "LayerNorm", "RMSNorm"),
    key("model.untie_embeddings_and_output_weights", False, True),
    keys("model", ROPE, *(ROPE | {"rope_scaling": scaling} for scaling in SCALINGS), *[{}] * 4),
    keys("model", {"swiglu": True}, {}, {"activation_func": "gelu"}, {"activation_func": "squared_relu"}),
    keys("model", {}, *[{"add_bias_linear": False}] * 2, {"add_bias_linear": False, "add_qkv_bias": True}),
    key("model.qk_layernorm", False, True),
    key("model.ffn_hidden_size", None, 40, 64),
    key("model.kv_channels", None, None, None, 6, 16),
    key("model.num_query_groups", None, None, 1, 2),
    key("model.window_size", None, None, None, 1, 9, 31, 100),
    key("training.global_batch_size", 4, 8),
    key("training.micro_batch_size", 1, 1, 2),
    key("training.rampup_batch_size", *[None] * 9, [4, 4, 8]),
    key("training.seed", *range(1, 1000)),
    key("optimizer.lr_warmup_iters", 0, 1),
    key("optimizer.clip_grad", None, None, 0.0, 0.1),
    key("optimizer.parameter_groups", *[None] * 8, [{"match": "*.layers.1.*", "lr_mult": 0.5}]),
    key("checkpoint.async_save", False, True),
)
LATENT_ATTENTION = (
    keys("model", {"multi_latent_attention": True, **ROPE}),
    key("model.q_lora_rank", None, 16, 20),
    key("model.kv_lora_rank", 12, 16),
    key("model.qk_head_dim", 6, 8),
    key("model.qk_pos_emb_head_dim", 4, 8),
    key("model.v_head_dim", 6, 10),
)
MULTI_TOKEN = (
    keys("model", {"mtp_num_layers": 1, **ROPE}, {"mtp_num_layers": 2, **ROPE}),
    key("model.mtp_loss_scaling_factor", None, 1.0),
)
EXPERTS = (
    key("model.num_moe_experts", 4, 4, 6, 8),
    keys(
        "model",
        *[{}] * 3,
        {"num_layers": 2, "moe_layer_freq": [0, 1]},
        {"num_layers": 3, "moe_layer_freq": [1, 0, 1]},
        {"num_layers": 4, "moe_layer_freq": [0, 1, 1, 1]},
    ),
    key("model.moe_ffn_hidden_size", None, 16, 24),
    key("model.moe_shared_expert_intermediate_size", None, None, 16),
    key("model.moe_router_topk", 1, 2, 2, 2, 3, 4),
    keys(
        "model",
        {},
        {"moe_router_pre_softmax": True},
        SIGMOID,
        BIAS,
        BIAS | {"moe_router_bias_update_rate": 0.05},
    ),
    key("model.moe_router_topk_scaling_factor", None, None, 2.5),
    keys("model", {}, {}, GROUPS | {"moe_router_group_topk": 1}, GROUPS | {"moe_router_group_topk": 2}),
    keys(
        "model",
        {AUX: "none"},
        {AUX: "aux_loss", "moe_aux_loss_coeff": 0.1},
        {AUX: "seq_aux_loss", "moe_aux_loss_coeff": 0.01},
        {AUX: "seq_aux_loss", "moe_aux_loss_coeff": 0.3},
    ),
    key("model.moe_z_loss_coeff", None, 1e-3, 0.1),
    keys(
        "model",
        *[{}] * 9,
        CAPACITY,
        CAPACITY | {"moe_token_drop_policy": "position"},
        CAPACITY | {"moe_pad_expert_input_to_capacity": True},
    ),
)
DOCUMENTS = (
    key("data.reset_attention_mask", False, True),
    key("data.reset_position_ids", False, True),
    key("data.eod_mask_loss", False, True),
    key("data.eod_id", EOD),
)
FEATURES = ((0.35, LATENT_ATTENTION), (0.3, MULTI_TOKEN), (0.65, EXPERTS), (0.5, DOCUMENTS))
"""Features with the share of the models that have them."""

LAYOUT = (
    key("world_size", 2, 2, 3, 4, 4, 4, 4),
    key("parallelism.tensor_model_parallel_size", 1, 1, 2, 2, 4),
    key("parallelism.sequence_parallel", False, True, True),
    key("parallelism.context_parallel_size", 1, 1, 1, 2, 4),
    key("parallelism.cp_comm_type", None, None, "all_gather"),
    key("parallelism.num_distributed_optimizer_instances", 1, 1, 1, 2),
    key("parallelism.overlap_grad_reduce", False, True),
    key("parallelism.overlap_param_gather", False, True),
    key("training.micro_batch_size", 1, 1, 2, 4),
)
PIPELINES = (
    *[()] * 3,
    (key("parallelism.pipeline_model_parallel_size", 2, 2, 3, 4),),
    (
        key("parallelism.pipeline_model_parallel_size", 2, 2, 4),
        key("parallelism.virtual_pipeline_model_parallel_size", 2),
    ),
    (
        key("parallelism.pipeline_model_parallel_size", 2, 2, 3, 4),
        key("parallelism.virtual_pipeline_model_parallel_size", None, 2),
        key("parallelism.num_layers_in_first_pipeline_stage", None, 1, 2, 3),
        key("parallelism.num_layers_in_last_pipeline_stage", None, 1, 2, 3),
    ),
    (
        key("parallelism.pipeline_model_parallel_size", 2, 2, 3, 4),
        key("parallelism.virtual_pipeline_model_parallel_size", None, 2),
        key("parallelism.account_for_embedding_in_pipeline_split", False, True),
        key("parallelism.account_for_loss_in_pipeline_split", True),
    ),
    (
        key("parallelism.pipeline_model_parallel_size", 2, 2, 3, 4),
        key("parallelism.virtual_pipeline_model_parallel_size", None, 2),
        key("parallelism.pipeline_model_parallel_layout", "random"),
    ),
)
LAYOUT_OF_EXPERTS = (
    key("parallelism.expert_model_parallel_size", 1, 2, 2, 4),
    key("parallelism.expert_tensor_parallel_size", None, None, 1, 2),
    key("parallelism.moe_token_dispatcher_type", None, None, "allgather"),
)
RECOMPUTATION = (
    *[()] * 2,
    (
        key("training.recompute_granularity", "full"),
        key("training.recompute_method", "uniform", "block"),
        key("training.recompute_num_layers", 1, 1, 2),
    ),
    (
        key("training.recompute_granularity", "selective"),
        key("training.recompute_modules", None, ["mlp"], ["moe"], ["core_attn", "mlp", "moe"]),
    ),
)


LARGE_MODEL = (
    key("model.num_layers", 4, 6, 8, 8, 12),
    key("model.hidden_size", 48),
    key("model.num_attention_heads", 4, 6, 8, 12),
    key("model.seq_length", 48, 64),
    key("training.global_batch_size", 32, 64),
)
LARGE_LAYOUT = (
    key("world_size", 4, 6, 8, 8, 12, 16, 16, 24, 32),
    key("parallelism.tensor_model_parallel_size", 1, 1, 2, 2, 3, 4, 8),
    key("parallelism.context_parallel_size", 1, 1, 2, 2, 4, 8),
    key("parallelism.num_distributed_optimizer_instances", 1, 1, 2, 2, 4),
)


@dataclass(frozen=True)
class Case:
    """The configuration of a single process, and two layouts as changes to it."""

    alone: Document
    layouts: tuple[Document, Document]

    def config(self, name: str, layout: Document, **changes: Any) -> Document:
        """The configuration of the run `name` with `changes` ("section__key")."""
        directory = Path(self.alone["run_dir"]) / name
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        return merged(self.alone, {"run_dir": str(directory)} | layout | changed)


def draw(seed: int, directory: Path, *, large: bool = False) -> Case:
    """The case of a `seed`, whose runs and corpora are in `directory`.

    Its layouts have up to 4 ranks, which this machine can run, or up to 32 with `large`.
    """
    of_model, of_layout = (LARGE_MODEL, LARGE_LAYOUT) if large else ((), ())
    source = random.Random(seed)
    corpora = [
        write_corpus(directory / name, documents=200, first_token=first, eod=EOD, lengths=(1, 40))
        for name, first in (("low", 0), ("high", 400))
    ]
    chats = [
        write_chats(directory / f"chats-{number}", random_chats(120, (4, 24), seed=number))
        for number in (0, 1)
    ]
    while True:
        features = [feature for share, feature in FEATURES if source.random() < share] + [of_model]
        drawn = (_draw_alone(source, features, directory, corpora, chats) for _ in range(TRIES))
        alone = next((document for document in drawn if is_valid(document)), None)
        if alone is not None:
            return Case(
                alone, (_valid_layout(source, alone, of_layout), _valid_layout(source, alone, of_layout))
            )


def is_valid(document: Document) -> bool:
    """True if hpcgen's rules accept the trainer's configuration."""
    config = configuration.from_dict(TrainerConfig, document, "a random run")
    return not any(problem for rule in ERRORS for problem in rule(facts_of(config)))


def merged(document: Document, changes: Document) -> Document:
    """A copy of `document` with other values of some keys ("key" or "section.key")."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in document.items()}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (result[section] if section else result)[name] = value
    return result


def _draw_alone(
    source: random.Random,
    features: list[tuple[Choices, ...]],
    directory: Path,
    corpora: list[str],
    chats: list[str],
) -> Document:
    one, other = ({"prefix": prefix} for prefix in corpora)
    chat, other_chat = ({"prefix": prefix} for prefix in chats)
    samples = source.choice(
        [
            {"datasets": [one], "split": "8,1,1"},
            {"datasets": [one, other], "split": "7,2,1"},
            {"datasets": [one | {"weight": 0.3}, other | {"weight": 0.7}], "split": "8,1,1"},
            {"train": [one], "valid": [other]},
            {"mock": True},
            {"train": [chat], "valid": [other_chat], "sft": True},
            {
                "datasets": [chat, other_chat],
                "split": "7,2,1",
                "sft": True,
                "sft_packing": source.random() < 0.7,
            },
        ]
    )
    fixed: Document = {
        "name": "random",
        "run_dir": str(directory),
        "device": "cpu",
        "world_size": 1,
        "model": {},
        "parallelism": {},
        "training": {"train_iters": STEPS, "precision": "fp32", "eval_iters": 1, "eval_interval": 1},
        "optimizer": {"lr": LR},
        "data": {"num_workers": 0, **samples},
        "checkpoint": {"save_interval": SAVED},
        "logging": {"tensorboard": False},
    }
    return merged(fixed, _choose(source, *BASE, *itertools.chain(*features)))


def _valid_layout(source: random.Random, alone: Document, sizes: tuple[Choices, ...]) -> Document:
    while True:
        features = [*sizes, *source.choice(PIPELINES), *source.choice(RECOMPUTATION)]
        if "num_moe_experts" in alone["model"]:
            features += LAYOUT_OF_EXPERTS
        drawn = (_draw_layout(source, alone, features) for _ in range(TRIES))
        layout = next((layout for layout in drawn if is_valid(merged(alone, layout))), None)
        if layout is not None:
            return layout


def _draw_layout(source: random.Random, alone: Document, features: list[Choices]) -> Document:
    model, layout = alone["model"], _choose(source, *LAYOUT, *features)
    if "parallelism.pipeline_model_parallel_layout" in layout:
        stages = layout["parallelism.pipeline_model_parallel_size"]
        chunks = stages * layout.get("parallelism.virtual_pipeline_model_parallel_size", 1)
        layout["parallelism.pipeline_model_parallel_layout"] = _draw_rows(source, model, chunks)
    # docs/trainer.md excludes losses that depend on the microbatch, or on its part on a rank.
    if "moe_expert_capacity_factor" in model:
        layout["parallelism.tensor_model_parallel_size"] = layout["parallelism.context_parallel_size"] = 1
    if "moe_expert_capacity_factor" in model or model.get(AUX) == "aux_loss":
        layout["training.micro_batch_size"] = alone["training"]["micro_batch_size"]
    return layout


def _draw_rows(source: random.Random, model: Document, chunks: int) -> str:
    """A pipeline_model_parallel_layout with any number of layers in each chunk."""
    layers, mtp = model["num_layers"], "m" * model.get("mtp_num_layers", 0)
    loss_is_alone = bool(mtp) and source.random() < 0.5
    cuts = sorted(source.randint(0, layers) for _ in range(chunks - 1 - loss_is_alone))
    rows = ["t" * (end - start) for start, end in itertools.pairwise([0, *cuts, layers])]
    return "E" + "|".join(rows) + mtp + "|" * loss_is_alone + "L"


def _choose(source: random.Random, *features: Choices) -> Document:
    """A value for each key. Later features overrule earlier ones."""
    return {key: value for choices in features for key, value in source.choice(choices).items()}
