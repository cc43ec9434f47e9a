"""A run never discards saved training, unless its configuration allows it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import hpcgen
from tests.trainer.runs import GPT, Run, finished, gpt_config, run
from trainer.contract import evidence
from trainer.contract.checkpoint_files import COMPLETE, TRACKER
from trainer.contract.errors import Exit

pytestmark = pytest.mark.process


def config_of(corpus: str, directory: Path, **checkpoint: Any) -> dict[str, Any]:
    small = GPT | {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 512}
    return gpt_config(corpus, directory, small) | {"checkpoint": {"save_interval": 2, **checkpoint}}


@pytest.fixture(scope="module")
def saved(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(config_of(corpus, tmp_path_factory.mktemp("saved")))


def refusal(directory: Path, **keys: Any) -> str:
    found = evidence.refusal(
        directory, directory / "checkpoints", **({"load": None, "begins_at": 0, "discard_up_to": None} | keys)
    )
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
    (directory / "metrics.jsonl").unlink()


def lost_records(directory: Path) -> None:
    """As after a restore without checkpoints."""
    (directory / "metrics.jsonl").unlink()
    (directory / "DONE").unlink()
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
    assert [event["event"] for event in again.events[:2]] == ["start", "start"]  # the story of the run
    [summary] = json.loads(hpcgen("report", directory, "--json").stdout)
    assert (summary["state"], summary["iteration"]) == ("done", 6)
