"""fp16: updates with overflows are skipped, and the loss scale survives a stop and a change of layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import GPT, LLAMA, Run, finished, gpt_config, run

pytestmark = pytest.mark.process

FP16 = {"precision": "fp16"}
SCALING = {"initial_loss_scale": 2.0**20, "hysteresis": 2, "loss_scale_window": 2, "lr_decay_iters": 10}


def fp16(corpus: str, run_dir: Path, **training: Any) -> dict[str, Any]:
    config = gpt_config(corpus, run_dir, GPT | {"num_layers": 2})
    config["training"] |= FP16 | {"train_iters": 10, "micro_batch_size": 1, "global_batch_size": 2} | training
    config["optimizer"] |= SCALING
    return config


def scaling(run: Run) -> list[tuple[int, float, bool, bool]]:
    """Iteration, loss scale, whether the update was skipped and whether there is a gradient norm, for each step."""
    return [
        (e["iteration"], e["loss_scale"], e["skipped"], e["grad_norm"] is not None)
        for e in run.events
        if e["event"] == "step"
    ]


@pytest.fixture(scope="module")
def undisturbed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(fp16(corpus, tmp_path_factory.mktemp("fp16") / "run"))


def test_the_scale_halves_until_gradients_fit_and_then_grows(undisturbed: Run) -> None:
    found = scaling(undisturbed)
    left_out = [skipped for _, _, skipped, _ in found]
    overflows = left_out.index(False)
    assert overflows > 2  # hysteresis: the first overflow lowers nothing
    scales = [scale for _, scale, _, _ in found]
    assert scales[:overflows] == [2.0**20, *(2.0 ** (20 - n) for n in range(overflows - 1))]
    assert scales[overflows + 2] == 2 * scales[overflows]  # the window: two steps that fit
    assert [has_norm for *_, has_norm in found] == [not skipped for skipped in left_out]


def test_a_stop_during_overflows_and_another_layout_change_nothing(
    undisturbed: Run, corpus: str, tmp_path: Path
) -> None:
    """The first attempt has no update, but its checkpoint still contains an optimizer state."""
    first = fp16(corpus, tmp_path / "run", train_iters=3)
    first["world_size"] = 2
    first["parallelism"] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    finished(first)
    second = finished(fp16(corpus, tmp_path / "run"))
    assert scaling(second) == scaling(undisturbed)
    for ours, theirs in zip(second.steps, undisturbed.steps, strict=True):
        assert ours[1] == pytest.approx(theirs[1], abs=5e-3)


def test_experts_of_their_own_ranks_have_the_same_scale(corpus: str, tmp_path: Path) -> None:
    """In the first steps, gradients of other parameters overflow, and those of experts do not."""

    def norms(name: str, world_size: int) -> list[float | None]:
        config = fp16(corpus, tmp_path / name, train_iters=3)
        config["model"] = LLAMA | {"num_layers": 2, "num_moe_experts": 4, "moe_ffn_hidden_size": 48}
        config["world_size"], config["parallelism"] = world_size, {"expert_model_parallel_size": world_size}
        config["optimizer"] |= {"initial_loss_scale": 2.0**19, "hysteresis": 1}
        return [event["grad_norm"] for event in finished(config).events if event["event"] == "step"]

    alone, together = norms("alone", 1), norms("together", 2)
    assert alone[0] is None
    assert alone[-1] is not None
    assert together == [norm and pytest.approx(norm, rel=2e-3) for norm in alone]


@pytest.mark.slow
def test_a_fixed_scale_can_become_adaptive(corpus: str, tmp_path: Path) -> None:
    config = fp16(corpus, tmp_path / "run", train_iters=2)
    config["optimizer"]["loss_scale"] = 2.0**8
    finished(config)
    del config["optimizer"]["loss_scale"]
    config["optimizer"]["initial_loss_scale"] = 2.0**10
    config["checkpoint"] = {"changed": ["optimizer.loss_scale"]}
    config["training"]["train_iters"] = 3
    assert [scale for _, scale, *_ in scaling(finished(config))] == [2.0**8, 2.0**8, 2.0**10]


@pytest.mark.slow
def test_an_overflow_at_the_fixed_scale_ends_the_run(corpus: str, tmp_path: Path) -> None:
    config = fp16(corpus, tmp_path / "run")
    config["optimizer"]["loss_scale"] = 2.0**30
    ended = run(config)
    assert ended.statuses == (3,)
    assert (
        "fp16 gradients overflow at the smallest loss scale allowed, 1.07374e+09, at iteration 1" in ended.log
    )


def test_an_overflow_is_not_a_spike_and_does_not_count_against_the_allowance(
    corpus: str, tmp_path: Path
) -> None:
    """Every loss is a spike once 20 are known, and every second step or so overflows."""
    allowance = 4
    every = {"loss_spike_factor": 0.01, "skip_loss_spikes": allowance}
    ended = finished(fp16(corpus, tmp_path / "run", train_iters=45, global_batch_size=1, **every))
    spikes = [event for event in ended.events if event["event"] == "spike"]
    left_out = [event["iteration"] for event in spikes if event["skipped"]]
    overflows = [iteration for iteration, _, _, has_norm in scaling(ended) if not has_norm]
    assert len(left_out) == allowance
    assert any(iteration > spikes[0]["iteration"] for iteration in overflows)
    assert not set(overflows) & {event["iteration"] for event in spikes}
    assert all(f"iteration {iteration}: OVERFLOW" in ended.log for iteration in overflows)
