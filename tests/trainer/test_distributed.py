"""Detection of the launcher from the environment, and the rendezvous of ranks."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistStoreError, TCPStore

from tests.patience import PATIENCE_S
from tests.trainer import runs
from tests.trainer.forked import ForkedPython, run_python
from tests.trainer.runs import run
from trainer.contract.errors import TrainerError
from trainer.distributed.rendezvous import Ranks, candidate_ports, find_ranks, open_store

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


def test_a_launcher_that_sets_invalid_ranks_is_named() -> None:
    with pytest.raises(TrainerError, match=r"srun must set .*SLURM_PROCID=x"):
        find_ranks(STEP | {"SLURM_PROCID": "x"})


@pytest.mark.process
def test_another_number_of_ranks_than_planned_is_refused(config: dict[str, Any]) -> None:
    config["world_size"] = 1
    config["parallelism"] = {"tensor_model_parallel_size": 2}
    result = run(config)
    assert result.statuses == (2,)
    assert (
        "world_size = 1 results in 1 rank, which TP x PP x CP = 2 x 1 x 1 = 2 does not divide" in result.log
    )


@pytest.mark.process
def test_a_restart_by_torchrun_does_not_see_messages_of_the_previous_attempt() -> None:
    """The agent's store survives: an address of a dead rank, or its answer to SIGTERM, is not this attempt's."""
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


@contextlib.contextmanager
def taken(port: int, *, hangs_up: bool) -> Iterator[None]:
    """A service that sends nothing, or that closes each connection at once."""

    def hang_up() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", port)) as listener:
        if hangs_up:
            threading.Thread(target=hang_up, daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.process
def test_ranks_skip_ports_of_other_programs(config: dict[str, Any]) -> None:
    """Another job with the same number of ranks and the same first port uses two of the ports."""
    ports = candidate_ports(int(runs.free_port()))
    first = ports[0]
    config["world_size"] = 2
    config["training"]["train_iters"] = 1
    config["optimizer"]["lr_warmup_iters"] = 0
    timeout = datetime.timedelta(seconds=10)
    of_another = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(first), "TRAINER_RENDEZVOUS_ID": "another"}
    with taken(first, hangs_up=False), taken(ports[1], hangs_up=True):
        store = TCPStore("127.0.0.1", ports[2], is_master=True, wait_for_workers=False)
        another = open_store(Ranks(0, 0, 2, "a test"), of_another, timeout, waits=False)
        found = runs.Ranks(config, port=str(first)).wait()
    assert found.statuses == (0, 0), found.log
    assert f"rank 0: port {first} is in use; the ranks meet at port {ports[4]}" in found.log
    assert store.num_keys() + another.num_keys() <= 2, "nothing was said at the stores of others"


@pytest.mark.process
def test_a_missing_rank_is_named_in_time() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": runs.free_port(), "TRAINER_RENDEZVOUS_ID": "one"}
    with pytest.raises(
        DistStoreError, match="1 of 2 ranks did not connect within 0:00:01, rank 1 among them"
    ):
        open_store(Ranks(0, 0, 2, "a test"), environ, datetime.timedelta(seconds=1))
    environ["TRAINER_RENDEZVOUS_ID"] = "two"
    with pytest.raises(DistStoreError, match="rank 0 did not answer within 0:00:01 at"):
        open_store(Ranks(1, 1, 2, "a test"), environ, datetime.timedelta(seconds=1))


FAILING_AT_RANK_0 = """
import sys
from trainer.distributed import device
device.prepare("cpu")
import torch.distributed as dist
from trainer.contract.errors import NotSavedError
from trainer.distributed.groups import from_rank_0

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
for error in (NotSavedError("full", retry=True), ValueError("a bug")):
    def fail():
        raise error
    try:
        from_rank_0(fail)
    except Exception as raised:
        print(type(raised).__name__, raised, getattr(raised, "scope", None), getattr(raised, "retry", None))
"""


@pytest.mark.process
def test_an_error_of_rank_0_is_raised_on_all_ranks_and_a_bug_is_reported_by_rank_0(tmp_path: Path) -> None:
    outputs = [tmp_path / f"output-{rank}" for rank in (0, 1)]
    ranks = [
        ForkedPython(
            ["-c", FAILING_AT_RANK_0, str(rank), str(tmp_path / "store")],
            os.environ,
            output,
            tmp_path / "errors",
        )
        for rank, output in enumerate(outputs)
    ]
    assert [rank.wait(timeout=PATIENCE_S) for rank in ranks] == [0, 0], (tmp_path / "errors").read_text()
    expected = "NotSavedError full Scope.ALL_RANKS True\n"
    assert [output.read_text() for output in outputs] == [
        f"{expected}ValueError a bug None None\n",
        f"{expected}ReportedByRank0Error ValueError: a bug None None\n",
    ]


WITHOUT_A_COMPILER = """
import runpy, sys
try:
    runpy.run_module("trainer", run_name="__main__")
finally:
    print("imported:", "torch._dynamo" in sys.modules)
"""


@pytest.mark.process
def test_a_run_on_a_cpu_does_not_import_torchs_compiler(config: dict[str, Any], tmp_path: Path) -> None:
    """It starts, saves and resumes."""
    config["training"] |= {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    config["optimizer"]["lr_decay_iters"] = 6
    environ = runs.environment(0, 1, runs.free_port())
    for iterations in (2, 3):
        config["training"]["train_iters"] = iterations
        (tmp_path / "run.json").write_text(json.dumps(config))
        done = run_python("-c", WITHOUT_A_COMPILER, "--config", str(tmp_path / "run.json"), env=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"iteration {iterations}/{iterations}" in done.stdout
        assert "imported: False" in done.stdout


@pytest.mark.process
def test_device_contexts_hold_for_the_replaced_factories() -> None:
    """transformers builds models on the meta device, and would otherwise leave their buffers uninitialized."""
    program = (
        "import torch; from trainer.distributed import device; device.stand_in_for_cuda()\n"
        "with torch.device('meta'): print(torch.arange(3).device, torch.empty(3).device)\n"
        "print(torch.empty(3, device='cuda').device)"
    )
    done = run_python("-c", program)
    assert done.stdout == "meta meta\ncpu\n", done.stderr
