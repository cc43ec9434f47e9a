"""Mixtures of experts train alike at every layout, resume exactly, and have losses of the configured strength."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from tests.trainer.runs import GPT, LLAMA, MOE, TWO_LAYERS, Run, finished, gpt_config
from tests.trainer.single_rank import small_router
from tests.trainer.tensors import assert_same_checkpoint, load_all
from trainer.contract import config as configuration
from trainer.contract.config import ConfigError, TrainerConfig
from trainer.contract.rules.engine import require

pytestmark = pytest.mark.process

MIXTRAL = LLAMA | {"num_layers": 2, "num_moe_experts": 4, "moe_ffn_hidden_size": 48}
WITH_BIASES = GPT | {"num_layers": 2, "num_moe_experts": 4, "moe_ffn_hidden_size": 48}
EP2 = {"expert_model_parallel_size": 2}
EP4 = {"expert_model_parallel_size": 4}
ETP1, ETP2 = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
INSTANCES = {"num_distributed_optimizer_instances": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}

FC2 = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"


def moe_config(corpus: str, directory: Path, model: dict[str, Any] = MOE, **sections: Any) -> dict[str, Any]:
    config = gpt_config(corpus, directory, model) | sections
    config["training"] |= {"train_iters": 3, "micro_batch_size": 4 // max(2, config["world_size"])}
    config["optimizer"] |= {"lr": 3e-3}
    return config


@pytest.fixture(scope="module")
def alone(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three steps of one process."""
    return finished(moe_config(corpus, tmp_path_factory.mktemp("alone")))


def assert_same_curve(run: Run, reference: Run) -> None:
    """The routing is discrete, so a difference of rounding would become large if it changed an expert."""
    numpy.testing.assert_allclose(run.steps, reference.steps, rtol=5e-7)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        pytest.param(2, EP2 | OVERLAP, id="EP2"),
        pytest.param(2, TP2, id="TP2", marks=pytest.mark.slow),
        pytest.param(2, PP2, id="PP2"),
        pytest.param(4, EP2 | TP2, id="EP2xTP2", marks=pytest.mark.slow),
        pytest.param(4, EP2 | PP2, id="EP2xPP2", marks=pytest.mark.slow),
        pytest.param(2, TP2 | ETP1, id="TP2xETP1", marks=pytest.mark.slow),
        pytest.param(2, CP2 | EP2, id="CP2xEP2", marks=pytest.mark.slow),
        pytest.param(2, EP2 | ALLGATHER, id="EP2+allgather", marks=pytest.mark.slow),
        pytest.param(4, EP4 | TP2 | ETP1, id="EP4xTP2xETP1", marks=pytest.mark.slow),
        pytest.param(2, ETP2, id="ETP2", marks=pytest.mark.slow),
        pytest.param(4, ETP2 | EP2, id="ETP2xEP2", marks=pytest.mark.slow),
        pytest.param(4, EP2 | INSTANCES, id="instances", marks=pytest.mark.slow),
        pytest.param(
            4, EP2 | PP2 | {"virtual_pipeline_model_parallel_size": 2}, id="EP2xVPP2", marks=pytest.mark.slow
        ),
    ],
)
def test_experts_train_alike_at_every_layout(
    world_size: int, layout: dict[str, Any], corpus: str, tmp_path: Path, alone: Run
) -> None:
    together = finished(moe_config(corpus, tmp_path, world_size=world_size, parallelism=layout))
    assert_same_curve(together, alone)
    assert [loads(line) for line in lines(together)] == [loads(line) for line in lines(alone)]


@pytest.fixture(scope="module")
def alone_with_biases(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(moe_config(corpus, tmp_path_factory.mktemp("biases"), WITH_BIASES))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TP2 | ETP1, id="ETP1", marks=pytest.mark.slow),
        pytest.param(TP2 | EP2 | ETP1, id="EP2"),
    ],
)
def test_experts_with_biases_train_alike(
    layout: dict[str, Any], corpus: str, tmp_path: Path, alone_with_biases: Run
) -> None:
    """The biases of experts are not divided over tensor-parallel ranks, and these ranks do not share them either."""
    config = moe_config(corpus, tmp_path, WITH_BIASES, world_size=2, parallelism=layout)
    assert_same_curve(finished(config), alone_with_biases)


