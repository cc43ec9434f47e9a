"""Reactions of a run to problems that it cannot continue with."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.forked import run_python
from tests.trainer.runs import ROOT, Ranks, environment, run
from trainer.contract import config as configuration
from trainer.contract.config import ConfigError, TrainerConfig
from trainer.contract.errors import Exit, TrainerError
from trainer.contract.files.run_directory import RunDirectory, publish
from trainer.contract.hang_report import HangReport
from trainer.contract.rules.engine import require
from trainer.faults import hang, lock
from trainer.metrics.json_lines import JsonLines


def trainer(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments],
        cwd=ROOT,
        env=environment(0, 1, "0") | environ,
        capture_output=True,
        text=True,
    )


def forked_trainer(config: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "trainer", "--config", str(config), env=environment(0, 1, "0") | environ)


@pytest.mark.process
def test_loader_workers_do_not_keep_a_rank_that_fails_from_ending(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "iter_0000001").touch()  # where the first checkpoint's directory is to be
    config["data"]["num_workers"] = 2
    config["checkpoint"] = {"save_interval": 1, "save": str(tmp_path)}
    result = run(config)
    assert result.statuses == (Exit.NOT_SAVED,)
    assert f"could not be saved: rank 0 on {socket.gethostname()}: {tmp_path / 'iter_0000001'}" in result.log
    assert [event["event"] for event in result.events[-2:]] == ["stop", "end"]


WANDB = '''
import os, threading
from pathlib import Path

class Settings:
    def __init__(self, **settings): pass

class Run:
    url = None
    def define_metric(self, *arguments, **named): pass
    def log(self, values): pass

    def finish(self):
        """The service is slow, and SIGTERM arrives because the other ranks are gone."""
        Path(os.environ["FINISHING"]).touch()
        [roll] = [thread for thread in threading.enumerate() if thread.name == "roll call"]
        roll.join(60)

def init(**arguments): return Run()
'''


@pytest.mark.process
def test_a_failing_run_is_reported_before_its_last_numbers_are_written(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    finishing = tmp_path / "finishing"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FINISHING", str(finishing))
    config["model"]["init_method_std"] = 1e30
    config["logging"]["wandb_project"] = "test"
    ranks = Ranks(config)
    while not finishing.exists():
        assert ranks.processes[0].poll() is None, (ranks.directory / "log").read_text()
        time.sleep(0.05)
    assert "is nan at iteration 1 " in (ranks.directory / "FAILED").read_text()
    ranks.send(signal.SIGTERM)
    result = ranks.wait()
    assert result.statuses == (Exit.NOT_FINITE,), result.log
    assert result.log.count("is nan at iteration 1 ") == 1
    assert [event["event"] for event in result.events] == ["start", "stop", "end"]


HOLDING = """
import os, signal, sys
from pathlib import Path
from trainer.faults import lock

lock.hold(Path(sys.argv[1]), "busy")
if os.fork() == 0:
    print("here", flush=True)
    sys.stdin.read()  # as a loader worker, which is still there when its rank is not
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.process
def test_a_run_directory_is_free_as_soon_as_its_process_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path / lock.RUN)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        assert process.wait() == -signal.SIGKILL
        lock.hold(tmp_path / lock.RUN, "busy")


WITHOUT_LOCKS = """
import errno, fcntl, os, sys
from pathlib import Path
from trainer.faults import lock

def flock(file, how):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

fcntl.flock = flock
lock.BEAT_S, lock.WATCH_S, lock.SETTLE_S = 0.2, 3.0, 0.5
try:
    lock.hold(Path(sys.argv[1]), "busy")
except lock.RunDirectoryBusyError as error:
    sys.exit(f"refused: {error}")
print("here", flush=True)
sys.stdin.readline()
"""


