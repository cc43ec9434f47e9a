"""Source code of the user's functions: read once, hashed, and executed from memory.

A function's file imports other modules of the same directory. `read` finds them without running anything: it follows
the import statements of each file, also those inside functions. Checkpoints record the hashes of all these files
(`trainer.contract.resuming.provenance`), and `trainer.contract.code.code_loading` executes the same bytes.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from trainer.contract.code.imports import IMPORT_PATH, file_of
from trainer.contract.files.hashing import sha256
from trainer.contract.files.regular_file import read_bytes

LOADED_HERE = "code of the user"
"""`loader_state` of the modules that `trainer.contract.code.code_loading` executes."""

_MODULE_NAME = re.compile(r"\.*[^\W\d]\w*(\.[^\W\d]\w*)*")
_FILE_NAME = re.compile(r"(\./|/)?(?P<stem>([^/.\0\n]+/)*[^/.\0\n]+)\.py")
_IMPORTING = (b"import_module", b"__import__", b"run_module", b"find_spec")


@dataclass(frozen=True)
class UserCode:
    """The files behind one import path. Names of files are relative to `directory` and use slashes."""

    directory: Path
    """Directory in which Python finds the module, or its outermost package."""
    file: str
    """File of the module."""
    only: str | None = None
    """Package that contains all of the code; None if all modules of `directory` belong to it."""
    sources: dict[str, bytes] = field(default_factory=dict)
    """Content of the source files."""
    compiled: dict[str, str] = field(default_factory=dict)
    """SHA-256 of extension modules."""

    @property
    def path(self) -> Path:
        """Path of the module's file."""
        return self.directory / self.file

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file."""
        return {name: sha256(content) for name, content in self.sources.items()} | self.compiled


def read(paths: Iterable[str]) -> dict[str, UserCode]:
    """Read the code behind each import path. Leaves out paths whose file or module is not found.

    A file that several paths need is read once, so that all of them have the same content.

    Raises:
        OSError: a file exists but cannot be read.
    """
    importlib.invalidate_caches()  # a file that is a second old may be missing in Python's list of its directory
    contents: dict[Path, bytes] = {}
    found = {}
    for path in dict.fromkeys(paths):
        place = _place(path)
        if place is not None:
            found[path] = _Reading(*place, contents).code
    return found


def spec_in(directory: Path, name: str) -> ModuleSpec | None:
    """Where Python finds the module `name` below `directory`. Imports nothing."""
    *packages, last = name.split(".")
    return PathFinder.find_spec(last, [str(directory.joinpath(*packages))])


def file_in(directory: Path, name: str) -> str | None:
    """File of the module `name` below `directory`, relative to it. None if the module has no file, as a directory of
    modules."""
    spec = spec_in(directory, name)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():  # in an archive, for example
        return None
    return Path(spec.origin).relative_to(directory).as_posix()


def is_source(file: str) -> bool:
    """True for source code."""
    return file.endswith(tuple(SOURCE_SUFFIXES))


def is_compiled(file: str) -> bool:
    """True for an extension module, such as name.cpython-312-x86_64-linux-gnu.so."""
    return file.endswith(tuple(EXTENSION_SUFFIXES))


def is_loaded_software(name: str) -> bool:
    """True for a top-level module of Python, or one that this process has imported but not as a user's code.

    These belong to the software, whose versions are recorded.
    """
    if name in sys.stdlib_module_names:
        return True
    return name in sys.modules and not is_users(sys.modules[name])


def is_users(module: ModuleType) -> bool:
    """True for a module that was executed from memory."""
    return getattr(module.__spec__, "loader_state", None) == LOADED_HERE


def _place(path: str) -> tuple[Path, str, str | None] | None:
    """Directory and name of an import path's module, and the package that contains all of the code if there is one."""
    match = IMPORT_PATH.fullmatch(path)
    if match is None:
        return None
    if file := file_of(path):
        location = Path(file).absolute()
        is_module = location.stem.isidentifier() and file_in(location.parent, location.stem) == location.name
        return (location.parent, location.stem, None) if is_module else None
    name = match["source"]
    top = name.partition(".")[0]
    spec = None if is_loaded_software(top) else importlib.util.find_spec(top)  # imports nothing without a dot
    for place in places(spec):
        directory = place.absolute().parent
        if file_in(directory, name) is not None:
            return directory, name, top if _is_installation(directory) else None
    return None