def lines(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == "step"]


def loads(line: dict[str, Any]) -> list[float]:
    return [line["moe_min_load"], *line["moe_max_load_by_layer"]]


def router_metrics(line: dict[str, Any]) -> list[float]:
    return [*loads(line), line["seq_load_balancing_loss"], line["z_loss"]]


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(
            {"eval_interval": 1, "eval_iters": 2}
            | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            id="evaluation-moe",
        ),
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            id="full",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_only_tokens_of_training_count_and_only_once(
    training: dict[str, Any], corpus: str, tmp_path: Path, alone: Run
) -> None:
    """The biases of experts follow the counts, so the curve would differ too.

    The losses per token would be twice as high if the first pass of recomputed layers counted.
    """
    config = moe_config(corpus, tmp_path)
    config["training"] |= training
    ended = finished(config)
    assert ended.steps == alone.steps
    assert [router_metrics(line) for line in lines(ended)] == [router_metrics(line) for line in lines(alone)]


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        pytest.param((2, EP2), (2, EP2), id="EP2", marks=pytest.mark.slow),
        pytest.param((4, EP4), (2, EP2), id="EP4-EP2", marks=pytest.mark.slow),
        pytest.param((2, EP2), (1, {}), id="EP2-EP1"),
        pytest.param((1, {}), (2, EP2), id="EP1-EP2", marks=pytest.mark.slow),
        pytest.param((4, EP2 | TP2 | ETP1), (4, EP2 | PP2), id="EP2xTP2-EP2xPP2", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_resumes_at_another_expert_layout(
    saving: tuple[int, dict[str, Any]],
    loading: tuple[int, dict[str, Any]],
    corpus: str,
    tmp_path: Path,
    alone: Run,
) -> None:
    def config(name: str, ranks: tuple[int, dict[str, Any]]) -> dict[str, Any]:
        config = moe_config(corpus, tmp_path / name, world_size=ranks[0], parallelism=ranks[1])
        config["training"]["micro_batch_size"] = 1
        return config

    (tmp_path / "stop").touch()
    finished(config("resumed", saving), "--stop-file", str(tmp_path / "stop"))
    resumed = finished(config("resumed", loading))
    assert_same_curve(resumed, alone)
    if loading == saving:
        straight = finished(config("straight", saving))
        assert resumed.steps == straight.steps
        assert_same_checkpoint(resumed.checkpoints / "iter_0000003", straight.checkpoints / "iter_0000003")


@pytest.mark.parametrize("kind", [pytest.param("aux_loss", marks=pytest.mark.slow), "seq_aux_loss"])
def test_auxiliary_losses_do_not_depend_on_the_micro_batch_or_the_layout(
    kind: str, corpus: str, tmp_path: Path
) -> None:
    """A strong loss alone changes the first gradient by as much at TP2 as in one process.

    seq_aux_loss is a mean over sequences, so the size of a microbatch does not matter either.
    """
    model = MIXTRAL | {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 1.0}
    norms = {}
    for name, world_size, layout, micro_batch_size in (
        ("alone", 1, {}, 1),
        ("TP2", 2, TP2, 1),
        *((("batch of 2", 1, {}, 2),) if kind == "seq_aux_loss" else ()),
    ):
        config = moe_config(corpus, tmp_path / name, model, world_size=world_size, parallelism=layout)
        config["training"] |= {"train_iters": 1, "micro_batch_size": micro_batch_size}
        config["optimizer"]["lr_warmup_iters"] = 0
        norms[name] = finished(config).steps[0][2]
    assert list(norms.values()) == pytest.approx([norms["alone"]] * len(norms), rel=5e-7)


@pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults
def test_auxiliary_losses_have_the_configured_strength(process_groups: ProcessGroupCollection) -> None:
    """A step divides by the number of tokens, so a loss for a microbatch is multiplied by it."""
    seq_length, batch, experts, topk = 8, 3, 4, 2
    router = small_router(process_groups, moe_router_topk=topk, moe_router_load_balancing_type="aux_loss")
    inputs = torch.randn(seq_length, batch, 16)
    probs, chosen = router(inputs)
    (0 * probs).sum().backward()

    weight = router.weight.detach().requires_grad_()
    logits = inputs.view(-1, 16) @ weight.t()
    share = chosen.float().mean(0) / topk
    balancing = experts * (share * logits.softmax(-1).mean(0)).sum()
    z_loss = logits.logsumexp(-1).square().mean()
    (seq_length * batch * (0.1 * balancing + 0.01 * z_loss)).backward()
    torch.testing.assert_close(router.weight.grad, weight.grad)
    assert router.statistics is not None
    assert router.statistics[:experts].tolist() == chosen.sum(0).tolist()
    assert router.statistics[experts:].tolist() == pytest.approx([float(balancing), 24 * float(z_loss), 24])


def test_tokens_above_the_capacity_are_dropped(corpus: str, tmp_path: Path) -> None:
    def curve(name: str, **keys: Any) -> Run:
        config = moe_config(corpus, tmp_path / name, MIXTRAL | keys)
        config["training"]["train_iters"] = 1
        config["optimizer"]["lr_warmup_iters"] = 0
        return finished(config)

    dropless, ample = curve("dropless"), curve("ample", moe_expert_capacity_factor=2.0)
    assert ample.steps == dropless.steps
    assert [line["moe_dropped"] for line in lines(ample)] == [0]
    dropping = {"moe_expert_capacity_factor": 1.0}
    dropped = curve("dropped", **dropping)
    padded = curve("padded", moe_pad_expert_input_to_capacity=True, **dropping)
    assert dropped.steps[0] != dropless.steps[0]
    numpy.testing.assert_allclose(padded.steps, dropped.steps, rtol=5e-7)
    assert all(0 < line["moe_dropped"] < 0.5 for line in lines(dropped))
    assert all(f", {line['moe_dropped']:.1%} dropped" in dropped.log for line in lines(dropped))
    assert "dropped" not in dropless.log
    assert [line["moe_dropped"] for line in lines(padded)] == [line["moe_dropped"] for line in lines(dropped)]


def test_the_metrics_have_the_load_of_each_expert(alone: Run) -> None:
    """The events have the load of the first and of the last line."""
    events = [event for event in alone.events if event["event"] == "experts"]
    assert [event["iteration"] for event in events] == [1, 3]
    first, last = lines(alone)[0], lines(alone)[-1]
    for event, line in zip(events, (first, last), strict=True):
        assert event["layers"] == [1, 2, 3]
        assert [max(layer) for layer in event["load"]] == line["moe_max_load_by_layer"]
        assert [sum(layer) for layer in event["load"]] == pytest.approx([4] * 3, abs=1e-3)
    # The scores of a new router are nearly equal, and so are f and P of sum(f x P) x experts.
    assert first["seq_load_balancing_loss"] == pytest.approx(1, abs=0.1)
    assert first["z_loss"] == pytest.approx(numpy.log(4) ** 2, abs=0.5)
    assert "ep" in alone.events[0]


PADDED = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}


