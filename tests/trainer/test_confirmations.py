"""An entry of checkpoint.changed confirms one change. Left in the run file, it confirms nothing more."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import Ranks, finished, run
from tests.trainer.test_hyperparameters import SAVED
from tests.trainer.test_hyperparameters import run as configured
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.resuming import provenance
from trainer.contract.resuming.change import Change
from trainer.contract.resuming.confirmations import Confirmations
from trainer.contract.resuming.hyperparameters import NAMES, check_changes, sections
from trainer.contract.resuming.provenance import PAIRS

FILES = (*PAIRS, "model.layer_spec", "model.model_provider", "optimizer.lr_schedule")
"""Keys whose files may change."""


class History:
    """A run whose checkpoints differ from its configuration in one key, or in the file that it names."""

    def __init__(self, name: str, is_content: bool) -> None:
        self.name, self.is_content = name, is_content
        self.value = 0
        self.record: dict[str, Any] = {"iteration": 0}

    def change(self) -> None:
        """Another value or content."""
        self.value += 1

    def start(self, *entries: str, saves_at: int | None = None) -> tuple[Change, ...]:
        """Start an attempt, which saves a checkpoint if `saves_at` is given."""
        section, _, key = self.name.partition(".")
        saved = copy.deepcopy(SAVED)
        saved["model"]["position_embedding_type"] = "rope"  # so that max_position_embeddings may change
        contents: tuple[Change, ...] = ()
        if self.is_content:
            before = self.record.get("content", 0)
            contents = (Change(self.name, before, self.value, is_content=True),) * (before != self.value)
        elif self.record.get("content", 0) != self.value:
            saved[section][key] = "another value"
        config = configured(entries, model__position_embedding_type="rope")
        confirmations = Confirmations.of(config.checkpoint.changed, self.record)
        changes = check_changes(saved, config, contents=contents, confirmations=confirmations)
        if saves_at is not None:
            self.record = {
                "iteration": saves_at,
                "content": self.value,
                "confirmed": confirmations.after(changes),
            }
        return changes

    def refused(self, *entries: str) -> str:
        """Start an attempt that is refused. Returns the list that the message offers."""
        with pytest.raises(TrainerError) as error:
            self.start(*entries)
        offered = re.search(r"set checkpoint\.changed: \[(.*?)\]; otherwise", str(error.value))
        assert offered, error.value
        return offered[1]


@pytest.mark.parametrize(
    ("name", "is_content"), [(name, False) for name in NAMES] + [(name, True) for name in FILES]
)
def test_a_name_that_is_left_over_confirms_nothing(name: str, is_content: bool) -> None:
    history = History(name, is_content)
    history.start(saves_at=100)
    history.change()
    assert history.refused() == name
    assert len(history.start(name)) == 1  # killed before its first checkpoint
    assert len(history.start(name, saves_at=200)) == 1
    assert history.start(name, saves_at=300) == ()  # the requeue, with the same trainer.json
    history.change()
    assert history.refused(name) == history.refused() == f"{name}@300"
    assert len(history.start(f"{name}@300", saves_at=400)) == 1
    assert history.start(f"{name}@300", saves_at=500) == ()
    history.change()
    assert history.refused(name, f"{name}@300") == f"{name}@500"
    assert len(history.start(f"{name}@450", saves_at=700)) == 1  # any iteration after the last change
    history.change()
    assert len(history.start(f"{name}@9000", saves_at=800)) == 1
    history.change()
    assert history.refused(name, f"{name}@450", f"{name}@9000") == f"{name}@9001"  # it is left over, too
    assert len(history.start(f"{name}@9001")) == 1


@pytest.mark.parametrize("iteration", [0, 100], ids=["from the start", "left from 0.2.0"])
def test_an_attempt_uses_its_names_even_without_a_change(iteration: int) -> None:
    """Checkpoints of 0.2.0 record no names."""
    history = History("optimizer.lr", is_content=False)
    history.record = {"iteration": iteration}
    history.start("optimizer.lr", saves_at=200)
    history.change()
    assert history.refused("optimizer.lr") == "optimizer.lr@200"


def test_going_back_to_a_checkpoint_goes_back_to_what_it_records() -> None:
    history = History("optimizer.lr", is_content=False)
    history.start(saves_at=100)
    older = history.record
    history.change()
    history.start("optimizer.lr", saves_at=200)
    history.record = older
    assert len(history.start("optimizer.lr")) == 1


def test_an_older_checkpoint_does_not_need_another_entry() -> None:
    """The requeue of a job whose newest checkpoint turned out to be damaged, with the same trainer.json."""
    history = History("optimizer.lr", is_content=False)
    history.start("optimizer.lr", saves_at=100)
    history.change()
    older = {**history.record, "content": 0}
    history.record = older | {"iteration": 200}
    assert len(history.start("optimizer.lr@200")) == 1
    history.record = older
    assert len(history.start("optimizer.lr@200", saves_at=150)) == 1
    history.change()
    assert history.refused("optimizer.lr@200") == "optimizer.lr@201"


def test_entries_of_another_run_are_left_over() -> None:
    """A run file that was copied, with entries for iterations that the new run has yet to reach."""
    history = History("optimizer.lr", is_content=False)
    history.start("optimizer.lr@300", saves_at=500)
    history.change()
    assert history.refused("optimizer.lr@300") == "optimizer.lr@500"


def test_entries_of_other_names_stay_as_they_are_in_the_list() -> None:
    confirmations = Confirmations(
        ("optimizer.lr", "training.seed", "optimizer.min_lr@50"),
        iteration=100,
        used={
            "optimizer.lr": {"iteration": 10, "before": 1, "after": 2},
            "optimizer.min_lr": {"iteration": 10},
        },
    )
    changes = [Change(name, 1, 2) for name in ("optimizer.lr", "optimizer.min_lr", "optimizer.clip_grad")]
    assert confirmations.list_for(changes) == "[optimizer.min_lr@50, optimizer.lr@100, optimizer.clip_grad]"
    assert list(confirmations.spent()) == [
        "optimizer.lr, which was used at iteration 10 for 1 -> 2 and confirms nothing more",
    ]


def test_a_pair_is_read_again_whatever_is_named(tmp_path: Path) -> None:
    """The samples read of it count only if its content has not changed."""
    for suffix in ("idx", "bin"):
        (tmp_path / f"own.{suffix}").write_bytes(b"12345678")
    config = configured(("data.datasets",), data__datasets=[{"prefix": str(tmp_path / "own")}])
    [pair] = provenance.examine(config).origins["pairs"]["data.datasets"]
    pair["bin"] |= {"sha256": "0" * 64, "modified_ns": 1}
    record = {"iteration": 9, **sections(config), "origins": {"pairs": {"data.datasets": [pair]}}}
    assert provenance.examine(config, record).to_hash
    record["confirmed"] = {"data.datasets": {"iteration": 5}}
    assert list(provenance.examine(config, record).to_hash) == [f"{tmp_path}/own.bin"]


@pytest.mark.process
def test_a_run_with_a_name_that_is_left_over(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    stops = ("--stop-file", str(tmp_path / "stop"))
    finished(config, *stops)

    names = ["optimizer.lr", "optimizer.min_lr"]
    config["optimizer"]["lr"] = 2e-2
    config["checkpoint"] = {"changed": names}
    decay = {"lr_decay_iters": 6, "lr_warmup_iters": 1}
    killed = copy.deepcopy(config)
    killed["training"]["train_iters"] = 100_000
    killed["optimizer"] |= decay
    ranks = Ranks(killed)
    ranks.wait_for_step()
    for process in ranks.processes:
        process.kill()
    ranks.wait()

    assert "(iteration 1) with optimizer.lr: 0.01 -> 0.02, " in finished(config, *stops).log
    record = checkpoint_files.read_record(tmp_path / "run/checkpoints/iter_0000002")
    assert record["confirmed"]["optimizer.lr"] == {"iteration": 1, "before": 0.01, "after": 0.02}

    requeued = finished(config, *stops)
    assert (
        "checkpoint.changed has optimizer.lr, which was used at iteration 1 for 0.01 -> 0.02 and confirms nothing "
        "more. Remove it" in requeued.log
    )

    config["optimizer"]["lr"] = 0.1
    refused = run(config)
    assert refused.statuses == (2,)
    both = "[optimizer.lr@3, optimizer.min_lr@3]"
    assert (
        f"If this is intended, set checkpoint.changed: {both}; otherwise set optimizer.lr = 0.02"
        in refused.log
    )
    config["checkpoint"] = {"changed": both[1:-1].split(", ")}
    assert [event["changed"] for event in finished(config).events if event["event"] == "start"][-1] == [
        ["optimizer.lr", 0.02, 0.1],
        ["optimizer.min_lr", 0.002, 0.01],
    ]
