"""Values that are not finite and loss spikes change no weight on any rank."""

from __future__ import annotations

import io
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.trainer.forked import ForkedPython
from tests.trainer.runs import DEEPSEEK_V3, GPT, MOE, TWO_LAYERS, environment, finished, free_port, run
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE, list_checkpoints
from trainer.faults.spikes import MIN_LOSSES, WINDOW, SpikeWatch

EP2 = {"expert_model_parallel_size": 2}
SMALL = GPT | {"num_layers": 2}

LAYERS = '''
import dataclasses, os, torch
from megatron.core.transformer.transformer_layer import TransformerLayer

class Layer(TransformerLayer):
    """Its fourth step is poisoned, on rank 1."""
    calls = 0

    def forward(self, *arguments, **named):
        hidden, context = super().forward(*arguments, **named)
        self.calls += 1
        # one microbatch a step
        if self.training and os.environ["RANK"] == "1" and self.calls == 4:
            POISON
        return hidden, context

def layers(core, vp_stage, usual):
    specs = [dataclasses.replace(layer, module=Layer) for layer in usual.layer_specs]
    return dataclasses.replace(usual, layer_specs=specs)
'''


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "parallelism", "precision"),
    [
        # The next test has one step with NaN.
        pytest.param(GPT, {}, "fp32", id="DP2", marks=pytest.mark.slow),
        pytest.param(GPT, {"tensor_model_parallel_size": 2}, "fp32", id="TP2", marks=pytest.mark.slow),
        pytest.param(GPT, {"pipeline_model_parallel_size": 2}, "fp32", id="PP2", marks=pytest.mark.slow),
        pytest.param(
            GPT,
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "fp32",
            id="VPP2",
            marks=pytest.mark.slow,
        ),
        pytest.param(GPT, {}, "bf16", id="bf16", marks=pytest.mark.slow),
        pytest.param(GPT, {}, "fp16", id="fp16", marks=pytest.mark.slow),
        pytest.param(MOE | TWO_LAYERS, EP2, "fp32", id="experts", marks=pytest.mark.slow),
        pytest.param(MOE | TWO_LAYERS, EP2, "fp16", id="experts-fp16", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK_V3, EP2, "fp32", id="experts-MTP", marks=pytest.mark.slow),
    ],
)
def test_nan_in_20_steps_on_random_ranks_changes_no_weight(
    model: dict[str, Any],
    parallelism: dict[str, Any],
    precision: str,
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    config |= {"model": model, "world_size": 2, "parallelism": parallelism}
    config["training"] |= {"train_iters": 1000, "precision": precision, "skip_loss_spikes": 1}
    config["optimizer"] |= {"initial_loss_scale": 2.0**12, "hysteresis": 100}  # keeps the scale
    path, port = tmp_path / "config.json", free_port()
    path.write_text(json.dumps(config))
    command, log = ("-m", "tests.trainer.poisoned_steps", str(path)), tmp_path / "log"
    ranks = [ForkedPython(command, environment(rank, 2, port), log) for rank in range(2)]
    assert [rank.wait(timeout=PATIENCE_S) for rank in ranks] == [0, 0], log.read_text()


LOSS = (
    'hidden = hidden * float("nan")',
    r"the loss is nan at iteration 4 \(samples 12 to 15; on rank 1\)",
)
GRADIENT = (
    'hidden.register_hook(lambda gradient: gradient * float("nan"))',
    # each rank has a shard of the sum
    r"the gradient norm is nan at iteration 4 \(samples 12 to 15; loss \d.*; in the shard of ranks 0-1\)",
)
"""What makes NaN, and what is said."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "parallelism", "poison", "said"),
    [
        pytest.param(SMALL, {}, *LOSS, id="dense-loss"),
        pytest.param(SMALL, {}, *GRADIENT, id="dense-gradient", marks=pytest.mark.slow),
        pytest.param(MOE | TWO_LAYERS, EP2, *LOSS, id="experts-loss", marks=pytest.mark.slow),
        pytest.param(MOE | TWO_LAYERS, EP2, *GRADIENT, id="experts-gradient"),
    ],
)
def test_a_rank_that_computes_nan_ends_the_run_and_its_step_is_not_saved(
    model: dict[str, Any],
    parallelism: dict[str, Any],
    poison: str,
    said: str,
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Experts of rank 0 process tokens of rank 1, but only rank 1 computes a loss from the results."""
    layers = tmp_path / "layers.py"
    layers.write_text(LAYERS.replace("POISON", poison))
    config |= {"model": model | {"layer_spec": f"{layers}:layers"}, "world_size": 2}
    config |= {"parallelism": parallelism, "checkpoint": {"save_interval": 1}}
    result = run(config)
    assert result.statuses == (3, 3), result.log
    assert re.search(said, (result.directory / "FAILED").read_text())
    assert len(re.findall(said, result.log)) == 1
    assert [step[0] for step in result.steps] == [1, 2, 3]
    assert not (result.checkpoints / "iter_0000004").exists()
    assert not (result.directory / "DONE").exists()


UPDATE = '''
import dataclasses, itertools, math, os, torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.optim.optimizer import register_optimizer_step_post_hook

class Layer(TransformerLayer):
    """A mask in the module's buffers contains infinities on purpose."""
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.register_buffer("mask", torch.full((4, 4), -math.inf))

updates = itertools.count(1)

def poison(optimizer, *_):
    """The update of step 4 produces one NaN in the shard of rank 1."""
    if next(updates) == 4 and os.environ["RANK"] == "1":
        optimizer.param_groups[0]["params"][0].data.view(-1)[0] = math.nan

if "POISONED" in os.environ:
    register_optimizer_step_post_hook(poison)

def layers(core, vp_stage, usual):
    specs = [dataclasses.replace(layer, module=Layer) for layer in usual.layer_specs]
    return dataclasses.replace(usual, layer_specs=specs)
'''


@pytest.mark.process
@pytest.mark.parametrize("train_iters", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_a_checkpoint_with_nan_is_never_complete(
    train_iters: int, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers.py").write_text(UPDATE)
    config["world_size"] = 2
    config["model"] = SMALL | {"layer_spec": f"{tmp_path}/layers.py:layers"}
    config["training"]["train_iters"] = train_iters
    config["checkpoint"] = {"save_interval": 2, "keep_last": 1}
    monkeypatch.setenv("POISONED", "1")
    result = run(config)
    assert result.statuses == (3, 3), result.log
    said = r"a checkpoint would contain numbers that are not finite: rank \d on \S+: 1 of [\d,]+ numbers of \S+ are not"
    assert re.search(said, result.log), result.log
    if train_iters == 4:  # else the loss of the next step comes first
        assert re.search(said, (result.directory / "FAILED").read_text())
    assert "Traceback" not in result.log
    [complete] = [path for path in list_checkpoints(result.checkpoints) if path.is_complete]
    assert complete.iteration == 2
    monkeypatch.delenv("POISONED")
    assert "continues from" in finished(config).log


@pytest.mark.process
def test_a_checkpoint_that_holds_nan_is_named_when_it_is_loaded(config: dict[str, Any]) -> None:
    config["model"] = SMALL
    config["optimizer"]["lr_decay_iters"] = 8
    path = finished(config).checkpoints / "iter_0000006"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    name = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    place = next(where for what, where in metadata.storage_data.items() if what.fqn == name)
    file = path / place.relative_path
    data = bytearray(file.read_bytes())
    values, changed = torch.load(io.BytesIO(data[place.offset :][: place.length])), io.BytesIO()
    values[0] = torch.nan
    torch.save(values, changed)
    data[place.offset : place.offset + place.length] = changed.getvalue()
    file.write_bytes(data)
    record = checkpoint_files.read_record(path)
    record["files"][file.name] = checkpoint_files.describe_file(file)
    (path / COMPLETE).write_text(checkpoint_files.record_text(record))
    config["training"]["train_iters"] = 8
    result = run(config)
    assert result.statuses == (3,), result.log
    assert (
        f"{path} contains numbers that are not finite, although its files are unchanged: rank 0 on "
        in result.log
    )
    assert (
        "the optimizer's exp_avg. Rename it, for example to iter_0000006.bad, to resume from the one before"
        in result.log
    )


def watch(*losses: float, factor: float | None = 2.0, allowance: int = 0) -> SpikeWatch:
    found = SpikeWatch(factor, allowance)
    for loss in losses:
        found.remember(loss)
    return found


def test_a_spike_is_measured_against_the_median_of_enough_steps() -> None:
    assert watch(*[2.0] * (MIN_LOSSES - 1)).spike_ratio(1000) is None
    assert watch(*[2.0] * MIN_LOSSES).spike_ratio(4.0) is None
    assert watch(*[2.0] * MIN_LOSSES).spike_ratio(4.1) == pytest.approx(2.05)
    assert watch(*[2.0] * MIN_LOSSES, 1000, 1000).spike_ratio(4.1) == pytest.approx(2.05)
    assert watch(*[2.0] * MIN_LOSSES, factor=None).spike_ratio(1000) is None


def test_a_loss_that_stays_high_is_no_longer_a_spike() -> None:
    assert watch(*[2.0] * WINDOW, *[6.0] * (WINDOW // 2 - 1)).spike_ratio(6.0) is not None
    assert watch(*[2.0] * WINDOW, *[6.0] * (WINDOW // 2 + 1)).spike_ratio(6.0) is None


def test_a_resumed_spike_watch_decides_like_an_uninterrupted_one() -> None:
    undisturbed = watch(*[2.0] * MIN_LOSSES, allowance=2)
    assert undisturbed.skip()
    resumed = watch(allowance=2)
    resumed.load_state_dict(json.loads(json.dumps(undisturbed.state_dict())))
    assert resumed.spike_ratio(5.0) == undisturbed.spike_ratio(5.0) == 2.5
    assert resumed.skip()
    assert not resumed.skip()
    assert resumed.skipped == 2