@pytest.mark.parametrize(
    ("precision", "keys"),
    [
        pytest.param("fp32", {}, id="fp32", marks=pytest.mark.slow),
        pytest.param("bf16", {}, id="bf16"),
        pytest.param("fp32", PADDED, id="padded"),  # the padding has no load
    ],
)
def test_biases_follow_the_load(precision: str, keys: dict[str, Any], corpus: str, tmp_path: Path) -> None:
    """Each step raises the biases of experts below the mean load by the rate, in fp32, and lowers the others."""
    config = moe_config(corpus, tmp_path, MOE | TWO_LAYERS | keys, checkpoint={"save_interval": 1})
    config["training"] |= {"train_iters": 2, "precision": precision}
    ended = finished(config)
    bias = load_all(ended.checkpoints / "iter_0000001")["decoder.layers.1.mlp.router.expert_bias"]
    event = next(event for event in ended.events if event["event"] == "experts")
    expected = [MOE["moe_router_bias_update_rate"] * numpy.sign(1 - load) for load in event["load"][0]]
    assert bias.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_skipped_step_changes_no_bias(corpus: str, tmp_path: Path) -> None:
    """The first update of fp16 overflows at this scale."""
    config = moe_config(corpus, tmp_path, MOE | TWO_LAYERS, checkpoint={"save_interval": 1})
    config["training"] |= {"train_iters": 2, "precision": "fp16"}
    config["optimizer"] |= {"initial_loss_scale": 2.0**40, "hysteresis": 1, "loss_scale_window": 1}
    ended = finished(config)
    assert lines(ended)[0]["skipped"]
    state = load_all(ended.checkpoints / "iter_0000001")
    assert not state["decoder.layers.1.mlp.router.expert_bias"].any()


