"""The user's code that runs is the code that was hashed, however it is imported. Messages if it cannot be loaded."""

from __future__ import annotations

import os
import py_compile
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainer.contract.code import code_loading, user_code
from trainer.contract.code.code_record import CodeRecord
from trainer.contract.config import ConfigError
from trainer.contract.files.hashing import sha256
from trainer.contract.resuming.change import Change

pytestmark = pytest.mark.usefixtures("code_of_this_test")


def write(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_a_module_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    write(tmp_path / "my_package/parts.py", "def layers():\n    return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert code_loading.load("my_package.parts:layers", "a.key")() == 7


def test_a_file_can_import_its_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "my_constants.py", "NUMBER = 7\n")
    write(tmp_path / "my_layers.py", "import my_constants\n\ndef layers():\n    return my_constants.NUMBER\n")
    monkeypatch.chdir(tmp_path)
    assert code_loading.load("my_layers.py:layers", "a.key")() == 7
    again = code_loading.load(f"{tmp_path}/my_layers.py:layers", "another.key")
    assert again is code_loading.load("my_layers.py:layers", "a.key")


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
    with pytest.raises(ConfigError, match=f"^a.key = {path!r}.*{reason}"):
        code_loading.load(path, "a.key")


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
        code_loading.load(f"{file}:f", "a.key")


def test_a_file_does_not_take_the_name_of_another_module(tmp_path: Path) -> None:
    for name in ("json", "wave"):  # one that is imported already, and one that could be
        file = write(tmp_path / f"{name}.py", "def f(): ...\n")
        with pytest.raises(
            ConfigError, match=f"{name} is not a valid module name, or another module has this name"
        ):
            code_loading.load(f"{file}:f", "a.key")
        [code] = user_code.read([f"{file}:f"]).values()
        assert CodeRecord.of(code).entry()["sha256"] == sha256(
            file.read_bytes()
        )  # what the run compares first


@dataclass(frozen=True)
class Way:
    """A way to import the number of another file. `main` defines the function `number`."""

    main: str
    helper: str = "u_helper.py"
    """File with the number."""
    others: tuple[tuple[str, str], ...] = ()


IN_PACKAGE = (("u_pkg/__init__.py", ""),)
WAYS = {
    "import": Way("import u_helper\ndef number(): return u_helper.NUMBER"),
    "from": Way("from u_helper import NUMBER\ndef number(): return NUMBER"),
    "star": Way("from u_helper import *\ndef number(): return NUMBER"),
    "in a function": Way("def number():\n    import u_helper\n    return u_helper.NUMBER"),
    "in a method": Way(
        "class A:\n    def f(self):\n        from u_helper import NUMBER\n        return NUMBER\n"
        "def number(): return A().f()"
    ),
    "in try": Way(
        "try:\n    import u_helper\nexcept ImportError:\n    u_helper = None\ndef number(): return u_helper.NUMBER"
    ),
    "by another file": Way(
        "import u_between\ndef number(): return u_between.u_helper.NUMBER",
        others=(("u_between.py", "import u_helper"),),
    ),
    "by a string": Way("import importlib\ndef number(): return importlib.import_module('u_helper').NUMBER"),
    "by __import__": Way("def number(): return __import__('u_helper').NUMBER"),
    "by strings in a loop": Way(
        "from importlib import import_module\nFOUND = [import_module(n) for n in ('u_helper', 'math')]\n"
        "def number(): return FOUND[0].NUMBER"
    ),
    "of a package": Way(
        "import u_pkg.part\ndef number(): return u_pkg.part.NUMBER", "u_pkg/part.py", IN_PACKAGE
    ),
    "from a package": Way(
        "from u_pkg import part\ndef number(): return part.NUMBER", "u_pkg/part.py", IN_PACKAGE
    ),
    "of a deep package": Way(
        "from u_pkg.deep.part import NUMBER\ndef number(): return NUMBER",
        "u_pkg/deep/part.py",
        (*IN_PACKAGE, ("u_pkg/deep/__init__.py", "")),
    ),
    "the package itself": Way(
        "import u_pkg.part\ndef number(): return u_pkg.NUMBER", "u_pkg/__init__.py", (("u_pkg/part.py", ""),)
    ),
    "without __init__": Way("from u_pkg.part import NUMBER\ndef number(): return NUMBER", "u_pkg/part.py"),
    "__all__ of a package": Way(
        "from u_pkg import *\ndef number(): return part.NUMBER",
        "u_pkg/part.py",
        (("u_pkg/__init__.py", "__all__ = ['part']"),),
    ),
    "relative": Way(
        "import u_pkg\ndef number(): return u_pkg.NUMBER",
        "u_pkg/part.py",
        (("u_pkg/__init__.py", "from .part import NUMBER"),),
    ),
    "relative module": Way(
        "import u_pkg\ndef number(): return u_pkg.part.NUMBER",
        "u_pkg/part.py",
        (("u_pkg/__init__.py", "from . import part"),),
    ),
    "relative to the parent": Way(
        "from u_pkg.deep import part\ndef number(): return part.f()",
        "u_pkg/other.py",
        (
            *IN_PACKAGE,
            ("u_pkg/deep/__init__.py", ""),
            ("u_pkg/deep/part.py", "def f():\n    from ..other import NUMBER\n    return NUMBER"),
        ),
    ),
    "relative by a string": Way(
        "import u_pkg\ndef number(): return u_pkg.f()",
        "u_pkg/part.py",
        (
            (
                "u_pkg/__init__.py",
                "import importlib\ndef f(): return importlib.import_module('.part', __name__).NUMBER",
            ),
        ),
    ),
    "through sys.path": Way(
        "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\nimport u_helper\n"
        "def number(): return u_helper.NUMBER"
    ),
}


def write_code(directory: Path, way: Way, number: int) -> Path:
    """Writes the files, and caches of other code that Python would not compare with the files."""
    files = dict(way.others) | {"u_main.py": way.main, way.helper: f"NUMBER = {number}"}
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NUMBER = ", "NUMBER = 9 + "))
        py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        path.write_text(text + "\n")
    return directory / way.helper


@pytest.mark.parametrize("named", ["file", "module", "module of a package"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_what_runs_is_what_was_hashed(
    way: Way, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path / "on_path")
    directory, path = tmp_path / "on_path", "u_main:number"
    if named == "file":
        directory = tmp_path / "elsewhere"
        path = f"{directory}/u_main.py:number"
    elif named == "module of a package":
        (tmp_path / "on_path" / "u_caller").mkdir(parents=True)
        write(directory / "u_caller/own.py", "from u_main import number\n")
        path = "u_caller.own:number"
    helper = write_code(directory, way, 1)
    caches = {each: each.read_bytes() for each in directory.rglob("*.pyc")}
    codes = user_code.read([path])
    code_loading.use(codes)
    record = CodeRecord.of(codes[path]).entry()
    status = helper.stat()
    helper.write_text("NUMBER = 2\n")  # other ranks may start later
    os.utime(helper, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert code_loading.load(path, "a.key")() == 1
    assert {each: each.read_bytes() for each in directory.rglob("*.pyc")} == caches
    name = helper.relative_to(directory).as_posix()
    assert record["modules"][name] == sha256(b"NUMBER = 1\n")
    now = CodeRecord.of(user_code.read([path])[path])
    assert now.change("a.key", record) == Change(
        "a.key",
        f"{helper} (SHA-256 {sha256(b'NUMBER = 1' + os.linesep.encode())[:12]})",
        f"{helper} (SHA-256 {sha256(b'NUMBER = 2' + os.linesep.encode())[:12]})",
        is_content=True,
    )
    seen = CodeRecord.found(path, record)  # as on a login node, which does not search for modules
    assert (seen is None) is (named != "file")
    assert seen is None or seen.change("key", record) == now.change("key", record)


@pytest.mark.parametrize(
    ("main", "others", "reason"),
    [
        (
            "import importlib\ndef number(): return importlib.import_module('u_' + 'helper')",
            {"u_helper.py": ""},
            r"u_main\.py imports .*/u_helper\.py, whose content was not recorded, .* Add one \(import u_helper\)",
        ),
        (
            "import os, sys\nsys.path.insert(0, os.path.dirname(__file__) + '/lib')\n"
            "import u_helper\ndef number(): ...",
            {"lib/u_helper.py": ""},
            r'u_main\.py executes .*/lib/u_helper\.py, whose content was not recorded.*\("lib/u_helper\.py"\)',
        ),
        ("import u_helper\ndef number(): ...", {"u_helper.pyc": ""}, r"u_helper\.pyc has no source code"),
        (
            "import u_pkg.u_helper\ndef number(): ...",
            {
                "u_pkg/__init__.py": "import os\n__path__.append(os.path.dirname(__file__) + '/deep')",
                "u_pkg/deep/u_helper.py": "",
            },
            r"executes .*/u_pkg/deep/u_helper\.py, whose content was not recorded",
        ),
        (
            "import u_pkg\ndef number(): ...",
            {
                "u_pkg/__init__.py": "import pkgutil\nfor each in pkgutil.iter_modules(__path__):\n"
                "    loader = each.module_finder.find_spec(f'u_pkg.{each.name}').loader\n"
                "    exec(loader.get_code(f'u_pkg.{each.name}'))",
                "u_pkg/u_helper.py": "",
            },
            r"executes .*/u_pkg/u_helper\.py, whose content was not recorded",
        ),
        (
            "from importlib.machinery import SourceFileLoader\nimport os\ndef number():\n"
            "    file = os.path.join(os.path.dirname(__file__), 'lib', 'u_helper.py')\n"
            "    SourceFileLoader('os', file).exec_module(os)",
            {"lib/u_helper.py": ""},
            r"executes .*/lib/u_helper\.py, whose content was not recorded",
        ),
    ],
)
def test_code_that_nobody_hashed_is_refused(
    main: str, others: dict[str, str], reason: str, tmp_path: Path
) -> None:
    for name, text in {"u_main.py": main, **others}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        write(tmp_path / name, text)
    with pytest.raises(ConfigError, match=reason):
        code_loading.load(f"{tmp_path}/u_main.py:number", "a.key")()


EXECUTIONS = {
    "spec_from_file_location": "import importlib.util, os\n"
    "spec = importlib.util.spec_from_file_location('u', os.path.join(os.path.dirname(__file__), 'u_pkg/helper.py'))\n"
    "found = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(found)\ndef number(): return found.NUMBER",
    "SourceFileLoader": "import types\nfrom importlib.machinery import SourceFileLoader\nfrom pathlib import Path\n"
    "def number():\n    file = Path(__file__).parent / 'u_pkg/helper.py'\n"
    "    found = types.ModuleType('u')\n    SourceFileLoader('u', str(file)).exec_module(found)\n"
    "    return found.NUMBER",
    "run_path": "import os, runpy\n"
    "def number(): return runpy.run_path(f'{os.path.dirname(__file__)}/u_pkg/helper.py')['NUMBER']",
    "run_module": "import runpy\ndef number(): return runpy.run_module('u_pkg.helper')['NUMBER']",
    "compile": "from pathlib import Path\nFILE = Path(__file__).parent / 'u_pkg/helper.py'\ndef number():\n"
    "    found = {}\n    exec(compile(FILE.read_text(), str(FILE), 'exec'), found)\n    return found['NUMBER']",
}
"""Ways to execute a file that are not an import."""


def plant_cache(helper: Path) -> None:
    source = helper.read_bytes()
    helper.write_text("NUMBER = 9\n")
    py_compile.compile(str(helper), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    helper.write_bytes(source)


@pytest.mark.parametrize("harm", [plant_cache, lambda helper: helper.write_text("NUMBER = 9\n")])
@pytest.mark.parametrize("way", EXECUTIONS.values(), ids=EXECUTIONS.keys())
def test_what_is_executed_without_an_import(way: str, harm: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "u_pkg").mkdir()
    helper, main = write(tmp_path / "u_pkg/helper.py", "NUMBER = 1\n"), write(tmp_path / "u_main.py", way)
    path = f"{main}:number"
    codes = user_code.read([path])
    assert CodeRecord.of(codes[path]).entry()["modules"]["u_pkg/helper.py"] == sha256(b"NUMBER = 1\n")
    code_loading.use(codes)
    assert code_loading.load(path, "a.key")() == 1
    for name in ("u_main", "u_pkg.helper", "u"):
        sys.modules.pop(name, None)
    harm(helper)
    try:
        assert code_loading.load(path, "a.key")() == 1
    except ConfigError as error:
        assert "helper.py: what Python would execute is not what the file contained" in str(error)  # noqa: PT017


def test_what_other_software_executes_is_its_own_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also below the directory of the user's code, such as a virtual environment or a cache of compiled kernels."""
    for folder in ("site", "cache"):
        (tmp_path / folder).mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    write(tmp_path / "cache/kernel.py", "NUMBER = 1\n")
    write(
        tmp_path / "site/u_software.py",
        "import runpy\ndef run(file): return runpy.run_path(file)['NUMBER']\n",
    )
    main = write(
        tmp_path / "u_main.py",
        "import os\ndef number():\n    import u_software\n"
        "    return u_software.run(os.path.join(os.path.dirname(__file__), 'cache', 'kernel.py'))\n",
    )
    assert code_loading.load(f"{main}:number", "a.key")() == 1


def test_an_extension_module_is_hashed_before_it_is_loaded(tmp_path: Path) -> None:
    """It has priority over a source file of the same name, so a planted one must be noticed."""
    main = write(tmp_path / "u_main.py", "import u_helper\ndef number(): ...\n")
    write(tmp_path / "u_helper.py", "")
    path = f"{main}:number"
    record = CodeRecord.of(user_code.read([path])[path]).entry()
    extension = write(tmp_path / "u_helper.so", "another one")
    codes = user_code.read([path])
    assert CodeRecord.of(codes[path]).change("key", record) == Change(
        "key",
        f"{tmp_path}/u_helper.py (SHA-256 {sha256(b'')[:12]})",
        f"no {tmp_path}/u_helper.py (and 1 more)",
        is_content=True,
    )
    code_loading.use(codes)
    write(extension, "changed")
    with pytest.raises(ConfigError, match=r"u_helper\.so has changed since the run began"):
        code_loading.load(path, "a.key")


def test_installed_packages_do_not_belong_to_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "u_layers-1.0.dist-info").mkdir()
    for name in ("u_layers", "u_library"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "__init__.py", "import u_library\ndef number(): return 7\n")
    [code] = user_code.read(["u_layers:number"]).values()
    assert set(code.sources) == {"u_layers/__init__.py"}
    assert code_loading.load("u_layers:number", "a.key")() == 7


def test_source_code_is_read_again_from_memory(tmp_path: Path) -> None:
    """As torch.jit.script and Triton do, when they compile a function."""
    import inspect

    main = write(tmp_path / "u_main.py", "def number():\n    return 1\n")
    number = code_loading.load(f"{main}:number", "a.key")
    write(main, "def number():\n    return 2 + 3\n")
    assert inspect.getsource(number) == "def number():\n    return 1\n"
