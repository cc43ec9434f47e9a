"""Checkpoints that one Python writes are read by every other."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import subprocess
import sys
import sysconfig
import types
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata, planner

from tests.cli.command import hpcgen
from tests.trainer.pickles.write import HERE, TENSORS, arguments
from tests.trainer.runs import ROOT, Run, environment, finished, free_port
from trainer.checkpoint import unpickling
from trainer.contract.files import checkpoint_files, checkpoint_index
from trainer.contract.files.checkpoint_files import COMPLETE, INDEX
from trainer.contract.files.checkpoint_index import ENUMS, ForbiddenError

VERSIONS = ("3.10.13", "3.11.2", "3.11.7", "3.12.1", "3.13.0")
"""Pythons that wrote the files in `pickles`."""

DEBIAN = Path("/usr/bin/python3.11")
"""Debian 12's Python, 3.11.2. It shares the packages of the virtual environment, if that has Python 3.11."""

NAMED_BY_0_2_0 = (
    "torch.",
    "megatron.core.dist_checkpointing.",
    "torch Size",
    "collections OrderedDict",
    "pathlib Path",
    "pathlib PosixPath",
    "builtins set",
)
"""What hpcgen 0.2.0 allows in an index, apart from torch's data types."""

PICKLE_AGAIN = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    index = pickle.load(file)
with open(sys.argv[1], "wb") as file:
    pickle.dump(index, file)
"""
"""Writes an index again as a Python does by itself, and as trainer 0.2.0 did."""


READ = """
import sys, torch, trainer.checkpoint.unpickling
from pathlib import Path
from trainer.contract.files import checkpoint_index
for path in sys.argv[1:]:
    torch.load(path) if path.endswith(".pt") else checkpoint_index.parse(Path(path).read_bytes())
"""
"""Reads indexes and common states."""


class Python:
    """Another Python, which has the packages of the trainer."""

    def __init__(self, executable: str, **variables: str) -> None:
        self.executable, self.variables = executable, variables

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        variables = environment(0, 1, free_port()) | self.variables
        return subprocess.run(
            [self.executable, *words], cwd=ROOT, env=variables, capture_output=True, text=True
        )

    def finished(self, config: dict[str, Any], *words: str) -> Run:
        directory = Path(config["run_dir"])
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        done = self.run("-m", "trainer", "--config", str(directory / "config.json"), *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return Run(directory, (0,), done.stdout)


def debian() -> Python:
    """Debian's Python. Skips the test where it is another version or has no packages."""
    found = subprocess.run([DEBIAN, "-V"], capture_output=True, text=True).stdout if DEBIAN.exists() else ""
    version = found.removeprefix("Python ").strip()
    if version not in {"3.11.0", "3.11.1", "3.11.2", "3.11.3"}:
        pytest.skip(
            f"needs {DEBIAN} of version 3.11.0 to 3.11.3, as on Debian 12; it is {version or 'missing'}"
        )
    if sys.version_info[:2] != (3, 11):
        pytest.skip(
            f"{DEBIAN} cannot use the packages of Python {sys.version_info.major}.{sys.version_info.minor}"
        )
    return Python(str(DEBIAN), PYTHONPATH=os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]))


def names_in(data: bytes) -> list[str]:
    """The names in a pickle, as "module name"."""
    strings: list[str] = []
    memo: list[str] = []
    found = []
    for operation, argument, _ in pickletools.genops(data):
        if operation.name == "MEMOIZE":
            memo.append(strings[-1] if strings else "")
        elif "GET" in operation.name:
            strings.append(memo[argument])
        elif operation.name == "STACK_GLOBAL":
            found.append(" ".join(strings[-2:]))
            strings.append("")
        else:
            strings.append(argument if isinstance(argument, str) else "")
    return found


def allowed_by_0_2_0(name: str) -> bool:
    is_dtype = name.startswith("torch ") and isinstance(getattr(torch, name.split()[1], None), torch.dtype)
    return is_dtype or name.startswith(NAMED_BY_0_2_0)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_index_of_any_python_is_read(version: str) -> None:
    data = (HERE / f"index-{version}").read_bytes()
    index = checkpoint_index.parse(data)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in index.tensors.items()} == {
        "weight": ((2, 3), "float32"),
        "bias": ((3,), "bfloat16"),
    }
    assert index.objects == ("layer/_extra_state",)
    assert sorted(place.name for place in index.places) == sorted([*TENSORS, *index.objects])
    assert index == checkpoint_index.parse((HERE / f"index-{VERSIONS[0]}").read_bytes())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_arguments_of_any_python_are_read(version: str) -> None:
    assert torch.load(HERE / f"common-{version}.pt", weights_only=True) == {
        "args": arguments(),
        "iteration": 1,
    }


