"""Who launched this process, from its environment."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.trainer.runs import run
from trainer.errors import TrainerError
from trainer.rendezvous import Ranks, find_ranks, open_store

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


def test_a_life_that_torchrun_starts_again_hears_nothing_of_the_one_before() -> None:
    """The agent's store goes on: an address of a dead rank, or its answer to SIGTERM, is not this life's."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks, timeout = Ranks(0, 0, 2, "torchrun"), datetime.timedelta(seconds=10)
    first = open_store(ranks, environ | {"TORCHELASTIC_RESTART_COUNT": "0"}, timeout, waits=False)
    first.set("terminated", "0 yes")
    second = open_store(ranks, environ | {"TORCHELASTIC_RESTART_COUNT": "1"}, timeout, waits=False)
    assert first.check(["terminated"])
    assert not second.check(["terminated"])
