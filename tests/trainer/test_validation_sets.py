"""Named validation sets: each has a loss of its own, and training does not notice them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import finished, run, write_corpus
from trainer.contract.errors import Exit

pytestmark = pytest.mark.process


def by_pairs(config: dict[str, Any], run_dir: Path, data: dict[str, Any], **training: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config) | {"run_dir": str(run_dir)}
    train = [{"prefix": config["data"]["datasets"][0]["prefix"]}]
    changed["data"] = {"train": train, "num_workers": 0, **data}
    changed["training"] |= {"train_iters": 4, "eval_interval": 2, "eval_iters": 2, **training}
    return changed


def test_each_set_has_the_loss_that_it_would_have_as_the_only_one(
    config: dict[str, Any], other_corpus: str, tmp_path: Path
) -> None:
    near = write_corpus(tmp_path / "near", documents=20)
    sets = [
        {"name": "far", "datasets": [{"prefix": other_corpus}]},
        {"name": "both", "datasets": [{"prefix": other_corpus}, {"prefix": near}], "eval_iters": 3},
    ]
    valid = [{"prefix": near}]
    found = finished(by_pairs(config, tmp_path / "sets", {"validation": sets, "valid": valid}))
    assert [(iteration, split) for iteration, split, _ in found.evaluations] == [
        (iteration, split) for iteration in (2, 4) for split in ("valid", "valid/far", "valid/both")
    ]
    far = finished(by_pairs(config, tmp_path / "far", {"valid": sets[0]["datasets"]}))
    both = finished(by_pairs(config, tmp_path / "both", {"valid": sets[1]["datasets"]}, eval_iters=3))
    for split, alone in (("valid/far", far), ("valid/both", both)):
        losses = [(iteration, loss) for iteration, name, loss in found.evaluations if name == split]
        assert losses == [(iteration, loss) for iteration, _, loss in alone.evaluations]
        assert found.steps == alone.steps
    samples = {event["split"]: event["samples"] for event in found.events if event["event"] == "evaluation"}
    assert samples == {"valid": 8, "valid/far": 8, "valid/both": 12}


def test_a_set_of_the_training_pair_under_another_name_is_refused(
    config: dict[str, Any], corpus: str, tmp_path: Path
) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"copy{suffix}").hardlink_to(corpus + suffix)
    config["data"]["validation"] = [{"name": "copy", "datasets": [{"prefix": str(tmp_path / "copy")}]}]
    config["training"] |= {"eval_iters": 1}
    found = run(config)
    assert set(found.statuses) == {Exit.REFUSED}
    assert f"data.validation[0].datasets: {tmp_path / 'copy'} is the same pair as {corpus}" in found.log