@pytest.mark.process
def test_one_process_holds_a_directory_where_the_file_system_has_no_locks(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WITHOUT_LOCKS, str(tmp_path / lock.RUN)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    owner_file = tmp_path / ".lock.owner"
    owner, other = start(), start()
    said = {process: process.stdout.readline() for process in (owner, other)}  # type: ignore[union-attr]
    if not said[owner]:
        owner, other = other, owner
    assert [said[owner], said[other]] == ["here\n", ""], "of two that start at once, one"
    assert "refused: busy" in other.communicate()[1]
    late = start()
    assert "refused: busy" in late.communicate()[1]
    owner.kill()
    owner.communicate()

    killed = json.loads(owner_file.read_text())
    after = start()
    assert after.communicate("\n")[0] == "here\n", "its host knows that the owner is dead"
    assert not owner_file.exists()
    owner_file.write_text(json.dumps(killed | {"host": "elsewhere"}))
    after = start()
    assert after.stdout is not None
    assert after.stdout.readline() == "here\n", "no renewal from another host"
    while after.poll() is None:
        owner_file.write_text(json.dumps(killed | {"host": "elsewhere"}))
        time.sleep(0.1)
    assert "busy (this process had not renewed its claim" in after.communicate()[1]
    assert after.returncode == Exit.FAULT


@pytest.mark.process
@pytest.mark.slow
def test_an_error_of_rank_0_is_reported_once(config: dict[str, Any]) -> None:
    config["world_size"] = 2
    directory = Path(config["run_dir"])
    directory.mkdir()
    (directory / "stacks").touch()  # where a directory is to be
    result = run(config)
    assert result.statuses == (Exit.FAULT, Exit.FAULT)
    assert result.log.count(f"{directory / 'stacks'} cannot be written (Not a directory)") == 1


@pytest.mark.process
def test_a_run_directory_that_cannot_be_written_is_refused_in_one_line(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config["run_dir"] = "/sys/hpcgen/run"  # no directory can be made there
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = forked_trainer(tmp_path / "config.json")
    assert done.returncode == Exit.REFUSED
    assert re.fullmatch(r"trainer: /sys/hpcgen cannot be written \(.*\)\n", done.stderr), done.stderr


@pytest.mark.process
def test_links_planted_by_others_are_not_followed(tmp_path: Path) -> None:
    """In a group's directory, its members can create links under every predictable name."""
    precious = tmp_path / "precious"
    precious.write_text("data")
    run = RunDirectory(tmp_path, tmp_path / "checkpoints", tmp_path / "index-cache")
    run.stacks.mkdir()
    names = [f".{name}.{socket.gethostname()}.{os.getpid()}" for name in ("DONE", "heartbeat")]
    names += [".lock", "metrics.jsonl", "stacks/rank-00000.txt"]
    for name in names:
        (tmp_path / name).symlink_to(precious)
    publish(run.done, "6\n")
    with pytest.raises(OSError, match="symbolic links"):
        lock.hold(tmp_path / lock.RUN, "busy")
    with pytest.raises(TrainerError, match="symbolic links") as refused:
        JsonLines(run.metrics, print)
    assert not refused.value.retry
    with pytest.raises(OSError, match="symbolic links"):
        hang.write(run, HangReport(0, "here", 1, 0, "train", "?", 1.0, "now"))
    assert precious.read_text() == "data"
    assert run.done.read_text() == "6\n"


@pytest.mark.process
def test_invalid_ranks_are_reported_in_one_line(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    result = forked_trainer(path, WORLD_SIZE="many")
    assert result.returncode == Exit.REFUSED
    assert "WORLD_SIZE=many" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.process
def test_the_versions_are_one_line() -> None:
    result = run_python("-m", "trainer", "--versions")
    assert result.returncode == 0
    assert result.stdout.startswith("trainer ")
    assert " megatron-core " in result.stdout
    assert " torch " in result.stdout
    assert len(result.stdout.splitlines()) == 1


@pytest.mark.process
def test_a_missing_module_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    result = trainer("--versions", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "cannot import torch: OSError: libcudart.so.13" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.process
def test_cuda_is_never_replaced_by_the_cpu(config: dict[str, Any]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = run(config | {"device": "cuda"})
    assert result.statuses == (2,)
    assert "rank 0 on " in result.log
    assert "device = 'cuda', but torch" in result.log


@pytest.mark.process
def test_another_world_size_than_planned_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    result = forked_trainer(path, WORLD_SIZE="2")
    assert result.returncode == 2
    assert "rank 0 of 2 on " in result.stderr
    assert "world_size = 1" in result.stderr


@pytest.mark.process
@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": "x"}', '{"nme": "x"}'])
def test_a_configuration_that_does_not_fit_ends_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    result = trainer("--config", str(path))
    assert result.returncode == 2
    assert result.stderr.startswith(f"trainer: {path}: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (
            "parallelism",
            {"pipeline_model_parallel_size": 2, "context_parallel_size": 4},
            "world_size = 4 results in 4 ranks, which",
        ),
        (
            "training",
            {"global_batch_size": 6},
            "global_batch_size = 6 is not a multiple of",
        ),
        ("model", {"num_attention_heads": 1}, None),
        ("model", {"padded_vocab_size": 1001}, None),
        ("parallelism", {"pipeline_model_parallel_size": 4, "context_parallel_size": 1}, None),
        (
            "parallelism",
            {"virtual_pipeline_model_parallel_size": 2},
            "virtual_pipeline_model_parallel_size = 2 requires .*pipeline_model_parallel_size > 1",
        ),
    ],
)
def test_a_layout_must_divide(
    section: str, values: dict[str, Any], message: str | None, config: dict[str, Any]
) -> None:
    config["training"]["micro_batch_size"] = 1
    document = config | {"world_size": 4, section: config[section] | values}
    parsed = configuration.from_dict(TrainerConfig, document, "test")
    if message is None:
        require(parsed)
        return
    with pytest.raises(ConfigError, match=message):
        require(parsed)
