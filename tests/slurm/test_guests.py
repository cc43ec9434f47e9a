"""The examples of stage run on three real Slurm nodes: a bad node, a killed rank, the time limit, and no progress.

Two of the programs are not installed with hpcgen, and their tests are skipped without these environment variables
(make test-guests):

- MEGATRON_LM: a checkout of Megatron-LM. Its version should be that of the installed megatron-core.
- TORCHTITAN_PYTHON: a Python with torchtitan 0.3.0.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcgen import api
from hpcgen.config import document
from tests.slurm.cluster import FINAL_STATES, SlurmCluster, missing_slurm
from tests.slurm.conftest import profile_text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MEGATRON_LM = os.environ.get("MEGATRON_LM", "")
TORCHTITAN_PYTHON = os.environ.get("TORCHTITAN_PYTHON", "")
JOB_S = 2400
"""More than any job takes on a busy machine."""

MEGATRON_LM_OPTIONS = (
    *("--distributed-backend=gloo", "--transformer-impl=local", "--use-cpu-initialization"),
    *("--no-gradient-accumulation-fusion", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
    *("--no-masked-softmax-fusion", "--no-persist-layer-norm", "--no-rope-fusion"),
    *("--num-layers=2", "--hidden-size=64", "--num-attention-heads=4", "--seq-length=64"),
    *("--micro-batch-size=1", "--global-batch-size=4", "--train-iters=120", "--lr-warmup-iters=2"),
    *("--save-interval=20", "--log-interval=1", "--eval-iters=0", "--num-workers=0"),
    *(
        "--mock-data",
        "--data-cache-path={RUN_DIR}/cache",
        "--tokenizer-type=NullTokenizer",
        "--vocab-size=999",
        "--dist-ckpt-optim-fully-reshardable",
    ),
)
"""Options that replace those of the example: a tiny model for CPUs."""
NOT_ON_CPUS = ("--bf16", "--data-path", "--sequence-parallel", "--split", "--tokenizer-model")

TORCHTITAN_OPTIONS = (
    *("--config=llama3_debugmodel", "--parallelism.spmd_backend=partial_dtensor", "--validator.no-enable"),
    *("--training.local-batch-size=1", "--training.seq-len=64", "--training.steps=120"),
    *("--checkpoint.interval=20", "--hf-assets-path=tokenizer"),
    *("--dataloader.dataset=c4_test", "--dataloader.dataset-path=text"),
)

TORCHRUN_OPTIONS = ("--steps=120", "--save-every=20", "--step-s=1")


SIGNAL_LEAD_S = 120
"""Slurm looks at time limits every 30 s, so a program has 30 s or more between the warning and the limit."""
SAVED_BEFORE_THE_LIMIT = "stopped with status 0 before the time limit at progress "


@dataclass(frozen=True, kw_only=True)
class Guest:
    """An example, changed to run on CPUs."""

    example: str
    command: tuple[str, ...]
    """The first words of the command, in place of the example's `num_replaced` first words."""
    num_replaced: int
    options: tuple[str, ...]
    resumes: str
    """Expression for the line that tells the step from which the program continues."""
    stops: str
    """Expression for the end of the attempt that reaches the time limit."""
    breaks: str
    """An option with which the program fails."""
    minutes_to_limit: int = 2
    """Minutes that the second attempt has after its first checkpoint, rounded down to the clock of the job."""
    last: int = 120


GUESTS = (
    pytest.param(
        Guest(
            example="program_megatron_lm",
            command=(sys.executable, str(ROOT / "tests/trainer/megatron_lm_driver.py"), MEGATRON_LM),
            num_replaced=2,
            options=MEGATRON_LM_OPTIONS,
            resumes=r"successfully loaded checkpoint from .* at iteration (\d+)",
            stops=SAVED_BEFORE_THE_LIMIT,
            breaks="--no-such-option",
        ),
        marks=pytest.mark.skipif(not MEGATRON_LM, reason="MEGATRON_LM does not name a checkout"),
        id="megatron_lm",
    ),
    pytest.param(
        Guest(
            example="program_torchtitan",
            command=(TORCHTITAN_PYTHON, str(ROOT / "tests/trainer/torchtitan_driver.py")),
            num_replaced=3,
            options=TORCHTITAN_OPTIONS,
            resumes=r"Training starts at step (\d+)",
            stops="out of time at progress ",
            breaks="--no-such-option",
            minutes_to_limit=1,
        ),
        marks=pytest.mark.skipif(not TORCHTITAN_PYTHON, reason="TORCHTITAN_PYTHON does not name a Python"),
        id="torchtitan",
    ),
    pytest.param(
        Guest(
            example="program_torchrun",
            command=("program_torchrun.py",),
            num_replaced=1,
            options=TORCHRUN_OPTIONS,
            resumes=r"resuming from step (\d+)",
            stops=SAVED_BEFORE_THE_LIMIT,
            breaks="--no-such-option",
        ),
        id="torchrun",
    ),
)


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[SlurmCluster]:
    if (reason := missing_slurm()) is not None:
        pytest.skip(reason)
    with SlurmCluster(num_nodes=3, kill_wait_s=30, first_job_id=random.randrange(300, 700)) as cluster:
        yield cluster


