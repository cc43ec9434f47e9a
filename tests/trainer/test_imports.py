"""Loading of users' functions, and the messages if it fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.contract import imports
from trainer.contract.config import ConfigError


@pytest.fixture(autouse=True)
def modules_of_this_test() -> Iterator[None]:
    path, modules = sys.path.copy(), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        del sys.modules[name]


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_a_module_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    write(tmp_path / "my_package/parts.py", "def layers():\n    return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert imports.load("my_package.parts:layers", "model.layer_spec")() == 7


def test_a_file_can_import_its_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "my_constants.py", "NUMBER = 7\n")
    write(tmp_path / "my_layers.py", "import my_constants\n\ndef layers():\n    return my_constants.NUMBER\n")
    monkeypatch.chdir(tmp_path)
    assert imports.load("my_layers.py:layers", "model.layer_spec")() == 7
    again = imports.load(f"{tmp_path}/my_layers.py:layers", "optimizer.lr_schedule")
    assert again is imports.load("my_layers.py:layers", "model.layer_spec")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("layers", "is not an import path. Use package.module:function or file.py:function"),
        ("my layers:spec", "is not an import path"),
        ("os.path:", "is not an import path"),
        ("no_such_module:f", r"there is no module no_such_module\. Install it for .* PYTHONPATH"),
        ("os.no_such_module:f", r"there is no module os\.no_such_module"),
        ("/no/such/file.py:f", r"there is no file /no/such/file\.py\. Every node"),
        ("os.path:joint", "has no function joint; did you mean join?"),
        ("os.path:zzzzz", "has no function zzzzz; it defines "),
        ("os.path:sep", "sep is a str, not a function"),
    ],
)
def test_missing_functions_are_errors(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.layer_spec = {path!r}.*{reason}"):
        imports.load(path, "model.layer_spec")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import json\n1 / 0\n", r"cannot be imported: ZeroDivisionError: .*my_broken\.py:2\)"),
        (
            "import no_such_thing\n",
            r"cannot be imported: ModuleNotFoundError: .*no_such_thing.*my_broken\.py:1\)",
        ),
        ("def f(:\n", r"cannot be imported: SyntaxError: .*line 1"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(text: str, reason: str, tmp_path: Path) -> None:
    file = write(tmp_path / "my_broken.py", text)
    with pytest.raises(ConfigError, match=reason):
        imports.load(f"{file}:f", "model.layer_spec")


def test_a_file_does_not_take_the_name_of_another_module(tmp_path: Path) -> None:
    for name in ("json", "wave"):  # one that is imported already, and one that could be
        file = write(tmp_path / f"{name}.py", "def f(): ...\n")
        with pytest.raises(
            ConfigError, match=f"{name} is not a valid module name, or another module has this name"
        ):
            imports.load(f"{file}:f", "model.layer_spec")


def test_the_file_of_an_import_path() -> None:
    assert imports.file_of("../my/layers.py:spec") == "../my/layers.py"
    assert imports.file_of("my.layers:spec") is None
    assert imports.file_of("layers.py") is None
    assert imports.with_file("layers.py:spec", "/home/me/layers.py") == "/home/me/layers.py:spec"
    assert re.fullmatch(imports.IMPORT_PATH, "a.b.py:f")
