"""Random faults change nothing in a training, and the run directory tells what happened.

`make chaos SEEDS="17 18"` runs all kinds of faults, in an order and at steps that each seed decides.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcgen.ledger.read import read_ledger
from hpcgen.runs.look import look
from tests.slurm.chaos import (
    DISK,
    FAULTS,
    KILL,
    LAYERS,
    SETTINGS,
    WARN,
    ChaosRun,
    Fault,
    disturb,
    small_disk,
)
from tests.slurm.cluster import SlurmCluster, missing_accounting, missing_slurm
from tests.slurm.conftest import TWO_RANKS, make_run
from tests.slurm.long_run import SAVE_INTERVAL

SEEDS = [int(seed) for seed in os.environ.get("SEEDS", "").split()] or [1]


def require_equal_curves(
    cluster: SlurmCluster, directory: Path, corpus: Path, python: str, faults: Sequence[Fault], seed: int
) -> None:
    """An undisturbed run, then one that meets the faults."""
    print(f"seed {seed}: {', '.join(fault.name for fault in faults)}")
    (directory / "layers.py").write_text(LAYERS)
    iterations = 3 * SAVE_INTERVAL * (len(faults) + 1)
    overrides = (
        *TWO_RANKS,
        f"training.train_iters={iterations}",
        f"optimizer.lr_decay_iters={iterations}",
        f"model.layer_spec={directory}/layers.py:layers",
        "training.distributed_timeout_seconds_after_init=10",
        "slurm.train.max_restarts=100",
    )

    def begin(name: str, *more: str) -> ChaosRun:
        (directory / name).mkdir()
        return ChaosRun(cluster, make_run(directory / name, corpus), *overrides, *more, python=python)

    expected = begin("undisturbed").wait_for_end()
    with small_disk(directory / "disk") as disk:
        run = begin("disturbed", f"checkpoint.save={disk}")
        run.checkpoints = disk
        disturb(run, faults, random.Random(seed))
        assert run.wait_for_end() == expected
    for attempt in run.attempts:
        assert attempt.steps.items() <= expected.items(), "what is computed twice is the same both times"
    assert [problem for report in run.reports for problem in report.problems()] == []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "SLURM_CONF"):
            patch.setenv(name, cluster.env[name])
        [status] = look([run.directory], time.time())
    assert status.state == "done", status
    redone = [attempt.last - start for attempt, start in zip(run.attempts, run.starts()[1:], strict=True)]
    assert read_ledger(run.directory, time.time()).lost_steps == sum(redone)


def test_faults_change_no_step_and_are_named(
    slurm_cluster: SlurmCluster, tmp_path: Path, byte_corpus: Path, stand_in: str
) -> None:
    seed = random.randrange(2**32)
    require_equal_curves(slurm_cluster, tmp_path, byte_corpus, stand_in, [KILL, WARN], seed)


@pytest.mark.slow
@pytest.mark.parametrize("accounting", [False, True], ids=["without-accounting", "with-accounting"])
@pytest.mark.parametrize("seed", SEEDS)
def test_all_kinds_of_faults(
    tmp_path: Path, byte_corpus: Path, stand_in: str, seed: int, accounting: bool
) -> None:
    if (reason := missing_slurm() or (missing_accounting() if accounting else None)) is not None:
        pytest.skip(reason)
    faults = [fault for fault in FAULTS if fault is not DISK or os.geteuid() == 0]
    random.Random(seed).shuffle(faults)
    with SlurmCluster(accounting=accounting, settings=SETTINGS) as cluster:
        require_equal_curves(cluster, tmp_path, byte_corpus, stand_in, faults, seed)