def run_of(guest: Guest, directory: Path, *more: str) -> Path:
    """A run file with the example's program on two nodes, of three of which ndv5-1 is bad."""
    values: dict[str, Any] = document.read(ROOT / "examples" / f"{guest.example}.yaml").values
    program = values["program"]
    kept = [
        word for word in program["command"][guest.num_replaced :] if word.partition("=")[0] not in NOT_ON_CPUS
    ]
    program["command"] = [*guest.command, *kept, *guest.options, *more]
    if "--tensor-model-parallel-size=2" in kept:
        program["command"].append("--tensor-model-parallel-size=1")
    values.pop("container", None)
    values["cluster"] = "./cluster.yaml"
    values["preflight"] = {"spare_nodes": 1}
    values["environment"] = {"STEP_S": "1"}  # Slurm looks at time limits every 30 s
    values["slurm"] = {
        "run": {"nodes": 2, "ntasks_per_node": 1, "time": "2:00:00", "signal_lead_s": SIGNAL_LEAD_S}
    }
    for path in ROOT.glob("examples/program_*.py"):
        shutil.copy(path, directory)
    (directory / values["paths"]["run_dir"]).mkdir(parents=True)
    check = directory / "check-node"
    check.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" != ndv5-1 ] || { echo sick; exit 1; }\n')
    check.chmod(0o755)
    (directory / "cluster.yaml").write_text(profile_text() + f"health_command: [{check}]\n")
    run = directory / "run.yaml"
    run.write_text(json.dumps(values))
    return run


def make_text(directory: Path) -> None:
    """Text, and a tokenizer with a token per byte, for torchtitan."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ("<|begin_of_text|>", "<|end_of_text|>")
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    (directory / "tokenizer").mkdir()
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token"), special, strict=True))
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "text").mkdir()
    lines = (json.dumps({"text": f"document {number} of many. " * 20}) for number in range(500))
    (directory / "text" / "part.jsonl").write_text("\n".join(lines))


class Job:
    """A job of the cluster, with its log."""

    def __init__(self, cluster: SlurmCluster, run: Path) -> None:
        self.cluster = cluster
        plan = api.plan(api.load_run(run))
        self.run_dir = run.parent / plan.run.config.paths.run_dir
        self.id = cluster.sbatch(api.render(plan, "run"), cwd=Path("/"))

    @property
    def log(self) -> str:
        path = self.run_dir / f"run-{self.id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + JOB_S
        while not condition():
            assert time.monotonic() < end, self.log
            assert self.cluster.show(self.id)["JobState"] not in FINAL_STATES, self.log
            time.sleep(2)

    def end(self) -> str:
        return self.cluster.wait(self.id)

    def progress(self) -> int:
        """The newest checkpoint of any guest."""
        paths = (*self.run_dir.glob("checkpoint*/step*"), *self.run_dir.glob("checkpoints/latest_*.txt"))
        complete = [path for path in paths if path.is_file() or (path / ".metadata").exists()]
        texts = (
            path.read_text() if path.suffix == ".txt" else path.stem.strip("step_-") for path in complete
        )
        return max((int(text) for text in texts), default=0)

    def kill_rank_1(self) -> None:
        cluster = f"SLURM_CONF={self.cluster.env['SLURM_CONF']}"
        wanted = {b"RANK=1", f"SLURM_JOB_ID={self.id}".encode(), cluster.encode()}
        killed = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted <= set(environment):
                os.kill(int(process.name), signal.SIGKILL)
                killed += 1
        assert killed

    def limit(self, minutes: int) -> None:
        self.cluster.run("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}")

    def reach_limit(self, minutes_left: int) -> None:
        """Lowers the time limit, so that at most `minutes_left` are left."""
        days, _, clock = self.cluster.show(self.id)["RunTime"].rpartition("-")
        hours, minutes, _ = map(int, clock.split(":"))
        self.limit((int(days or 0) * 24 + hours) * 60 + minutes + minutes_left)


@pytest.mark.parametrize("guest", GUESTS)
def test_a_guest_resumes_after_a_killed_rank_and_at_the_time_limit(
    three_nodes: SlurmCluster, tmp_path: Path, guest: Guest
) -> None:
    make_text(tmp_path)
    job = Job(three_nodes, run_of(guest, tmp_path))
    job.wait_for(lambda: job.progress() > 0)
    job.kill_rank_1()
    job.wait_for(lambda: "(restart 1 of at most 100)" in job.log)
    reached = job.progress()
    job.wait_for(lambda: job.progress() > reached)
    job.reach_limit(guest.minutes_to_limit)
    job.wait_for(lambda: "(restart 2 of at most 100)" in job.log)
    job.limit(120)
    state = job.end()
    log = job.log
    assert state == "COMPLETED", log
    attempts = re.findall(r"running on (.*)", log)
    assert [set(nodes.split()) for nodes in attempts] == 3 * [{"ndv5-2", "ndv5-3"}]
    assert re.search(r"failed with status \d+ at progress [1-9]\d* \(began at 0\): back into the queue", log)
    assert re.search(guest.stops, log)
    began = [int(number) for number in re.findall(r"hpcgen: from progress (\d+)", log)]
    assert 0 == began[0] < began[1] < began[2] < guest.last
    continued = {int(number) for number in re.findall(guest.resumes, log)}
    offset = 1 if guest.example == "program_torchtitan" else 0  # which tells the next step
    assert {number + offset for number in began[1:]} <= continued
    assert log.endswith(f"hpcgen: done at progress {guest.last}\n")


@pytest.mark.parametrize("guest", GUESTS)
def test_a_guest_that_cannot_start_is_tried_three_times(
    three_nodes: SlurmCluster, tmp_path: Path, guest: Guest
) -> None:
    job = Job(three_nodes, run_of(guest, tmp_path, guest.breaks))
    assert job.end() == "FAILED", job.log
    assert "three attempts without progress beyond 0; not requeued" in job.log
    assert job.log.count("finds no progress") == 3
