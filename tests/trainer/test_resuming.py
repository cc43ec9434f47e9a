"""A run that stops and resumes has a bitwise identical curve with the same layout, and the same curve with another."""

from __future__ import annotations

import dataclasses
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core import dist_checkpointing

from hpcgen.runs.history import read_history
from tests.trainer.runs import LLAMA, MOE, TWO_LAYERS, Ranks, Run, finished, gpt_config, run
from tests.trainer.tensors import assert_same_checkpoint, load_all
from trainer.contract.errors import Exit
from trainer.contract.files import checkpoint_files

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def dropout_config(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run with evaluations and dropout, whose random numbers a resumed run must reproduce."""
    config = gpt_config(corpus, tmp_path_factory.mktemp("undisturbed"))
    config["model"] |= {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    config["training"] |= {"eval_iters": 1, "eval_interval": 2}
    return config


@pytest.fixture(scope="module")
def undisturbed(dropout_config: dict[str, Any]) -> Run:
    return finished(dropout_config)


@pytest.fixture(scope="module")
def saved_often(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of single_gpt with checkpoints after two, four and six steps."""
    return finished(
        gpt_config(corpus, tmp_path_factory.mktemp("often")) | {"checkpoint": {"save_interval": 2}}
    )


@pytest.fixture(scope="module")
def one_step(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of single_gpt, stopped after its first step."""
    directory = tmp_path_factory.mktemp("stopped")
    (directory / "stop").touch()
    return finished(gpt_config(corpus, directory / "run"), "--stop-file", str(directory / "stop"))


@pytest.fixture
def stopped(one_step: Run, config: dict[str, Any]) -> Run:
    """A copy of this run in the directory of the test."""
    directory = Path(shutil.copytree(one_step.directory, config["run_dir"]))
    return dataclasses.replace(one_step, directory=directory)


@pytest.fixture
def stopped_at_once(tmp_path: Path) -> str:
    """A stop file that exists from the start, so that the run leaves after one step."""
    (tmp_path / "stop").touch()
    return str(tmp_path / "stop")


def test_a_stopped_run_resumes_like_an_uninterrupted_one(
    dropout_config: dict[str, Any], undisturbed: Run, tmp_path: Path, stopped_at_once: str
) -> None:
    config = dropout_config | {"run_dir": str(tmp_path / "run")}

    first = finished(config, "--stop-file", stopped_at_once)
    assert first.steps == undisturbed.steps[:1]
    assert (first.directory / "STOPPED").read_text() == first.saved_iteration + "\n" == "1\n"
    assert not (first.directory / "DONE").exists()
    [stop] = [event for event in first.events if event["event"] == "stop"]
    assert (stop["iteration"], stop["reason"]) == (1, f"asked to stop ({stopped_at_once})")

    second = finished(config)
    assert second.steps == undisturbed.steps
    assert second.evaluations == undisturbed.evaluations
    assert (second.directory / "DONE").read_text().split()[0] == second.saved_iteration == "6"
    assert not (second.directory / "STOPPED").exists()
    assert_same_checkpoint(second.checkpoints / "iter_0000006", undisturbed.checkpoints / "iter_0000006")

    third = finished(config)
    assert "nothing to do" in third.log
    assert third.steps == undisturbed.steps


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        pytest.param(
            (2, {"tensor_model_parallel_size": 2}), (2, {"pipeline_model_parallel_size": 2}), id="TP2-PP2"
        ),
        pytest.param((2, {}), (1, {}), id="DP2-DP1", marks=pytest.mark.slow),
        pytest.param(
            (4, {"num_distributed_optimizer_instances": 2}),
            (2, {}),
            id="instances-DP2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (2, {}),
            (4, {"num_distributed_optimizer_instances": 2}),
            id="DP2-instances",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
            (1, {}),
            id="VPP2-single",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (1, {}),
            (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
            id="single-VPP2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (2, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}),
            (2, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettt|tL"}),
            id="uneven-uneven",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_checkpoint_resumes_at_another_layout(
    saving: tuple[int, dict[str, Any]],
    loading: tuple[int, dict[str, Any]],
    config: dict[str, Any],
    single_gpt: Run,
    stopped_at_once: str,
) -> None:
    config["training"]["micro_batch_size"] = 4 // max(2, saving[0], loading[0])
    config["world_size"], config["parallelism"] = saving
    finished(config, "--stop-file", stopped_at_once)
    config["world_size"], config["parallelism"] = loading
    numpy.testing.assert_allclose(finished(config).steps, single_gpt.steps, rtol=0, atol=1e-4)


@pytest.mark.parametrize("number", [signal.SIGUSR2, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_any_rank_stops_all_of_them(number: signal.Signals, config: dict[str, Any]) -> None:
    config["world_size"] = 2
    config["training"]["train_iters"] = 100_000
    ranks = Ranks(config)
    ranks.wait_for_step()
    for _ in range(3):  # Slurm sends SIGTERM more than once
        ranks.send(number, rank=1)
    result = ranks.wait()
    assert result.statuses == (0, 0), result.log
    assert (result.directory / "STOPPED").read_text() == result.saved_iteration + "\n"
    assert int(result.saved_iteration) == result.steps[-1][0]


def test_ctrl_c_saves_and_leaves(config: dict[str, Any]) -> None:
    config["training"]["train_iters"] = 100_000
    ranks = Ranks(config)
    ranks.wait_for_step()
    ranks.send(signal.SIGINT)
    result = ranks.wait()
    assert result.statuses == (0,), result.log
    assert "interrupted; saving at the end of this step" in result.log
    assert (result.directory / "STOPPED").read_text() == result.saved_iteration + "\n"


def test_a_finished_run_refuses_another_configuration(config: dict[str, Any], single_gpt: Run) -> None:
    shutil.copytree(single_gpt.directory, config["run_dir"])
    config["optimizer"]["lr"] = 5e-2
    config["checkpoint"] = {"changed": ["optimizer.lr"]}
    other = run(config)
    assert other.statuses == (2,)
    assert "is finished, but this configuration differs from it: optimizer.lr: 0.01 -> 0.05" in other.log
    assert (
        "set a larger training.train_iters and checkpoint.changed: [optimizer.lr, optimizer.min_lr]"
        in other.log
    )
    config["model"]["num_layers"] = 2
    assert "Use another paths.run_dir for another experiment\n" in run(config).log
    assert other.steps == single_gpt.steps
    assert (other.directory / "DONE").exists()


def test_fewer_steps_than_are_done_are_refused(config: dict[str, Any], single_gpt: Run) -> None:
    shutil.copytree(single_gpt.directory, config["run_dir"])
    config["training"]["train_iters"] = 4
    config["optimizer"]["lr_decay_iters"] = 6
    shorter = run(config)
    assert shorter.statuses == (2,)
    assert "it is at iteration 6, but training.train_iters = 4 is smaller" in shorter.log
    assert (shorter.directory / "DONE").exists()


def test_a_finished_run_whose_checkpoints_are_gone_is_not_trained_again(config: dict[str, Any]) -> None:
    config["training"]["train_iters"] = 2
    first = finished(config)
    shutil.rmtree(first.checkpoints)
    assert "iteration 2 is done, nothing to do" in finished(config).log
    config["training"]["seed"] = 7
    again = run(config)
    assert again.statuses == (2,)
    assert "DONE says that iteration '2' was the last" in again.log
    assert again.steps == first.steps


@pytest.mark.slow  # older checkpoints and fine-tuning below
def test_load_is_where_a_run_without_checkpoints_starts(
    config: dict[str, Any], single_gpt: Run, one_step: Run
) -> None:
    config["checkpoint"] = {"load": str(one_step.checkpoints)}
    second = finished(config)
    assert second.steps == single_gpt.steps[1:]
    assert second.saved_iteration == "6"


def test_an_interrupted_save_is_not_loaded_and_is_repeated(config: dict[str, Any], single_gpt: Run) -> None:
    torn = Path(config["run_dir"]) / "checkpoints" / "iter_0000006"
    torn.mkdir(parents=True)
    (torn / "STARTED").touch()
    (torn / "__0_0.distcp").write_bytes(b"half")
    result = finished(config)
    assert f"{torn}: COMPLETE is missing. Its save was interrupted, so it was removed" in result.log
    assert result.steps == single_gpt.steps
    assert_same_checkpoint(torn, single_gpt.checkpoints / "iter_0000006")


def test_a_broken_checkpoint_is_skipped(config: dict[str, Any], single_gpt: Run, saved_often: Run) -> None:
    config["checkpoint"] = {"save_interval": 2}
    first = Path(shutil.copytree(saved_often.directory, config["run_dir"]))
    (first / "DONE").unlink()
    (first / "checkpoints" / "iter_0000006" / ".metadata").unlink()
    second = finished(config)
    assert "iter_0000006: .metadata is missing. It was renamed to iter_0000006.broken" in second.log
    assert f"continues from {second.checkpoints / 'iter_0000004'}" in second.log
    assert second.steps == single_gpt.steps
    assert_same_checkpoint(second.checkpoints / "iter_0000006", single_gpt.checkpoints / "iter_0000006")


def test_a_run_that_saved_once_never_starts_from_zero(config: dict[str, Any], stopped: Run) -> None:
    (stopped.checkpoints / "iter_0000001" / ".metadata").unlink()
    second = run(config)
    assert second.statuses == (2,)
    assert "iter_0000001" in second.log
    assert "set checkpoint.discard_up_to: 1, or use another paths.run_dir" in second.log
    assert second.steps == stopped.steps
    assert not (second.directory / "DONE").exists()


@pytest.mark.usefixtures("stopped")
def test_a_checkpoint_of_another_shape_is_refused(config: dict[str, Any]) -> None:
    config["model"]["hidden_size"] = 32
    result = run(config)
    assert result.statuses == (2,)
    assert "belongs to another model: model.hidden_size: 64 -> 32" in result.log


@pytest.mark.usefixtures("stopped")
def test_the_learning_rate_of_the_configuration_wins_over_the_checkpoints(config: dict[str, Any]) -> None:
    config["optimizer"] |= {"lr": 1e-4, "lr_decay_style": "constant"}
    config["checkpoint"] = {"changed": ["optimizer.lr", "optimizer.min_lr", "optimizer.lr_decay_style"]}
    assert [lr for *_, lr in finished(config).steps[1:]] == [1e-4] * 5


def test_a_run_of_half_precision_continues_in_fp32_with_its_fp32_weights(config: dict[str, Any]) -> None:
    """In fp32, the model and the optimizer share their weights. The checkpoint has rounded ones for the model."""
    config["model"] = MOE | TWO_LAYERS
    config["training"] |= {"precision": "bf16", "train_iters": 2}
    before = load_all(finished(config).checkpoints / "iter_0000002")
    config["training"] |= {"precision": "fp32", "train_iters": 3}
    config["optimizer"] |= {"lr": 1e-30, "min_lr": 0.0, "weight_decay": 0.0}
    changed = ["training.precision", "optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay"]
    config |= {"world_size": 2, "checkpoint": {"changed": [*changed, "optimizer.lr_decay_iters"]}}
    after = load_all(finished(config).checkpoints / "iter_0000003")
    in_fp32 = {name: before.get(f"optimizer.state.param.{name}") for name in before}
    assert any(
        exact is not None and not torch.equal(exact, before[name].float()) for name, exact in in_fp32.items()
    )
    for name, exact in in_fp32.items():
        assert exact is None or torch.equal(after[name], exact), name


def test_checkpoints_load_as_core_describes_them(single_gpt: Run) -> None:
    common = dist_checkpointing.load_common_state_dict(str(single_gpt.checkpoints / "iter_0000006"))
    assert common["iteration"] == 6
    assert common["checkpoint_version"] == 3.0


@pytest.mark.usefixtures("stopped")
def test_a_changed_batch_would_read_other_samples_and_is_refused(config: dict[str, Any]) -> None:
    config["training"]["global_batch_size"] = 8
    result = run(config)
    assert result.statuses == (2,)
    assert "training.global_batch_size: 4 -> 8" in result.log
    assert "training.global_batch_size: 4 -> 8" in (result.directory / "FAILED").read_text()


def test_tokens_are_counted_by_the_length_that_samples_had(
    config: dict[str, Any], stopped_at_once: str
) -> None:
    config["model"] = LLAMA | {"max_position_embeddings": 64}
    finished(config, "--stop-file", stopped_at_once)
    config["model"]["seq_length"] = 32
    config["checkpoint"] = {"changed": ["model.seq_length"]}
    result = finished(config)
    tokens = [4 * 64 + 4 * 32 * later for later in range(6)]
    assert read_history(result.directory / "metrics.jsonl").columns["consumed_tokens"].tolist() == tokens
    record = checkpoint_files.read_record(result.checkpoints / "iter_0000006")
    assert checkpoint_files.consumed_tokens(record) == tokens[-1]


def test_finetuning_loads_the_weights_and_starts_at_iteration_0(
    config: dict[str, Any], single_gpt: Run
) -> None:
    config["checkpoint"] = {"load": str(single_gpt.checkpoints), "finetune": True}
    config["optimizer"]["weight_decay"] = 0.0  # other hyperparameters need not be named
    result = finished(config)
    assert f"starts from the weights of {single_gpt.checkpoints / 'iter_0000006'} (iteration 6)" in result.log
    (iteration, loss, _, lr), *_ = result.steps
    assert (iteration, lr) == (1, 0.0)
    assert loss < single_gpt.steps[0][1] - 0.2
    assert result.saved_iteration == "6"


@pytest.mark.parametrize("finetune", [False, True])
def test_a_run_starts_from_one_older_checkpoint_by_its_path(
    config: dict[str, Any], single_gpt: Run, saved_often: Run, finetune: bool
) -> None:
    older = saved_often.checkpoints / "iter_0000004"
    config["checkpoint"] = {"load": str(older), "finetune": finetune}
    if finetune:
        config["training"]["train_iters"] = 1
        config["optimizer"]["lr_warmup_iters"] = 0
    result = finished(config)
    assert f"{older} (iteration 4)" in result.log
    if finetune:
        assert result.steps[0][0] == 1
    else:
        assert result.steps == single_gpt.steps[4:]


def test_a_directory_to_start_from_must_hold_a_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    config["checkpoint"] = {"load": str(tmp_path)}
    (tmp_path / "checkpoints").mkdir()
    result = run(config)
    assert result.statuses == (2,)
    assert f"checkpoint.load = {str(tmp_path)!r} holds no valid checkpoint" in result.log
    assert f"Set it to {tmp_path}/checkpoints, the checkpoints of this run" in result.log
    assert not list(result.checkpoints.glob("iter_*"))


def test_older_checkpoints_are_removed_when_asked(config: dict[str, Any]) -> None:
    config["checkpoint"] = {"save_interval": 1, "keep_last": 2}
    config["training"]["train_iters"] = 3
    result = finished(config)
    assert sorted(path.name for path in result.checkpoints.glob("iter_*")) == ["iter_0000002", "iter_0000003"]


def test_two_runs_in_one_directory_are_refused(config: dict[str, Any]) -> None:
    config["training"]["train_iters"] = 100_000
    first = Ranks(config)
    first.wait_for_step()
    second = run(config)
    first.send(signal.SIGKILL)
    first.wait()
    assert second.statuses == (Exit.FAULT,)
    assert "another process is training in" in second.log


def test_two_runs_that_save_into_one_directory_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    config["checkpoint"] = {"save": str(tmp_path / "shared")}
    config["training"]["train_iters"] = 100_000
    first = Ranks(config)
    first.wait_for_step()
    second = run(config | {"run_dir": str(tmp_path / "second")})
    first.send(signal.SIGKILL)
    first.wait()
    assert second.statuses == (Exit.FAULT,)
    assert f"another process saves its checkpoints in {tmp_path / 'shared'}" in second.log
    assert not (second.directory / "FAILED").exists()
