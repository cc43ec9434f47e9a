"""The ledger of runs that were killed, compared with a record of their steps that does not depend on the trainer's."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from hpcgen.ledger.read import read_ledger
from tests.trainer.killed_runs import train_with_kills
from tests.trainer.runs import gpt_config

pytestmark = pytest.mark.process


@pytest.mark.parametrize("kills", [pytest.param(2), pytest.param(30, marks=pytest.mark.slow)])
def test_lost_time_is_exact_to_one_step(corpus: str, tmp_path: Path, kills: int) -> None:
    config = gpt_config(corpus, tmp_path / "run")
    config["training"] |= {"train_iters": 5 * kills + 10, "eval_iters": 1, "eval_interval": 4}
    config["checkpoint"] = {"save_interval": 3}
    attempts = train_with_kills(config, kills, seed=kills)
    ledger = read_ledger(tmp_path / "run", time.time())
    assert [len(attempts), ledger.failures.count] == [kills + 1, kills]
    resumed = [recorded.steps[0].iteration - 1 for recorded in attempts]
    for recorded, after, found in zip(attempts, resumed[1:], ledger.attempts, strict=False):
        assert found.spent.parts["redone"] == pytest.approx(recorded.lost_s(after), abs=recorded.longest_s)
        assert abs(found.lost_steps - (recorded.steps[-1].iteration - after)) <= 1
    kept = [
        step
        for recorded, after in itertools.zip_longest(attempts, resumed[1:])
        for step in recorded.steps
        if after is None or step.iteration <= after
    ]
    longest_s = max(recorded.longest_s for recorded in attempts)
    steps_s = sum(step.seconds for step in kept)
    assert ledger.spent.parts["productive"] == pytest.approx(steps_s, abs=longest_s * (kills + 1), rel=0.05)
    assert sum(ledger.spent.parts.values()) == pytest.approx(ledger.ended - ledger.began, rel=1e-6)
    assert ledger.spent.parts["unaccounted"] < 0.01 * ledger.spent.wall_s
