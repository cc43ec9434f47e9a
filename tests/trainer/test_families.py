"""Models of Hugging Face transformers have the same logits here, with weights that are mapped by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from tests.trainer.families import FAMILIES, LENGTH, LLAMA, SCALINGS, VOCAB, megatron_weights
from tests.trainer.single_rank import ON_CPU, resolved
from trainer.contract import config as configuration
from trainer.contract.attention import KINDS
from trainer.contract.config import ModelConfig, TrainerConfig
from trainer.contract.config.resolve import resolve_model
from trainer.contract.errors import TrainerError
from trainer.contract.model.model_size import parameter_count, parameter_names
from trainer.model import build, core_config, rotary
from trainer.model.attention import PARTS, parts_of
from trainer.model.core_config import transformer_config

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults


def model_of(config: TrainerConfig, process_groups: Any) -> torch.nn.Module:
    [chunk] = build.build_model(config, process_groups, ON_CPU)
    inner: torch.nn.Module = chunk.module.eval()
    return inner


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, process_groups: Any, tmp_path: Path) -> None:
    reference = FAMILIES[name].build()
    config = resolved(tmp_path, FAMILIES[name].model)
    ours = model_of(config, process_groups)
    weights = megatron_weights(reference)
    parameters = dict(ours.named_parameters())
    assert weights.keys() == parameters.keys() == set(parameter_names(config.model))
    assert sum(map(torch.numel, parameters.values())) == parameter_count(config.model)
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(weights[key])
        expected = reference(tokens).logits
        logits = ours(tokens, torch.arange(LENGTH).expand_as(tokens), None)
    error = (logits - expected).abs().max() / expected.abs().max()
    assert error <= 1e-5


YARNS: list[dict[str, Any]] = [
    {"beta_fast": 16.0, "beta_slow": 2.0},
    {"truncate": False},
    {"attention_factor": 1.25},
    {"mscale": 0.707, "mscale_all_dim": 1.0},
    {"mscale": 0.707},
    {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
]


@pytest.mark.parametrize(
    "scaling",
    [
        *SCALINGS.values(),
        SCALINGS["llama3"] | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
        SCALINGS["llama3"] | {"original_max_position_embeddings": 8192},
        *(SCALINGS["yarn"] | options for options in YARNS),
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    document = LLAMA | {"kv_channels": 128, "rotary_base": 500000, "rope_scaling": scaling}
    model = resolve_model(configuration.from_dict(ModelConfig, document, "test"))
    assert model.rope_scaling
    reference = transformers.LlamaConfig(
        head_dim=128,
        rope_parameters={"rope_theta": 500000.0, **scaling},
        max_position_embeddings=LENGTH,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference)
    torch.testing.assert_close(rotary.inverse_frequencies(model), expected, rtol=1e-6, atol=0)
    ours = rotary.attention_factor(model.rope_scaling) if scaling["rope_type"] == "yarn" else 1.0
    assert ours == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("on_gpu", [True, False], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("squared_relu", lambda x: torch.nn.functional.relu(x) ** 2),
    ],
)
def test_an_activation_is_the_same_function_on_every_device(
    name: Any, function: Any, on_gpu: bool, bias: bool, process_groups: Any, tmp_path: Path
) -> None:
    """The MLP of the kernels for GPUs, here on a CPU."""
    model = FAMILIES["gpt2"].model | {"activation_func": name, "add_bias_linear": bias}
    config = resolved(tmp_path, model)
    mlp = model_of(config, process_groups).get_submodule("decoder.layers.0.mlp")
    func, fused = core_config.activation(config.model, on_gpu=on_gpu)
    assert fused == (on_gpu and bias and name == "gelu_tanh")
    mlp.config = dataclasses.replace(mlp.config, activation_func=func, bias_activation_fusion=fused)
    mlp.activation_func = func
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    if bias:
        torch.nn.init.normal_(fc1.bias)
    x = 20 * torch.randn(64, 1, 64)
    expected = function(torch.nn.functional.linear(x, fc1.weight, fc1.bias)) @ fc2.weight.t()
    torch.testing.assert_close(mlp(x)[0], expected, rtol=1e-5, atol=1e-5)


def test_the_trainer_builds_each_kind_of_attention() -> None:
    assert set(PARTS) == set(KINDS)


def test_a_model_without_cores_rotary_embedding_is_refused() -> None:
    model = ModelConfig(**LLAMA, rope_scaling=configuration.RopeScaling(rope_type="linear", factor=2.0))
    with pytest.raises(TrainerError, match=r"model.rope_scaling .* which Linear .* does not have"):
        parts_of(model).scale_frequencies(torch.nn.Linear(1, 1), model)


def test_a_window_with_transformer_engine_gathers_keys_over_context_parallel_ranks(tmp_path: Path) -> None:
    """Its default, a ring, refuses windows."""
    config = resolved(tmp_path, FAMILIES["gpt2"].model | {"window_size": 7})
    engine = dataclasses.replace(ON_CPU, transformer_engine="2.16.1")
    core = transformer_config(config, engine)
    assert (core.window_size, core.cp_comm_type) == ((6, 0), "all_gather")


def test_gradients_are_those_of_the_main_loss_and_the_weighted_mtp_losses(
    process_groups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each MTP loss is a sum over its own tokens. The step divides all sums by the tokens of the main loss."""
    config = resolved(tmp_path, LLAMA | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3})
    model = model_of(config, process_groups).train()
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, LENGTH)
    mask[:, 5:9] = 0
    compute, losses = GPTModel.compute_language_model_loss, []
    monkeypatch.setattr(
        GPTModel,
        "compute_language_model_loss",
        lambda *arguments: losses.append(compute(*arguments)) or losses[-1],
    )

    def gradients(scale: float, weight: float) -> tuple[torch.Tensor, ...]:
        losses.clear()
        MTPLossAutoScaler.set_loss_scale(torch.tensor(scale))
        output = model(tokens[:, :-1], torch.arange(LENGTH)[None], None, labels=tokens[:, 1:], loss_mask=mask)
        sums = [(losses[k - 1][:, :-k] * mask[:, k:]).sum() for k in (1, 2)]
        recorded = model.losses()
        torch.testing.assert_close(torch.stack(recorded[::2]), torch.stack(sums).detach())
        assert [int(number) for number in recorded[1::2]] == [int(mask[:, k:].sum()) for k in (1, 2)]
        return torch.autograd.grad((output * mask).sum() + weight * sum(sums), list(model.parameters()))

    for found, expected in zip(gradients(1.0, 0.0), gradients(0.0, 0.3 / 2), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))
