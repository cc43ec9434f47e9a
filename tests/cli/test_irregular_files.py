"""FIFOs, sockets, devices and directories in the place of files end a command with a line, and none hangs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.cli.command import hpcgen
from tests.cli.test_data_status import RUN
from tests.patience import PATIENCE_S
from tests.recorded_run import start, steps, write_checkpoint, write_run

pytestmark = pytest.mark.process

COMMANDS = """
import json, os, shutil, signal, sys, traceback
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from hpcgen.cli.main import main
from trainer.contract.files import checkpoint_files
from trainer.contract.resuming import evidence
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import RunDirectory
from trainer.metrics.json_lines import JsonLines, drop_after

def trainer_reads(run):
    run = Path(run)
    checkpoint_files.newest_complete(run / "checkpoints")
    place = RunDirectory(root=run, checkpoints=run / "checkpoints", index_cache=run / "cache")
    evidence.refusal(place, None, begins_at=0, discard_up_to=None)
    drop_after(run / "metrics.jsonl", 10, run / "last-step")
    JsonLines(run / "metrics.jsonl", lambda reason: None).close()

def trainer_imports(directory):
    from trainer.huggingface.importing import import_model
    import_model(Path(directory), Path("imported"), print)

others = {"trainer": trainer_reads, "import": trainer_imports}

def late(number, frame):
    raise SystemError("hangs")

signal.signal(signal.SIGALRM, late)
backup, replaced, *commands = json.load(sys.stdin)
outcomes = []
for path, put in replaced:
    for command in commands:
        target = Path(path)
        shutil.move(target, backup)
        eval(put)(path)
        output = StringIO()
        status = 0
        signal.alarm(PATIENCE_S)
        try:
            with redirect_stderr(output), redirect_stdout(output):
                others[command[0]](command[1]) if command[0] in others else main(command)
        except SystemExit as end:
            status = end.code
        except TrainerError as error:
            status = 2
            output.write(str(error))
        except BaseException as error:
            status = repr(error)
            output.write(traceback.format_exc())
        signal.alarm(0)
        if os.path.lexists(target):
            os.rmdir(target) if target.is_dir() else target.unlink()
        shutil.move(backup, target)
        outcomes.append([path, put, command, status, output.getvalue()])
print(json.dumps(outcomes))
""".replace("PATIENCE_S", str(PATIENCE_S))
PUT = {
    "fifo": "os.mkfifo",
    "device": "lambda path: os.symlink('/dev/zero', path)",
    "directory": "os.mkdir",
    "socket": "lambda path: __import__('socket').socket(__import__('socket').AF_UNIX).bind(path)",
}


def files_below(*directories: Path) -> list[Path]:
    return sorted(path for directory in directories for path in directory.rglob("*") if path.is_file())


def check(files: list[Path], *commands: list[str], spare: Path, python: str) -> None:
    """Puts each kind in the place of each file, and runs each command, all in one process of this Python."""
    replaced = [(str(path), put) for path in files for put in PUT.values()]
    done = subprocess.run(
        [python, "-c", COMMANDS],
        input=json.dumps([str(spare), replaced, *commands]),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == len(files) * len(PUT) * len(commands)
    wrong = []
    for path, put, command, status, output in outcomes:
        # A file that the command does not need, or does not miss, is no error.
        is_named = status in (0, None) or (status in (1, 2) and Path(path).name.partition(".")[0] in output)
        if not is_named or "Traceback" in output:
            wrong.append((path, put, command, status, output[-600:]))
    assert not wrong, f"{len(wrong)} of {len(outcomes)}: {wrong[:3]}"


def test_a_corpus(tmp_path, monkeypatch, stand_in):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN.replace("num_output_files: 4", "num_output_files: 1"))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.jsonl").write_text('{"text": "abc"}\n')
    assert hpcgen("data", "plan").status == 0
    assert hpcgen("data", "prepare").status == 0
    prefix = "data/tokens/corpus-00000-of-00001"
    check(
        files_below(tmp_path / "data", tmp_path / "source"),
        ["data", "verify", "--no-megatron", "-c", "run.yaml"],
        ["data", "status", "-c", "run.yaml"],
        ["data", "inspect", prefix, "--document", "0", "-c", "run.yaml"],
        ["data", "plan", "-c", "run.yaml"],
        ["validate", "-c", "run.yaml"],
        [
            "data",
            "tokenize",
            "source/a.jsonl",
            "--tokenizer",
            "bytes",
            "--output-prefix",
            "out",
            "--overwrite",
        ],
        spare=tmp_path / "spare",
        python=stand_in,
    )


def test_a_hugging_face_directory(tmp_path, monkeypatch, stand_in):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "n_layer": 1,
                "n_head": 2,
                "n_embd": 8,
                "n_positions": 16,
                "vocab_size": 32,
            }
            | {"architectures": ["GPT2LMHeadModel"]}
        )
    )
    (model / "model.safetensors").write_bytes(b"")
    check(files_below(model), ["import", "model"], spare=tmp_path / "spare", python=stand_in)


def test_a_run(tmp_path, monkeypatch, stand_in):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", [start(), *steps(1, 20)])
    write_checkpoint(run / "checkpoints", 10)
    write_checkpoint(run / "checkpoints", 20)
    for name in ("DONE", "heartbeat", "FAILED", "STOPPED", "trained-with.json", "excluded_nodes"):
        (run / name).write_text("{}")
    begin = {"event": "start", "time": 1.0, "job": "4711", "restart": 0, "stage": "train"}
    (run / "jobs" / "4711" / "events.jsonl").write_text(json.dumps(begin) + "\n")
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("20")
    check(
        files_below(run),
        ["report", "run", "--json"],
        ["status", "run", "--json"],
        ["runs", "."],
        ["checkpoint", "list", "run"],
        ["checkpoint", "inspect", "run"],
        ["checkpoint", "prune", "run", "--keep-last", "1", "--dry-run"],
        ["trainer", "run"],
        spare=tmp_path / "spare",
        python=stand_in,
    )