def test_names_of_experts_do_not_depend_on_the_layout(corpus: str, tmp_path: Path) -> None:
    """A group for one expert trains that expert, on whichever rank it is."""

    def curve(name: str, world_size: int, layout: dict[str, Any]) -> Run:
        ranks = {"world_size": world_size, "parallelism": layout}
        config = moe_config(corpus, tmp_path / name, MOE | TWO_LAYERS, **ranks)
        groups = [{"match": "*.experts.local_experts.3.*", "lr_mult": 0.0}]
        config["optimizer"]["parameter_groups"] = groups
        config["checkpoint"] = {"save_interval": 1}
        config["training"]["train_iters"] = 2
        return finished(config)

    one, two = curve("one", 1, {}), curve("two", 2, EP2)
    assert_same_curve(two, one)
    fixed, trained = (
        [load_all(two.checkpoints / f"iter_000000{n}")[FC2][expert] for n in (1, 2)] for expert in (3, 2)
    )
    assert torch.equal(*fixed)
    assert not torch.equal(*trained)


@pytest.mark.parametrize(
    ("model", "layout", "world_size", "message"),
    [
        (
            {},
            EP2 | {"tensor_model_parallel_size": 2},
            4,
            "sequence_parallel = false does not work with experts",
        ),
        (
            {},
            {"expert_model_parallel_size": 3},
            3,
            "size = 3 does not divide model.num_moe_experts = 4",
        ),
        (
            {},
            EP4,
            2,
            "results in ETP x EP = 1 x 4 = 4, which does not divide the 2 ranks of a pipeline stage",
        ),
        (
            {"moe_ffn_hidden_size": 49},
            ETP2,
            2,
            "size = 2 does not divide model.moe_ffn_hidden_size = 49",
        ),
        (
            {"add_bias_linear": True},
            ETP2,
            2,
            "is not supported for experts that 2 ranks share",
        ),
        ({}, EP2 | INSTANCES, 2, "num_distributed_optimizer_instances = 2 does not divide"),
        (None, EP2, 2, "expert_model_parallel_size = 2 has no effect, because model.num_moe_experts is null"),
    ],
)
def test_layouts_that_cannot_work_are_refused(
    model: dict[str, Any] | None, layout: dict[str, Any], world_size: int, message: str, tmp_path: Path
) -> None:
    document = moe_config("/corpus", tmp_path, LLAMA if model is None else MIXTRAL | model)
    document |= {"world_size": world_size, "parallelism": layout}
    document["training"] |= {"micro_batch_size": 1, "global_batch_size": 12}
    config = configuration.from_dict(TrainerConfig, document, "test")
    with pytest.raises(ConfigError, match=re.escape(message)):
        require(config)
