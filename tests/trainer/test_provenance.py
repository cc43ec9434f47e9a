"""Files that changed between two attempts: code and pairs that were edited, overwritten, rebuilt, copied or moved."""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.forked import run_python
from tests.trainer.runs import Run, finished, gpt_config, run, write_corpus
from tests.trainer.small_run import SMALL
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE
from trainer.contract.resuming import provenance
from trainer.contract.resuming.hyperparameters import check_changes, sections

SCHEDULE = "def rate(iteration, optimizer):\n    return {rate}\n"


@pytest.fixture
def stopped(tmp_path: Path) -> dict[str, Any]:
    """A run with its own corpus and schedule that stopped after one step."""
    config = gpt_config(write_corpus(tmp_path / "own", documents=60), tmp_path / "run", SMALL)
    (tmp_path / "rates.py").write_text(SCHEDULE.format(rate="1e-3"))
    config["optimizer"] |= {"lr_schedule": f"{tmp_path}/rates.py:rate", "lr_warmup_iters": 0}
    config["training"]["train_iters"] = 3
    (tmp_path / "stop").touch()
    finished(config, "--stop-file", str(tmp_path / "stop"))
    return config


def overwrite(prefix: str) -> None:
    """Other tokens of the same length."""
    size = Path(f"{prefix}.bin").stat().st_size
    Path(f"{prefix}.bin").write_bytes(b"\7\0" * (size // 2))


def refused(config: dict[str, Any]) -> str:
    ended = run(config)
    assert ended.statuses == (2,), ended.log
    return ended.log


@pytest.mark.process
def test_edited_code_is_refused_until_it_is_named(stopped: dict[str, Any], tmp_path: Path) -> None:
    copies = tmp_path / "run" / "code"
    [first] = copies.iterdir()
    assert first.read_text() == SCHEDULE.format(rate="1e-3")
    (tmp_path / "rates.py").write_text(SCHEDULE.format(rate="5e-2"))
    log = refused(stopped)
    assert f"differ from the checkpoint: optimizer.lr_schedule: {tmp_path}/rates.py (SHA-256 " in log
    assert "set checkpoint.changed: [optimizer.lr_schedule]; otherwise restore the original files" in log
    assert list(copies.iterdir()) == [first]
    stopped["checkpoint"] = {"changed": ["optimizer.lr_schedule"]}
    assert [lr for *_, lr in finished(stopped).steps] == [1e-3, 5e-2, 5e-2]
    assert len(list(copies.iterdir())) == 2
    (tmp_path / "rates.py").write_text(SCHEDULE.format(rate="1e-1"))
    log = refused(stopped)  # the finished run, which a named change does not continue
    assert "is finished, but this configuration differs from it: optimizer.lr_schedule" in log


@pytest.mark.slow  # test_code_loading.py finds the imports
@pytest.mark.process
def test_an_edited_import_is_refused_until_it_is_named(stopped: dict[str, Any], tmp_path: Path) -> None:
    """With the size and time of before, and with a bytecode cache of it that Python would not compare."""
    (tmp_path / "rates.py").write_text(
        "def rate(iteration, optimizer):\n    from high import HIGH\n    return HIGH\n"
    )
    high = tmp_path / "high.py"
    high.write_text("HIGH = 2e-2\n")
    status = high.stat()
    stopped["checkpoint"] = {"changed": ["optimizer.lr_schedule"]}
    stopped["world_size"] = 2
    assert [lr for *_, lr in finished(stopped, "--stop-file", str(tmp_path / "stop")).steps] == [1e-3, 2e-2]
    py_compile.compile(str(high), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    high.write_text("HIGH = 3e-2\n")
    os.utime(high, ns=(status.st_atime_ns, status.st_mtime_ns))
    del stopped["checkpoint"]
    log = refused_by_all(stopped)
    assert f"optimizer.lr_schedule: {high} (SHA-256 " in log
    assert "set checkpoint.changed: [optimizer.lr_schedule@2]" in log
    stopped["checkpoint"] = {"changed": ["optimizer.lr_schedule@2"]}
    ended = finished(stopped)
    assert [lr for *_, lr in ended.steps] == [1e-3, 2e-2, 3e-2]
    digests = {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("high.py", "rates.py")
    }
    copies = {path.name for path in (tmp_path / "run" / "code").iterdir()}
    assert {f"{digest[:12]}-{name}" for name, digest in digests.items()} < copies
    [code] = [event for event in ended.events if event["event"] == "start"][-1]["code"]
    assert (code["files"], code["commit"], code["dirty"]) == (digests, None, None)


@pytest.mark.process
def test_generation_with_other_code_than_in_training_warns(tmp_path: Path, corpus: str) -> None:
    (tmp_path / "layers_of_mine.py").write_text(
        "import size_of_mine\ndef layers(core, vp_stage, usual): return usual\n"
    )
    (tmp_path / "size_of_mine.py").write_text("SIZE = 1\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    config = gpt_config(corpus, tmp_path / "run", SMALL)
    config["model"] |= {"layer_spec": f"{tmp_path}/layers_of_mine.py:layers"}
    config["training"]["train_iters"] = 2
    finished(config)
    generate = (
        "-m",
        "trainer.inference",
        str(tmp_path / "run"),
        f"--prompts={tmp_path}/prompts.jsonl",
        "--tokenizer=bytes",
        "--device=cpu",
    )
    assert "warning: model.layer_spec" not in run_python(*generate).stderr
    (tmp_path / "size_of_mine.py").write_text("SIZE = 2\n")
    ended = run_python(*generate)
    assert ended.returncode == 0, ended.stderr
    assert f"was trained with {tmp_path}/size_of_mine.py (SHA-256 " in ended.stderr


@pytest.mark.process
def test_the_commit_of_the_code_is_recorded(tmp_path: Path, corpus: str) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=me", "-c", "user.email=me@example.com")
    (tmp_path / "rates.py").write_text(SCHEDULE.format(rate="1e-3"))
    for command in (("init", "--quiet"), ("add", "rates.py"), ("commit", "--quiet", "--message=rates")):
        subprocess.run((*git, *command), check=True)
    (tmp_path / "rates.py").write_text(SCHEDULE.format(rate="2e-3"))
    config = gpt_config(corpus, tmp_path / "run", SMALL)
    config["optimizer"] |= {"lr_schedule": f"{tmp_path}/rates.py:rate", "lr_warmup_iters": 0}
    config["training"]["train_iters"] = 1
    ended = finished(config)
    [code] = ended.events[0]["code"]
    head = subprocess.run((*git, "rev-parse", "HEAD"), check=True, capture_output=True, text=True).stdout
    assert (code["directory"], code["commit"], code["dirty"]) == (str(tmp_path), head.strip(), True)
    diff = ended.directory / "code" / code["diff"]
    assert "-    return 1e-3\n+    return 2e-3\n" in diff.read_text()
    assert diff.stat().st_mode & 0o777 == 0o600


@pytest.mark.process
def test_an_overwritten_pair_is_refused_until_it_is_named(stopped: dict[str, Any], tmp_path: Path) -> None:
    overwrite(f"{tmp_path}/own")
    log = refused(stopped)
    assert f"data.datasets: {tmp_path}/own.bin (" in log
    assert "its SHA-256 is unknown, so the content may differ" in log
    assert "set checkpoint.changed: [data.datasets]" in log
    stopped["checkpoint"] = {"changed": ["data.datasets"]}
    assert "with data.datasets: " in finished(stopped).log


@pytest.mark.process
def test_a_rebuilt_pair_is_refused(stopped: dict[str, Any], tmp_path: Path) -> None:
    """The pair has the documents in reverse order, so the sizes of .bin and .idx are unchanged."""
    rebuild_backwards(tmp_path / "own")
    assert f"data.datasets: {tmp_path}/own.idx (" in refused(stopped)


@pytest.mark.process
def test_an_index_of_the_same_size_and_time_is_read(stopped: dict[str, Any], tmp_path: Path) -> None:
    """It is another pair, which is read from its first sample on."""
    index = tmp_path / "own.idx"
    status, content = index.stat(), (tmp_path / "own.bin").read_bytes()
    rebuild_backwards(tmp_path / "own")
    data = (tmp_path / "own.bin").stat()
    (tmp_path / "own.bin").write_bytes(content)
    os.utime(tmp_path / "own.bin", ns=(data.st_atime_ns, data.st_mtime_ns))
    os.utime(index, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert index.stat().st_size == status.st_size
    log = refused(stopped)
    assert f"data.datasets: {index} (" in log
    stopped["checkpoint"] = {"changed": ["data.datasets"]}
    assert f"data: train: {tmp_path}/own: nothing read, 8 to read" in finished(stopped).log


def rebuild_backwards(prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    documents = [document.copy() for document in IndexedDataset(str(prefix))]
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=documents[0].dtype.type)
    for document in reversed(documents):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def describe_as_hpcgen_does(prefix: Path) -> None:
    """The record that hpcgen leaves next to a pair."""
    outputs = [
        {
            "name": f"tokenized/{prefix.name}{suffix}",
            "size": Path(f"{prefix}{suffix}").stat().st_size,
            "sha256": hashlib.sha256(Path(f"{prefix}{suffix}").read_bytes()).hexdigest(),
            "modified_ns": Path(f"{prefix}{suffix}").stat().st_mtime_ns,
        }
        for suffix in (".bin", ".idx")
    ]
    Path(f"{prefix}.record.json").write_text(json.dumps({"outputs": outputs}))


@pytest.mark.process
def test_a_copied_corpus_is_read_by_all_ranks_and_accepted(tmp_path: Path) -> None:
    prefix = tmp_path / "own"
    write_corpus(prefix, documents=60)
    describe_as_hpcgen_does(prefix)
    config = gpt_config(str(prefix), tmp_path / "run", SMALL) | {"world_size": 2}
    config["training"]["train_iters"] = 2
    (tmp_path / "stop").touch()
    finished(config, "--stop-file", str(tmp_path / "stop"))
    copied = tmp_path / "copied"
    copied.mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copyfile(f"{prefix}{suffix}", copied / f"own{suffix}")
    config["data"]["datasets"] = [{"prefix": str(copied / "own")}]
    intact = (copied / "own.bin").read_bytes()
    (copied / "own.bin").write_bytes(intact[:-2] + b"\7\0")
    log = refused_by_all(config)
    assert f"data.datasets: {copied}/own.bin (SHA-256 " in log
    assert ") -> different content" in log
    (copied / "own.bin").write_bytes(intact)
    second = finished(config)
    assert (
        "data: reading 1 pair (0.00 GB) to compare SHA-256 hashes, since modification times differ"
        in second.log
    )
    third = provenance.examine(trainer_config(config), newest_record(second))
    assert (third.to_hash, third.changes) == (
        {},
        [],
    )  # the hash was kept, with the new time


def refused_by_all(config: dict[str, Any]) -> str:
    ended = run(config)
    assert 2 in ended.statuses, ended.log
    assert 0 not in ended.statuses
    return ended.log


def trainer_config(config: dict[str, Any]) -> TrainerConfig:
    return resolve(configuration.from_dict(TrainerConfig, config, "test"))


def newest_record(ended: Run) -> dict[str, Any]:
    newest = checkpoint_files.newest_complete(ended.checkpoints)
    assert newest is not None
    assert newest.record is not None
    return newest.record


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """The configuration of a run with its own corpus and schedule. The run is not trained."""
    config = gpt_config(write_corpus(tmp_path / "own", documents=9), tmp_path / "run")
    (tmp_path / "rates.py").write_text(SCHEDULE.format(rate="1e-3"))
    config["optimizer"]["lr_schedule"] = f"{tmp_path}/rates.py:rate"
    return config


def recorded(config: dict[str, Any]) -> dict[str, Any]:
    """The record of a checkpoint with this configuration."""
    trainer = trainer_config(config)
    return {**sections(trainer), "origins": provenance.examine(trainer).origins}


def accepted(config: dict[str, Any], record: dict[str, Any]) -> bool:
    """True if a run may resume from such a checkpoint without reading a .bin."""
    trainer = trainer_config(config)
    files = provenance.examine(trainer, record)
    assert not files.to_hash
    try:
        return not check_changes(files.saved, trainer, contents=files.changes)
    except TrainerError:
        return False


def move(config: dict[str, Any], directory: Path) -> None:
    directory.mkdir()
    for path in Path(config["run_dir"]).parent.glob("*.*"):
        path.rename(directory / path.name)
    config["data"]["datasets"][0]["prefix"] = str(directory / "own")
    config["optimizer"]["lr_schedule"] = f"{directory}/rates.py:rate"


def test_moved_or_unchanged_files_are_accepted(own: dict[str, Any], tmp_path: Path) -> None:
    record = recorded(own)
    assert accepted(own, record)
    move(own, tmp_path / "elsewhere")
    assert accepted(own, record)
    os.utime(tmp_path / "elsewhere" / "own.idx")  # its own content tells
    assert accepted(own, record)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda path: rebuild_backwards(path / "own"), id="rebuilt"),
        pytest.param(lambda path: overwrite(f"{path}/own"), id="overwritten"),
        pytest.param(lambda path: write_corpus(path / "own", documents=8), id="shorter"),
        pytest.param(lambda path: (path / "rates.py").write_text("def rate(*_): return 1\n"), id="edited"),
    ],
)
def test_moved_and_changed_files_are_refused(
    change: Callable[[Path], object], own: dict[str, Any], tmp_path: Path
) -> None:
    record = recorded(own)
    move(own, tmp_path / "elsewhere")
    change(tmp_path / "elsewhere")
    assert not accepted(own, record)


def test_a_module_is_compared_by_its_file(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rates_of_mine").mkdir()
    (tmp_path / "rates_of_mine" / "__init__.py").touch()
    shutil.copy(tmp_path / "rates.py", tmp_path / "rates_of_mine" / "flat.py")
    own["optimizer"]["lr_schedule"] = "rates_of_mine.flat:rate"
    record = recorded(own)
    assert accepted(own, record)
    (tmp_path / "rates_of_mine" / "flat.py").write_text(SCHEDULE.format(rate="1"))
    assert not accepted(own, record)


def test_a_checkpoint_of_version_0_2_0_has_no_imports_to_compare(own: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rates.py").write_text("import parts\ndef rate(iteration, optimizer): return parts.RATE\n")
    (tmp_path / "parts.py").write_text("RATE = 1\n")
    record = recorded(own)
    assert list(record["origins"]["code"]["optimizer.lr_schedule"].pop("modules")) == ["parts.py"]
    (tmp_path / "parts.py").write_text("RATE = 2\n")
    assert accepted(own, record)
    (tmp_path / "rates.py").write_text(SCHEDULE.format(rate="1"))
    assert not accepted(own, record)


def test_a_record_older_than_its_pair_is_ignored(own: dict[str, Any], tmp_path: Path) -> None:
    describe_as_hpcgen_does(tmp_path / "own")
    [pair] = recorded(own)["origins"]["pairs"]["data.datasets"]
    assert pair["bin"]["sha256"] == hashlib.sha256((tmp_path / "own.bin").read_bytes()).hexdigest()
    overwrite(f"{tmp_path}/own")
    [pair] = recorded(own)["origins"]["pairs"]["data.datasets"]
    assert pair["bin"]["sha256"] is None


@pytest.mark.process
def test_a_checkpoint_without_a_record_of_files_is_accepted(stopped: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run" / "checkpoints" / "iter_0000001"
    record = checkpoint_files.read_record(path)
    del record["origins"]
    (path / COMPLETE).write_text(checkpoint_files.record_text(record))
    overwrite(f"{tmp_path}/own")
    assert finished(stopped).saved_iteration == "3"
