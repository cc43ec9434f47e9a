"""Loading an untrusted checkpoint never runs code that its files name."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import hpcgen
from tests.trainer.runs import GPT, Run, finished, gpt_config, run
from trainer.checkpoint import unpickling
from trainer.contract.errors import Exit
from trainer.contract.files import checkpoint_files, checkpoint_index
from trainer.contract.files.checkpoint_files import COMPLETE, STARTED


class Planted:
    """A pickle that creates a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.directory),)


@pytest.fixture(scope="module")
def saved(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(config_of(corpus, tmp_path_factory.mktemp("saved")))


def config_of(corpus: str, directory: Path, **checkpoint: Any) -> dict[str, Any]:
    small = GPT | {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 512}
    config = gpt_config(corpus, directory, small) | {"checkpoint": checkpoint}
    config["training"]["train_iters"] = 2
    return config


def in_the_index(path: Path, planted: Planted) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = planted
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def in_the_common_state(path: Path, planted: Planted) -> None:
    common = torch.load(path / "common.pt", weights_only=False)
    torch.save({**common, "args": planted}, path / "common.pt")


def in_an_object(path: Path, planted: Planted) -> None:
    """An extra state, in the file of the tensors."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    place = next(where for what, where in metadata.storage_data.items() if "_extra_state" in what.fqn)
    payload = io.BytesIO()
    torch.save([planted], payload)
    file = path / place.relative_path
    place.offset, place.length = file.stat().st_size, len(payload.getvalue())
    with file.open("ab") as end:
        end.write(payload.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.process
@pytest.mark.parametrize("is_foreign", [False, True], ids=["own", "foreign"])
@pytest.mark.parametrize("plant", [in_the_index, in_the_common_state, in_an_object])
def test_loading_a_checkpoint_runs_no_code(
    plant: Callable[[Path, Planted], None], is_foreign: bool, corpus: str, saved: Run, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    shutil.copytree(saved.checkpoints, there)
    path = there / "iter_0000002"
    plant(path, Planted(tmp_path / "planted"))
    record = checkpoint_files.read_record(path)
    if is_foreign:
        (path / COMPLETE).unlink()
        (path / STARTED).unlink()
        common = (path / "common.pt").read_bytes()
        (path / "common.pt").write_bytes(
            common.replace(checkpoint_files.TRAINER_MARK.encode(), b"x" * len(checkpoint_files.TRAINER_MARK))
        )
    else:
        record["files"] = {name: checkpoint_files.describe_file(path / name) for name in record["files"]}
        (path / COMPLETE).write_text(checkpoint_files.record_text(record))
    result = run(config_of(corpus, tmp_path / "run", load=str(there)))
    assert not (tmp_path / "planted").exists()
    assert result.statuses == (Exit.REFUSED,), result.log
    assert f"{path}: " in result.log
    assert "names posix.mkdir" in result.log
    assert "Traceback" not in result.log
    assert "posix.mkdir" in (result.directory / "FAILED").read_text()


def test_an_extra_state_contains_only_data(tmp_path: Path) -> None:
    """Transformer Engine unpickles it."""
    planted = Planted(tmp_path / "planted")
    storage = io.BytesIO()
    torch.save(planted, storage)

    class InStorage:
        def __reduce__(self) -> tuple[object, tuple[bytes]]:
            return torch.storage._load_from_bytes, (storage.getvalue(),)

    for state in (planted, {"scale_fwd": InStorage()}):
        with pytest.raises((checkpoint_index.ForbiddenError, pickle.UnpicklingError)) as caught:
            unpickling.checked_extra_state(as_bytes(state))
        assert "names posix.mkdir" in str(unpickling.forbidden(caught.value))
    assert not planted.directory.exists()
    scales = {"scale_fwd": torch.rand(3), "extra_fp8_variables": {"num_gemms": 1, "layers": (1, 2)}}
    there = pickle.loads(unpickling.checked_extra_state(as_bytes(scales)).numpy().tobytes())
    assert torch.equal(there.pop("scale_fwd"), scales.pop("scale_fwd"))
    assert there == scales


def as_bytes(state: Any) -> torch.Tensor:
    """As Transformer Engine keeps an extra state."""
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


@pytest.mark.process
def test_the_index_names_files_of_its_own_directory(saved: Run) -> None:
    metadata = pickle.loads((saved.checkpoints / "iter_0000002/.metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"
    with pytest.raises(ValueError, match=r"'\.\./elsewhere' is not the name of a file in the checkpoint"):
        checkpoint_index.parse(pickle.dumps(metadata))


@pytest.mark.process
def test_the_name_of_a_tensor_cannot_control_the_terminal(saved: Run, tmp_path: Path) -> None:
    path = tmp_path / "iter_0000002"
    shutil.copytree(saved.checkpoints / path.name, path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    tensors = metadata.state_dict_metadata
    tensors["\x1b[2Ja\nb"] = tensors.pop("decoder.final_layernorm.weight")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    shown = hpcgen("checkpoint", "inspect", path, "--tensors").stdout
    assert "\\x1b[2Ja\\nb " in shown
    assert "\x1b" not in shown


@pytest.mark.process
def test_the_index_reads_the_same_as_with_torch(saved: Run) -> None:
    data = (saved.checkpoints / "iter_0000002/.metadata").read_bytes()
    theirs, ours = pickle.loads(data), unpickling._metadata(checkpoint_index.parse(data))
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert (ours.planner_data, ours.version) == (theirs.planner_data, theirs.version)


def test_an_extra_state_of_a_core_that_replaces_torchs_loader_is_read() -> None:
    """megatron-core 0.19 puts its own function in the place of torch.storage._load_from_bytes, also when it saves."""
    scales = {"scale_fwd": torch.tensor([2.0, 4.0])}
    written = pickle.dumps(scales, protocol=3)
    replaced = written.replace(
        b"ctorch.storage\n_load_from_bytes\n", b"cmegatron.core.safe_globals\nsafe_load_from_bytes\n"
    )
    assert b"safe_load_from_bytes" in replaced
    state = torch.frombuffer(bytearray(replaced), dtype=torch.uint8)
    there = pickle.loads(unpickling.checked_extra_state(state).numpy().tobytes())
    assert torch.equal(there["scale_fwd"], scales["scale_fwd"])