def places(spec: ModuleSpec | None) -> list[Path]:
    """The directories of a package, or the file of a module."""
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return list(map(Path, spec.submodule_search_locations))
    return [Path(spec.origin)] if spec.origin and spec.has_location else []


def _is_installation(directory: Path) -> bool:
    """True for a directory of installed packages, which do not belong to each other."""
    return any(name.endswith(".dist-info") for name in os.listdir(directory))  # noqa: PTH208


class _Reading:
    """Reads a module and the modules that it imports."""

    def __init__(self, directory: Path, name: str, only: str | None, contents: dict[Path, bytes]) -> None:
        file = file_in(directory, name)
        assert file is not None
        self.code = UserCode(directory, file, only)
        self._name = name
        self._contents = contents
        self._seen: set[str] = set()
        pending = [name]
        while pending:
            for each in _with_packages(pending.pop()):
                if each not in self._seen:
                    self._seen.add(each)
                    pending += self._read(each)

    def _read(self, name: str) -> Iterable[str]:
        """Read a module. Returns the names of the modules that it may import."""
        directory = self.code.directory
        # A file is found by its path, so it may have the name of other software, such as sched.py.
        is_users = name == self._name or self._is_users(name.partition(".")[0])
        file = file_in(directory, name) if is_users else None
        if file is None or not (is_source(file) or is_compiled(file)):
            return ()
        content = self._contents.get(directory / file)
        if content is None:
            content = self._contents[directory / file] = read_bytes(directory / file)
        if is_compiled(file):
            self.code.compiled[file] = sha256(content)
            return ()
        self.code.sources[file] = content
        package = name if file.endswith("/__init__.py") else name.rpartition(".")[0]
        return list(_imported(content, package))

    def _is_users(self, top: str) -> bool:
        """True if Python finds this top-level module in the directory, which is searched last."""
        if self.code.only is not None:
            return top == self.code.only
        if is_loaded_software(top):
            return False
        return is_below(
            PathFinder.find_spec(top, [*sys.path, str(self.code.directory)]), top, self.code.directory
        )


def is_below(spec: ModuleSpec | None, name: str, directory: Path) -> bool:
    """True if `spec` is the module `name` of `directory`, and not a different module with this name."""
    parent = directory.joinpath(*name.split(".")[:-1])
    return any(is_same_directory(place.parent, parent) for place in places(spec))


def is_same_directory(one: Path, other: Path) -> bool:
    """True if both paths name one directory."""
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def _with_packages(name: str) -> Iterator[str]:
    """The packages of a module, which Python imports first, and the module."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Names that may be modules, from the import statements of a file in `package` ("" at the top level).

    In a file that imports modules by strings, every string that could be a module's name counts, and in any file those
    of __all__, whose modules `from package import *` imports, and names of files such as "parts/layers.py".
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # the import reports it
    by_string = any(word in source for word in _IMPORTING)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}".strip(".") for alias in node.names if module is not None)
            yield from [module] if module else []
        elif isinstance(node, ast.Constant):
            yield from _file_named_by(node, package)
            yield from _named_by(node, package) if by_string else ()
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and _binds_all(node):
            for constant in ast.walk(node):
                yield from _named_by(constant, package)


def _absolute(name: str, package: str) -> str | None:
    """Absolute name of a module that is named relative to `package` with leading dots. None outside of packages."""
    bare = name.lstrip(".")
    level = len(name) - len(bare)
    if not level:
        return name
    parts = package.split(".") if package else []
    if level > len(parts):
        return None
    return ".".join((*parts[: len(parts) - level + 1], *([bare] if bare else [])))


def _named_by(constant: ast.AST, package: str) -> Iterator[str]:
    """Modules that a string may name, absolutely or as a part of `package`."""
    value = constant.value if isinstance(constant, ast.Constant) else None
    if not isinstance(value, str) or not _MODULE_NAME.fullmatch(value):
        return
    names = {_absolute(value, package), f"{package}.{value}" if package else None}
    yield from (name for name in names if name)


def _file_named_by(constant: ast.Constant, package: str) -> Iterator[str]:
    """Modules in the file that a string may name, relative to the directory of the code or of `package`."""
    value = constant.value
    if isinstance(value, str) and (match := _FILE_NAME.fullmatch(value)):
        name = match["stem"].replace("/", ".")
        yield from (name, f"{package}.{name}") if package else (name,)


def _binds_all(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)
