"""Loads the user's own functions, from the sources that `trainer.contract.code.user_code` has read.

Modules of the user never come from Python's bytecode caches, and none are written for them: a cache can be stale, or
made from other source code. All ranks execute the bytes that rank 0 has read, whatever happens to the files meanwhile.

Imports find these bytes. Python can also execute a file without importing it, or import it from a place that is not
searched here: with loaders of importlib, runpy, compile, a longer `__path__` or `sys.path`. An audit hook sees the code
before Python executes it, and refuses what is not recorded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from trainer.contract.code import signatures, user_code
from trainer.contract.code.imports import IMPORT_PATH
from trainer.contract.code.user_code import UserCode
from trainer.contract.config import ConfigError
from trainer.contract.files.hashing import sha256
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.spelling import did_you_mean


def use(codes: Mapping[str, UserCode]) -> None:
    """Make imports in this process use `code`, by import path, instead of the current files."""
    if codes and _FINDER not in sys.meta_path:
        _FINDER.searched_before = frozenset(os.path.realpath(entry) for entry in sys.path)
        sys.meta_path.insert(0, _FINDER)
        _add_audit_hook()
    _FINDER.add(codes)


def read(paths: Iterable[str]) -> dict[str, UserCode]:
    """The code behind each import path: the code that this process already uses, or else the current content of the
    files.

    Raises:
        OSError: a file exists but cannot be read.
    """
    paths = list(paths)
    in_use = {path: _FINDER.codes[path] for path in paths if path in _FINDER.codes}
    return in_use | user_code.read(path for path in paths if path not in in_use)


def load(path: str, what: str) -> Callable[..., Any]:
    """Load the function at an import path. `what` is the key of the configuration that names it.

    Raises:
        ConfigError: the import path is invalid, the module or file is missing or fails, or lacks the function, or the
            function does not take the arguments with which the trainer calls it.
    """
    match = IMPORT_PATH.fullmatch(path)
    where = f"{what} = {path!r}"
    if match is None:
        raise ConfigError(f"{where} is not an import path. Use package.module:function or file.py:function")
    use(read([path]))
    source, name = match["source"], match["name"]
    module = _run_file(Path(source), where) if source.endswith(".py") else _import(source, where)
    function = getattr(module, name, None)
    if callable(function):
        if wrong := _wrong_signature(function, what):
            raise ConfigError(f"{name} {wrong}", where=where)
        return function  # type: ignore[no-any-return]
    if function is not None:
        raise ConfigError(f"{name} is a {type(function).__name__}, not a function", where=where)
    defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    known = did_you_mean(name, defined) or f"it defines {', '.join(sorted(defined)) or 'none'}"
    raise ConfigError(f"{module.__file__} has no function {name}; {known}", where=where)


def _wrong_signature(function: Callable[..., Any], what: str) -> str:
    """Why the trainer could not call a function or a class. Empty if it can, or if Python does not know."""
    if not inspect.isclass(function):
        signature = _signature(function)
        return "" if signature is None else signatures.function_problem(what, signature)
    method = _method(function, "forward") or _method(function, "__call__")  # torch calls forward
    called = None if method is None else _signature(functools.partial(method, None))
    return signatures.class_problem(what, _signature(function), called, is_called=method is not None)


def _method(cls: type, name: str) -> Callable[..., Any] | None:
    """A method of a class or its bases. All classes have a __call__ of their own, which makes instances."""
    return next((vars(base)[name] for base in cls.__mro__ if callable(vars(base).get(name))), None)


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    with contextlib.suppress(ValueError, TypeError):
        return inspect.signature(function)
    return None


class _Finder(MetaPathFinder):
    """Finds modules of the user in memory, and refuses those whose content was not hashed."""

    def __init__(self) -> None:
        self.codes: dict[str, UserCode] = {}
        self.searched_before: frozenset[str] = frozenset()
        """Directories of sys.path that the user's code has not added."""
        self._packages: set[str] = set()
        self._sources: dict[str, bytes] = {}
        self._compiled: dict[str, str] = {}

    def add(self, codes: Mapping[str, UserCode]) -> None:
        """Use more code, by import path."""
        self.codes.update(codes)
        for code in codes.values():
            for name, content in code.sources.items():
                self._sources[os.path.realpath(code.directory / name)] = content
            for name, digest in code.compiled.items():
                self._compiled[os.path.realpath(code.directory / name)] = digest

    def check(self, file: str, code: CodeType | None, frame: FrameType) -> None:
        """Check the code of a file that `frame` is about to execute; None for an extension module.

        Raises:
            ConfigError: it is not what was recorded, or the user's code executes it and nothing was recorded.
        """
        path = os.path.realpath(file)
        if path in self._sources:
            if code is not None and code != _compiled(self._sources[path], file):
                raise ConfigError(
                    "what Python would execute is not what the file contained when the run began. The file "
                    "has changed, or its cache in __pycache__ is stale. Remove the cache and start the run again",
                    where=file,
                )
        elif path in self._compiled:
            if sha256(read_bytes(Path(file))) != self._compiled[path]:
                raise ConfigError(f"{file} has changed since the run began. Start the run again")
        elif (user := self._owner(path)) is not None and self._is_users(frame):
            relative = os.path.relpath(path, os.path.realpath(user.directory))
            raise ConfigError(
                f"{user.path} executes {file}, whose content was not recorded. Import it as a module of "
                f'{user.directory}, or write its path in one string ("{relative}"). If it is software, add its '
                "directory to PYTHONPATH"
            )

    def _owner(self, path: str) -> UserCode | None:
        """The code whose directory contains a file, unless the file belongs to software below this directory."""
        for code in self.codes.values():
            root = os.path.realpath(code.directory / (code.only or ""))
            below = (entry for entry in self.searched_before if entry != root and _is_inside(entry, root))
            if _is_inside(path, root) and not any(_is_inside(path, entry) for entry in below):
                return code
        return None

    def _is_users(self, frame: FrameType) -> bool:
        """True if the user's code executes or imports a file in `frame`, which may be one of importlib's."""
        caller: FrameType | None = frame
        while caller is not None and str(caller.f_globals.get("__name__")).partition(".")[0] in _IMPORTERS:
            caller = caller.f_back
        if caller is None:
            return False
        state = getattr(caller.f_globals.get("__spec__"), "loader_state", None)
        return state == user_code.LOADED_HERE or os.path.realpath(caller.f_code.co_filename) in self._sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where to find a module of the user. None for all other modules, which the other finders find."""
        parent = fullname.rpartition(".")[0]
        if parent and parent not in self._packages:
            return None
        places = [*sys.path, *(str(code.directory) for code in self.codes.values())] if path is None else path
        spec = PathFinder.find_spec(fullname, places)
        if spec is None:
            return None
        codes = list(self._codes_with(fullname, spec))
        if not codes:
            return None
        if spec.submodule_search_locations is not None:
            self._packages.add(fullname)
        if spec.has_location:
            spec = _recorded(fullname, spec, codes)
        spec.loader_state = user_code.LOADED_HERE
        return spec

    def _codes_with(self, name: str, spec: ModuleSpec) -> Iterator[UserCode]:
        """The code that a module belongs to. Code of several functions may share modules."""
        for code in self.codes.values():
            is_inside = code.only in (None, name.partition(".")[0])
            if is_inside and user_code.is_below(spec, name, code.directory):
                yield code


def _recorded(name: str, spec: ModuleSpec, codes: Sequence[UserCode]) -> ModuleSpec:
    """`spec` with a loader that executes the recorded content.

    Raises:
        ConfigError: the content of the file was not recorded.
    """
    assert spec.origin is not None
    origin, code = Path(spec.origin), codes[0]
    parts = name.split(".")[: None if origin.stem == "__init__" else -1]
    file = Path(*parts, origin.name).as_posix()
    for each in codes:
        if file in each.sources:
            loader = _Loader(name, str(origin), each.sources[file])
            places = spec.submodule_search_locations
            found = importlib.util.spec_from_file_location(
                name,
                origin,
                loader=loader,
                submodule_search_locations=None if places is None else list(places),
            )
            assert found is not None
            return found
        if file in each.compiled:
            return spec
    if not user_code.is_source(file) and not user_code.is_compiled(file):
        raise ConfigError(
            f"{origin} has no source code, so {code.path} cannot import it. Put {name}.py next to it"
        )
    raise ConfigError(
        f"{code.path} imports {origin}, whose content was not recorded, since no import statement names it. Add one "
        f"(import {name}), which may be in a function that is never called"
    )


class _Loader(SourceFileLoader):
    """Executes source code from memory."""

    def __init__(self, fullname: str, path: str, content: bytes) -> None:
        super().__init__(fullname, path)
        self._content = content

    def get_data(self, path: str) -> bytes:
        """The source code, or another file of the package."""
        return self._content if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source code."""
        return _compiled(self._content, self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module. Tracebacks, torch.jit and Triton, which read the source again, get the same source."""
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # which Python reports with the place
            text = importlib.util.decode_source(self._content)
            # Without a time, linecache never compares the entry with the file.
            linecache.cache[self.path] = (len(text), None, io.StringIO(text).readlines(), self.path)
        super().exec_module(module)


@functools.cache
def _compiled(content: bytes, path: str) -> CodeType:
    """Compile the source code of a module."""
    code: CodeType = compile(content, path, "exec", dont_inherit=True)
    return code


def _is_inside(path: str, directory: str) -> bool:
    return path.startswith(os.path.join(directory, ""))  # noqa: PTH118 - called for each import


_FINDER = _Finder()
"""The finder of this process. There is only one, as there is one sys.meta_path."""

_IMPORTERS = frozenset(
    ("importlib", "_frozen_importlib", "_frozen_importlib_external", "pkgutil", "runpy", "zipimport")
)
"""Modules that execute a file for their caller."""


@functools.cache
def _add_audit_hook() -> None:
    """Check everything that this process executes from now on. A hook cannot be removed, so it is added once."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Check code before it is executed. Python calls this very often, but seldom with one of these events."""
    if event == "exec":
        code = arguments[0]
        if isinstance(code, CodeType) and code.co_name == "<module>" and not code.co_filename.startswith("<"):
            _FINDER.check(code.co_filename, code, sys._getframe(1))
    elif event == "import" and arguments[1]:
        _FINDER.check(arguments[1], None, sys._getframe(1))


def _import(name: str, where: str) -> ModuleType:
    is_software = user_code.is_loaded_software(name.partition(".")[0])
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(where, error) from error
        searched = os.environ.get("PYTHONPATH") or "not set"
        raise ConfigError(
            f"there is no module {error.name}. Install it for {sys.executable}, put it in a "
            f"directory of PYTHONPATH ({searched}), or name its file: /path/of/{name.split('.')[-1]}.py:function",
            where=where,
        ) from error
    except Exception as error:
        raise _failed(where, error) from error
    if not is_software and not user_code.is_users(module):
        raise ConfigError(
            f"{module.__file__ or name} is not a source file, so its content cannot be recorded. Name a "
            "module with source code, or a file",
            where=where,
        )
    return module


def _run_file(file: Path, where: str) -> ModuleType:
    """Import a file as a module of the same name. It can import other files in its directory."""
    file = file.absolute()
    if not file.is_file():
        raise ConfigError(
            f"there is no file {file}. Every node and the container must have it at this path", where=where
        )
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that files there never shadow installed modules
    found = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    if (
        found is None
        or found.origin is None
        or not Path(found.origin).exists()
        or not file.samefile(found.origin)
    ):
        raise ConfigError(
            f"{file.stem} is not a valid module name, or another module has this name. Rename the file",
            where=where,
        )
    try:
        return importlib.import_module(file.stem)
    except Exception as error:
        raise _failed(where, error) from error


def _failed(where: str, error: Exception) -> ConfigError:
    import traceback  # needed only for error messages

    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if not f.filename.startswith("<frozen")), None)
    at = f" ({last.filename}:{last.lineno})" if last else ""
    return ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}{at}")
