"""Who launched this process, from its environment."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.runs import run
from trainer.errors import TrainerError
from trainer.rendezvous import find_ranks

EXPLICIT = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
BATCH_SHELL = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}
STEP = BATCH_SHELL | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, (0, 0, 1), id="one plain process"),
        pytest.param(EXPLICIT | {"TORCHELASTIC_RUN_ID": "x"}, (3, 1, 4), id="torchrun"),
        pytest.param(STEP | EXPLICIT | {"TORCHELASTIC_RUN_ID": "x"}, (3, 1, 4), id="torchrun in a step"),
        pytest.param(STEP | EXPLICIT, (3, 1, 4), id="a launcher that sets the ranks"),
        pytest.param(STEP, (9, 1, 16), id="srun"),
        pytest.param(STEP | {"RANK": "9", "LOCAL_RANK": "1"}, (9, 1, 16), id="srun with pyxis"),
        pytest.param(BATCH_SHELL, (0, 0, 1), id="the shell of a batch script"),
        pytest.param(
            STEP | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            (0, 0, 1),
            id="a step of one task in a job of 16",
        ),
    ],
)
def test_ranks_come_from_the_launcher(environ: dict[str, str], expected: tuple[int, int, int]) -> None:
    ranks = find_ranks(environ)
    assert (ranks.rank, ranks.local_rank, ranks.world_size) == expected


def test_a_launcher_that_sets_nonsense_is_named() -> None:
    with pytest.raises(TrainerError, match=r"srun should set .*SLURM_PROCID=x"):
        find_ranks(STEP | {"SLURM_PROCID": "x"})


def test_another_number_of_ranks_than_planned_is_refused(config: dict[str, Any]) -> None:
    config["world_size"] = 1
    config["parallelism"] = {"tensor_model_parallel_size": 2}
    result = run(config)
    assert result.statuses == (2,)
    assert "world_size = 1 is not a multiple of TP x PP x CP = 2 x 1 x 1" in result.log
