"""A run never discards saved training, unless its configuration allows it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import hpcgen
from tests.trainer.runs import GPT, Ranks, Run, finished, gpt_config, run
from trainer.contract.errors import Exit
from trainer.contract.files.checkpoint_files import COMPLETE, TRACKER
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.resuming import evidence

pytestmark = pytest.mark.process


def config_of(corpus: str, directory: Path, **checkpoint: Any) -> dict[str, Any]:
    small = GPT | {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 512}
    return gpt_config(corpus, directory, small) | {"checkpoint": {"save_interval": 2, **checkpoint}}


@pytest.fixture(scope="module")
def saved(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose metrics name each checkpoint directly after its step."""
    return finished(config_of(corpus, tmp_path_factory.mktemp("saved"), async_save=False))


def refusal(directory: Path, **keys: Any) -> str:
    run_directory = RunDirectory(directory, directory / "checkpoints", directory / "index-cache")
    found = evidence.refusal(run_directory, **({"load": None, "begins_at": 0, "discard_up_to": None} | keys))
    return str(found or "")


def only_metrics(directory: Path) -> None:
    shutil.rmtree(directory / "checkpoints")
    (directory / "DONE").unlink()


def only_a_start(directory: Path) -> None:
    only_metrics(directory)
    start = {"event": "start", "iteration": 6, "checkpoint": "/elsewhere/iter_0000006"}
    (directory / "metrics.jsonl").write_text(json.dumps(start) + "\n")


def only_done(directory: Path) -> None:
    shutil.rmtree(directory / "checkpoints")
    for name in ("metrics.jsonl", "heartbeat", "trained-with.json"):
        (directory / name).unlink()


def only_stopped(directory: Path) -> None:
    only_done(directory)
    (directory / "DONE").rename(directory / "STOPPED")


def only_an_evaluation(directory: Path) -> None:
    only_done(directory)
    (directory / "DONE").unlink()
    (directory / "evaluation").mkdir()
    result = {"iteration": 4, "checkpoint": f"{directory}/checkpoints/iter_0000004"}
    (directory / "evaluation/iter_0000004.json").write_text(json.dumps(result))
    result = {"iteration": 5, "checkpoint": "/elsewhere/iter_0000005"}
    (directory / "evaluation/iter_0000005.json").write_text(json.dumps(result))


def lost_records(directory: Path) -> None:
    """As after a restore without checkpoints."""
    for name in ("metrics.jsonl", "heartbeat", "trained-with.json", "DONE"):
        (directory / name).unlink()
    (directory / "checkpoints" / TRACKER).unlink()
    for path in (directory / "checkpoints").glob("iter_*"):
        (path / COMPLETE).unlink()
        path.rename(f"{path}.broken")


