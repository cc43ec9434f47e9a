"""Loads the user's own functions, from the sources that `trainer.contract.user_code` has read.

Modules of the user never come from Python's bytecode caches, and none are written for them: a cache can be stale, or
made from other source code. All ranks execute the bytes that rank 0 has read, whatever happens to the files meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import linecache
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from trainer.contract import user_code
from trainer.contract.config import ConfigError
from trainer.contract.imports import IMPORT_PATH
from trainer.contract.regular_file import read_bytes
from trainer.contract.user_code import UserCode
from trainer.contract.wording import did_you_mean


def use(codes: Mapping[str, UserCode]) -> None:
    """Let imports in this process find the code, by import path, instead of the files that are there now."""
    if codes and _FINDER not in sys.meta_path:
        _FINDER.searched_before = frozenset(os.path.realpath(entry) for entry in sys.path)
        sys.meta_path.insert(0, _FINDER)
    _FINDER.codes.update(codes)


def read(paths: Iterable[str]) -> dict[str, UserCode]:
    """The code behind each import path: what this process uses already, else what is in the files now.

    Raises:
        OSError: a file exists but cannot be read.
    """
    paths = list(paths)
    in_use = {path: _FINDER.codes[path] for path in paths if path in _FINDER.codes}
    return in_use | user_code.read(path for path in paths if path not in in_use)


def load(path: str, what: str) -> Callable[..., Any]:
    """Load the function at an import path. `what` is the key of the configuration that names it.

    Raises:
        ConfigError: the import path is invalid, the module or file is missing or fails, or lacks the function.
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
        return function  # type: ignore[no-any-return]
    if function is not None:
        raise ConfigError(f"{where}: {name} is a {type(function).__name__}, not a function")
    defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    known = did_you_mean(name, defined) or f"it defines {', '.join(sorted(defined)) or 'none'}"
    raise ConfigError(f"{where}: {module.__file__} has no function {name}; {known}")


class _Finder(MetaPathFinder):
    """Finds modules of the user in memory, and refuses those whose content nobody has hashed."""

    def __init__(self) -> None:
        self.codes: dict[str, UserCode] = {}
        self.searched_before: frozenset[str] = frozenset()
        """Directories of sys.path that the user's code has not added."""
        self._packages: set[str] = set()

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
            self._refuse_hidden(fullname, spec)
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

    def _refuse_hidden(self, name: str, spec: ModuleSpec) -> None:
        """Refuse a module in a folder below the user's code that the code itself has added to sys.path."""
        entry = next((os.path.realpath(place.parent) for place in user_code.places(spec)), None)
        if "." in name or entry is None or entry in self.searched_before:
            return
        for code in self.codes.values():
            if Path(entry).is_relative_to(os.path.realpath(code.directory)):
                raise ConfigError(
                    f"{code.path} added {entry} to sys.path and imports {name} from it, so its content would not be "
                    f"recorded. Import it as a part of {code.directory}, or add {entry} to PYTHONPATH"
                )


def _recorded(name: str, spec: ModuleSpec, codes: Sequence[UserCode]) -> ModuleSpec:
    """`spec` with a loader that executes the recorded content.

    Raises:
        ConfigError: the content of the file was not recorded, or it is compiled and has changed.
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
            if user_code.sha256(read_bytes(origin)) != each.compiled[file]:
                raise ConfigError(f"{origin} has changed since the run began. Start the run again")
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
        return self.source_to_code(self._content, self.path)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module. Tracebacks, torch.jit and Triton, which read the source again, get the same source."""
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # which Python reports with the place
            text = importlib.util.decode_source(self._content)
            # Without a time, linecache never compares the entry with the file.
            linecache.cache[self.path] = (len(text), None, io.StringIO(text).readlines(), self.path)
        super().exec_module(module)


_FINDER = _Finder()
"""One per process, since there is one sys.meta_path."""


def _import(name: str, where: str) -> ModuleType:
    is_software = user_code.is_loaded_software(name.partition(".")[0])
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(where, error) from error
        searched = os.environ.get("PYTHONPATH") or "not set"
        raise ConfigError(
            f"{where}: there is no module {error.name}. Install it for {sys.executable}, put it in a "
            f"directory of PYTHONPATH ({searched}), or name its file: /path/of/{name.split('.')[-1]}.py:function"
        ) from error
    except Exception as error:
        raise _failed(where, error) from error
    if not is_software and not user_code.is_users(module):
        raise ConfigError(
            f"{where}: {module.__file__ or name} is not a source file, so its content cannot be recorded. Name a "
            "module with source code, or a file"
        )
    return module


def _run_file(file: Path, where: str) -> ModuleType:
    """Import a file as a module of the same name. It can import other files in its directory."""
    file = file.absolute()
    if not file.is_file():
        raise ConfigError(
            f"{where}: there is no file {file}. Every node and the container must have it at this path"
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
            f"{where}: {file.stem} is not a valid module name, or another module has this name. Rename the file"
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