def test_the_files_have_what_pythons_pickle_differently() -> None:
    names = {version: names_in((HERE / f"index-{version}").read_bytes()) for version in VERSIONS}
    assert [version for version in VERSIONS if "builtins getattr" in names[version]] == ["3.11.2"]
    assert [version for version in VERSIONS if "pathlib._local PosixPath" in names[version]] == ["3.13.0"]


WRITTEN = [
    each
    for module in (metadata, planner)
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, Enum) and each.__module__ == module.__name__
    if each is not planner.LoadItemType  # only in plans for reading
]


@pytest.mark.parametrize("enum", WRITTEN, ids=lambda enum: enum.__name__)
def test_every_enum_of_torchs_format_is_read_in_both_forms(enum: type[Enum]) -> None:
    assert (enum.__module__, enum.__name__) in ENUMS
    for member in enum:
        for form in (Reduced(getattr, (enum, member.name)), Reduced(enum, (member.value,))):
            checkpoint_index.parse(index_with(form))


class Reduced:
    """Pickled as a call of `function`, followed by a state if there is one."""

    def __init__(self, function: Any, arguments: tuple[Any, ...], *state: Any) -> None:
        self.reduced = function, arguments, *state

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def index_with(planted: object) -> bytes:
    return pickle.dumps(metadata.Metadata({}, planner_data=planted, storage_data={}))


FORMAT = metadata._MEM_FORMAT_ENCODING
MEMBER = Reduced(getattr, (FORMAT, "TORCH_CONTIGUOUS_FORMAT"))
HOSTILE = {
    "attribute of an attribute": Reduced(getattr, (MEMBER, "__class__")),
    "of a called attribute": Reduced(getattr, (Reduced(getattr, (FORMAT, "mro")), "__call__")),
    "of another class": Reduced(getattr, (metadata.Metadata, "__init__")),
    "of a path": Reduced(getattr, (Path, "home")),
    "of a dictionary": Reduced(getattr, (OrderedDict, "fromkeys")),
    "of a size": Reduced(getattr, (torch.Size, "numel")),
    "of a module's name": Reduced(getattr, ("os", "system")),
    "of itself": Reduced(getattr, (getattr, "__self__")),
    "with a default": Reduced(getattr, (FORMAT, "TORCH_CONTIGUOUS_FORMAT", None)),
    "without a name": Reduced(getattr, (FORMAT,)),
    "without arguments": Reduced(getattr, ()),
    "with a number": Reduced(getattr, (FORMAT, 1)),
    "with bytes": Reduced(getattr, (FORMAT, b"TORCH_CONTIGUOUS_FORMAT")),
    "called with a class that was changed": Reduced(
        getattr, (Reduced(getattr, (FORMAT, "mro"), (None, {"__name__": "x"})), "y")
    ),
}
"""Uses of getattr that are not the name of a member."""


@pytest.mark.parametrize("planted", HOSTILE.values(), ids=HOSTILE)
def test_no_other_getattr_is_allowed(planted: Reduced, tmp_path: Path) -> None:
    with pytest.raises(ForbiddenError, match=r"names builtins\.getattr"):
        checkpoint_index.parse(index_with(planted))
    torch.save(planted, tmp_path / "common.pt")
    state = torch.frombuffer(bytearray(pickle.dumps(planted)), dtype=torch.uint8)
    for read in (
        lambda: torch.load(tmp_path / "common.pt", weights_only=True),
        lambda: unpickling.checked_extra_state(state),
    ):
        with pytest.raises((ForbiddenError, pickle.UnpicklingError)) as caught:
            read()
        assert unpickling.forbidden(caught.value)


def test_getattr_stays_what_it_is_after_a_pickle_has_changed_it() -> None:
    """BUILD can set attributes of whatever a pickle names."""
    changed = b"cbuiltins\ngetattr\n(N}X\x07\x00\x00\x00__new__cbuiltins\nset\nstb0."
    with pytest.raises(ValueError, match="not a torch_dist index"):
        checkpoint_index.parse(changed)
    for read in (
        checkpoint_index.parse,
        lambda data: unpickling._ExtraState(io.BytesIO(data)).load(),
    ):
        with pytest.raises(ForbiddenError):
            read(pickle.dumps(HOSTILE["of a path"]))