@pytest.mark.parametrize(
    ("lose", "iteration", "named"),
    [
        (only_metrics, 6, "metrics.jsonl records the checkpoint"),
        (only_a_start, 6, "metrics.jsonl records a start from /elsewhere/iter_0000006"),
        (only_done, 6, "DONE says that iteration '6' was the last"),
        (only_stopped, 6, "STOPPED says that iteration '6' was the last"),
        (only_an_evaluation, 4, "evaluation/iter_0000004.json has the results of a checkpoint"),
        (lost_records, 4, "iter_0000004.broken was a checkpoint"),  # the save of 6 may have been cut off
    ],
)
def test_each_trace_of_saved_training_is_evidence(
    lose: Callable[[Path], None], iteration: int, named: str, saved: Run, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(saved.directory, directory)
    lose(directory)
    reason = refusal(directory)
    assert named in reason
    assert reason.endswith(f"set checkpoint.discard_up_to: {iteration}, or use another paths.run_dir")
    assert refusal(directory, discard_up_to=iteration) == ""
    too_late = refusal(directory, discard_up_to=iteration - 1)
    assert f"checkpoint.discard_up_to = {iteration - 1} does not allow that" in too_late
    assert refusal(directory, load="/elsewhere", begins_at=iteration) == ""
    assert "begin at iteration 1 " in refusal(directory, load="/archive", begins_at=1)


def test_a_run_that_never_completed_a_save_may_start_over(saved: Run, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(saved.checkpoints / "iter_0000002", directory / "checkpoints/iter_0000002.broken")
    (directory / "checkpoints/iter_0000002.broken" / COMPLETE).unlink()
    lines = (saved.directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(line for line in lines if '"checkpoint", ' not in line))
    assert refusal(directory) == ""


LEFT = (
    "metrics.jsonl",
    "heartbeat",
    "trained-with.json",
    "code",
    "tensorboard",
    "profile",
    "DONE",
    "STOPPED",
    "checkpoints",
)


def test_whatever_is_left_of_a_run_is_evidence(saved: Run, tmp_path: Path) -> None:
    for number in range(2 ** len(LEFT)):
        names = [name for bit, name in enumerate(LEFT) if number >> bit & 1]
        directory = leave(saved, tmp_path / str(number), names)
        reason = refusal(directory)
        assert bool(reason) is bool(names), names
        if names:
            assert re.search(r"set checkpoint.discard_up_to: [06], or use another paths.run_dir", reason)
            assert refusal(directory, discard_up_to=6) == ""


def leave(saved: Run, directory: Path, names: Collection[str]) -> Path:
    """A run directory with only these files of `saved`. Its checkpoints are gone except for the tracker."""
    directory.mkdir(exist_ok=True)
    for name in names:
        if name in ("code", "tensorboard", "profile"):
            (directory / name).mkdir()
            (directory / name / "file").touch()
        elif name == "checkpoints":
            (directory / name).mkdir()
            shutil.copy(saved.checkpoints / TRACKER, directory / name)
        else:
            shutil.copy(saved.directory / ("DONE" if name == "STOPPED" else name), directory / name)
    return directory


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def zeros(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def zeros_at_the_end(path: Path) -> None:
    """As after a power failure."""
    path.write_bytes(path.read_bytes().replace(b'"checkpoint"', b'"step"') + b"\0" * 4096)


def no_text(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"e", b"\xff"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = ("metrics.jsonl", "heartbeat", "trained-with.json", "DONE", "STOPPED", f"checkpoints/{TRACKER}")
DAMAGES = (nothing, zeros, zeros_at_the_end, no_text, cut, a_directory)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_evidence_as_well(
    name: str, damage: Callable[[Path], None], saved: Run, tmp_path: Path
) -> None:
    """Alone, and next to metrics.jsonl that is damaged in the same way."""
    directory = leave(saved, tmp_path / "alone", [name.partition("/")[0]])
    damage(directory / name)
    is_new = (name, damage) == ("metrics.jsonl", nothing)  # as before the first line of the first attempt
    assert bool(refusal(directory)) is not is_new
    directory = leave(
        saved, tmp_path / "both", {"metrics.jsonl", "trained-with.json", name.partition("/")[0]}
    )
    for each in {"metrics.jsonl", name}:
        damage(directory / each)
    assert refusal(directory)
    assert refusal(directory, load="/archive", begins_at=1)


@pytest.mark.parametrize("name", ["heartbeat", "trained-with.json", "code", "tensorboard", "profile"])
def test_what_a_run_leaves_before_its_first_save_is_no_evidence(
    name: str, saved: Run, tmp_path: Path
) -> None:
    directory = leave(saved, tmp_path, ["metrics.jsonl", name])
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    unsaved = [line for line in lines if '"checkpoint", ' not in line]
    (directory / "metrics.jsonl").write_text("".join(unsaved) + unsaved[-1][:20])  # killed while writing
    assert refusal(directory) == ""
    (directory / "metrics.jsonl").write_text("".join(unsaved) + '{"event": "checkpoint", "itera')
    assert "a checkpoint in a line that is incomplete" in refusal(directory)


@pytest.mark.parametrize("damage", [Path.unlink, zeros])
def test_a_run_without_checkpoints_and_metrics_is_refused_again_and_again(
    corpus: str, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """A refused start must not remove the evidence, also if only the heartbeat shows it."""
    config = config_of(corpus, tmp_path)
    config["training"]["train_iters"] = 100_000
    ranks = Ranks(config)
    ranks.wait_for_step()
    while (evidence.reached_iteration(tmp_path / "heartbeat") or 0) < 1:
        time.sleep(0.1)
    ranks.send(signal.SIGKILL)
    ranks.wait()
    shutil.rmtree(tmp_path / "checkpoints")
    damage(tmp_path / "metrics.jsonl")
    for name in ("metrics.jsonl", "trained-with.json"):
        (tmp_path / name).unlink(missing_ok=damage is Path.unlink)
    for _ in range(2):
        refused = run(config)
        assert refused.statuses == (Exit.REFUSED,), refused.log
        assert f"{tmp_path}/heartbeat says that iteration " in refused.log


def test_training_is_discarded_only_by_name(corpus: str, saved: Run, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(saved.directory, directory)
    shutil.rmtree(directory / "checkpoints")
    before = (directory / "metrics.jsonl").read_bytes()
    for _ in range(2):
        refused = run(config_of(corpus, directory))
        assert refused.statuses == (Exit.REFUSED,), refused.log
        assert f"{directory}/DONE says" in refused.log or "metrics.jsonl records" in refused.log
        assert (directory / "metrics.jsonl").read_bytes() == before
    again = finished(config_of(corpus, directory, discard_up_to=6))
    assert again.steps == saved.steps
    assert (directory / "metrics.jsonl.1").read_bytes() == before
    kinds = [event["event"] for event in again.events[:3]]
    assert kinds == ["start", "first_step", "start"]  # the story of the run
    [summary] = json.loads(hpcgen("report", directory, "--json").stdout)
    assert (summary["state"], summary["iteration"]) == ("done", 6)