def test_scales_that_any_python_wrote_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine pickles FP8's scales with their recipe, which has a member of an enum."""
    recipe = types.ModuleType(unpickling.RECIPES)
    exec(
        "import enum\nclass Format(enum.Enum):\n    HYBRID = (448, 57344)\n    E4M3 = (448, 448)",
        vars(recipe),
    )
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, unpickling.RECIPES, recipe)
    for form in (Reduced(getattr, (recipe.Format, "HYBRID")), recipe.Format.HYBRID):
        state = torch.frombuffer(bytearray(pickle.dumps({"recipe": form})), dtype=torch.uint8)
        there = unpickling.checked_extra_state(state).numpy().tobytes()
        assert pickle.loads(there) == {"recipe": recipe.Format.HYBRID}
    for wrong in ("mro", "__members__", "NONE"):
        with pytest.raises(ForbiddenError):
            unpickling.enum_member(recipe.Format, wrong)


@pytest.mark.process
def test_members_are_pickled_by_value() -> None:
    """0.2.0 reads what this Python writes. Debian's would name getattr."""
    python = debian()
    program = (
        "import enum, pickle; from trainer.contract.files.checkpoint_index import pickle_by_value\n"
        "class E(enum.Enum): A = 7\n"
        "before = pickle.dumps(E.A); pickle_by_value(E); after = pickle.dumps(E.A)\n"
        "print(b'getattr' in before, b'getattr' in after, pickle.loads(after) is E.A is pickle.loads(before))"
    )
    done = python.run("-c", program)
    assert done.stdout == "True False True\n", done.stderr


def crosses_over(there: Python, config: dict[str, Any], single: Run, stop: Path) -> Run:
    """A run that changes from this Python to another one and back."""
    stop.touch()
    finished(config, "--stop-file", str(stop))
    there.finished(config, "--stop-file", str(stop))
    result = finished(config)
    assert result.steps == single.steps
    for iteration in (1, 2, 6):
        written = result.checkpoints / f"iter_{iteration:07d}" / INDEX
        assert [name for name in names_in(written.read_bytes()) if not allowed_by_0_2_0(name)] == []
    return result


@pytest.mark.slow  # the next test, and the pickles of all Pythons
@pytest.mark.process
def test_a_run_stops_and_resumes_on_debians_python(
    config: dict[str, Any], single_gpt: Run, tmp_path: Path
) -> None:
    crosses_over(debian(), config, single_gpt, tmp_path / "stop")


@pytest.mark.process
@pytest.mark.parametrize(
    "resumes",
    [
        pytest.param(finished, id="here"),
        pytest.param(lambda config: debian().finished(config), id="there", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_0_2_0_on_debians_python_is_rescued(
    resumes: Callable[[dict[str, Any]], Run], config: dict[str, Any], single_gpt: Run, tmp_path: Path
) -> None:
    """0.2.0 wrote such checkpoints, called them complete, and refused to resume from them."""
    python = debian()
    (tmp_path / "stop").touch()
    stopped = finished(config, "--stop-file", str(tmp_path / "stop"))
    path = stopped.checkpoints / "iter_0000001"
    done = python.run("-W", "ignore", "-c", PICKLE_AGAIN, str(path / INDEX))
    assert done.returncode == 0, done.stderr
    assert "builtins getattr" in names_in((path / INDEX).read_bytes())
    record = checkpoint_files.read_record(path)
    record["files"][INDEX] = checkpoint_files.describe_file(path / INDEX)
    (path / COMPLETE).write_text(checkpoint_files.record_text(record))
    assert hpcgen("checkpoint", "inspect", path, "--tensors").status == 0
    assert resumes(config).steps == single_gpt.steps


PYTHONS = os.environ.get("PYTHONS", "").split() or [
    pytest.param("", marks=pytest.mark.skip('make test-pythons PYTHONS="/path/of/python3.12 ..." names them'))
]


@pytest.mark.slow
@pytest.mark.parametrize("executable", PYTHONS)
def test_a_run_stops_and_resumes_on_another_python(
    executable: str, config: dict[str, Any], single_gpt: Run, tmp_path: Path
) -> None:
    there = Python(executable)
    crosses_over(there, config, single_gpt, tmp_path / "stop")
    reading = (
        "import sys, torch, trainer.checkpoint.unpickling; from trainer.contract import checkpoint_index\n"
    )
    reading += "for path in sys.argv[1:]:\n"
    reading += (
        "    torch.load(path) if path.endswith('.pt') else checkpoint_index.parse(open(path, 'rb').read())"
    )
    done = there.run(
        "-W", "ignore", "-c", reading, *map(str, (*HERE.glob("index-*"), *HERE.glob("common-*")))
    )
    assert done.returncode == 0, done.stderr
