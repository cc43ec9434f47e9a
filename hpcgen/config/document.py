"""YAML documents as plain data with the origin of each value, and merging of such documents."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, cast

from hpcgen.errors import FilePlace, HpcgenError
from trainer.contract.record import record

MAX_BYTES = 256 * 1024
MAX_VALUES = 20_000
"""Maximum number of values after aliases are expanded. A few lines can expand to billions."""
MAX_DEPTH = 32
_MAX_INT_BITS = 1023
"""Longer integers do not fit into a float, and Python refuses to print very long ones."""


@record
class Document:
    """Plain data with origins: dotted path -> "run.yaml:14", "--set ..." or "preset 13b"."""

    values: dict[str, Any]
    origins: dict[str, str]
    replaced: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Dotted path -> strings that were overridden by merging, each with its origin."""

    def origin(self, path: str) -> str | None:
        """The origin of the value at `path`, or of the first value inside it; None if it is not set."""
        if path in self.origins:
            return self.origins[path]
        return next((where for known, where in self.origins.items() if _inside(known, path)), None)

    def nearest_origin(self, path: str) -> str:
        """The origin of the closest enclosing section, where `path` could be added."""
        while path and path not in self.origins:
            path = path.rpartition(".")[0]
        return self.origins[path]

    def get(self, path: str) -> Any:
        """The value at a dotted `path`; None if there is none. Unknown keys can contain dots themselves."""
        value: Any = self.values
        for found in re.finditer(r"[^.\[\]]+", path):
            key, rest = found[0], path[found.start() :]
            if isinstance(value, Mapping) and rest in value:
                return value[rest]
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, list | tuple) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return value


def is_preset(origin: str) -> bool:
    """True for the origin "preset NAME", but not for a line of a file whose name begins with "preset"."""
    return origin.startswith("preset ") and not isinstance(origin, FilePlace)


def constant(values: Mapping[str, Any], origin: str) -> Document:
    """`values` as a document in which all values have the same origin."""
    origins = {"": origin}

    def copied(value: Any, path: str) -> Any:
        origins[path] = origin
        if isinstance(value, Mapping):
            return {key: copied(item, _join(path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [copied(item, f"{path}[{index}]") for index, item in enumerate(value)]
        return value

    return Document(copied(values, ""), origins)


def merge(lower: Document, upper: Document) -> Document:
    """Merges `upper` over `lower`: mappings are merged key by key, everything else is replaced."""
    stale: set[str] = set()
    replaced = {**lower.replaced, **upper.replaced}

    def lay(below: Any, above: Any, path: str) -> Any:
        if not (isinstance(below, dict) and isinstance(above, dict)):
            if isinstance(below, str) and path in lower.origins:
                before = (*lower.replaced.get(path, ()), (below, lower.origins[path]))
                replaced[path] = (*before, *upper.replaced.get(path, ()))
            stale.add(path)
            return above
        merged = dict(below)
        for key, item in above.items():
            merged[key] = lay(below[key], item, _join(path, key)) if key in below else item
        return merged

    values = lay(lower.values, upper.values, "")
    below = tuple(f"{path}{mark}" for path in stale for mark in ".[")
    kept = {
        path: where
        for path, where in lower.origins.items()
        if path not in stale and not path.startswith(below)
    }
    return Document(values, kept | upper.origins, replaced)


def without(document: Document, path: str) -> Document:
    """The document without the value at a dotted `path`."""

    def cut(value: Any, keys: list[str]) -> Any:
        key, *rest = keys
        kept = {name: item for name, item in value.items() if rest or name != key}
        return {**kept, key: cut(value[key], rest)} if rest else kept

    return Document(
        cut(document.values, path.split(".")),
        {known: where for known, where in document.origins.items() if not _inside(known, path)},
        {known: texts for known, texts in document.replaced.items() if not _inside(known, path)},
    )


TypedTexts = Literal["all", "all but null", "quoted"]
"""Scalars to use as strings, exactly as typed: all scalars, all but null, or only strings of YAML."""


def override(assignment: str, typed_texts: TypedTexts = "quoted") -> Document:
    """The document of one `--set a.b=c`. The value is parsed as YAML ("4", "true", "[1, 2]", "text").

    Raises:
        HpcgenError: the assignment is malformed, or its value is not YAML.
    """
    path, text = split_assignment(assignment)
    walk = _Walk(_printable(f"--set {assignment}"), text)
    origin = _printable(f"--set {path}")
    values: Any = None if walk.root is None else walk.plain()
    is_scalar = walk.root is None or walk.root.id == "scalar"
    is_null = values is None and typed_texts == "all but null"
    if is_scalar and typed_texts != "quoted" and not (is_null or isinstance(values, str)):
        values = text.strip()
    return at(path, values, origin)


def at(path: str, value: Any, origin: str) -> Document:
    """A document with only `value` at a dotted `path`. The sections around it have no origin."""
    for section in reversed(path.split(".")):
        value = {section: value}
    document = constant(value, origin)
    own = {known: where for known, where in document.origins.items() if _inside(known, path)}
    return Document(document.values, own)


_ASSIGNMENT = r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"
"""The dotted path of an assignment."""


def split_assignment(assignment: str) -> tuple[str, str]:
    """The dotted path and the text of the value of one `--set a.b=c`.

    Raises:
        HpcgenError: the assignment has no =, or the path is malformed.
    """
    path, equals, text = assignment.partition("=")
    if equals and re.fullmatch(_ASSIGNMENT, path):
        return path, text
    where = _printable(f"--set {assignment}")
    raise HpcgenError(f"{where}: expected KEY.KEY=VALUE", _assignment_hint(assignment))


def _assignment_hint(assignment: str) -> str:
    """How to write an assignment that is not KEY.KEY=VALUE."""
    plain = assignment.strip("'\"+~ ")
    path, equals, text = plain.partition("=")
    if re.search(r"\[.*\]$|\[.*\]\.|\+$", path):
        key = re.split(r"[+\[]", path)[0].rstrip(".")
        return f"write the complete list: --set '{key}=[...]'"
    if not equals and (found := re.fullmatch(r"([\w.-]+)(?:: *| +)(\S.*)", plain)):
        return f"write --set {found[1]}={found[2]}"
    if not equals and assignment.startswith("~"):
        return "remove the key from the run file"
    dotted = path.strip(" ").replace("/", ".").replace(":", ".")
    if equals and f"{dotted}={text}" != assignment and re.fullmatch(_ASSIGNMENT, dotted):
        return f"write --set {dotted}={text}"
    return "for example --set slurm.train.nodes=4"


def read(path: Path) -> Document:
    """Reads a YAML file.

    Raises:
        HpcgenError: the file cannot be read, is too large, or is not a YAML mapping of plain values.
    """
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Reads the text of a YAML file.

    Raises:
        HpcgenError: the file cannot be read, is too large, or is not UTF-8.
    """
    try:
        if not path.is_file():
            raise HpcgenError("not a regular file" if path.exists() else "no such file", where=path)
        if (size := path.stat().st_size) > MAX_BYTES:
            raise HpcgenError(
                f"{size} bytes is more than the maximum of {MAX_BYTES} for a configuration file", where=path
            )
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise HpcgenError(f"not UTF-8 text (byte {error.start})", where=path) from error
    except (OSError, ValueError) as error:
        raise HpcgenError(f"cannot be read ({error})", where=path) from error


def parse(text: str, name: str) -> Document:
    """Parses `text`. `name` is the file name used in origins.

    Raises:
        HpcgenError: see `read`.
    """
    document = _parsed(text, FilePlace(name))
    return Document(_copied(document.values), dict(document.origins))


def _copied(value: Any) -> Any:
    """A copy of plain data, five times as fast as deepcopy."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


# Most of the time of loading a run goes into its profile and node type, which `templates check` loads once for each
# script.
@functools.lru_cache(maxsize=32)
def _parsed(text: str, name: FilePlace) -> Document:
    if (shipped := _shipped().get(_sha256(text))) is not None:
        return Document(
            shipped["values"],
            {path: FilePlace(name, line) if path else name for path, line in shipped["lines"].items()},
        )
    walk = _Walk(name, text)
    if walk.root is None:
        return Document({}, {"": name})
    values = walk.plain()
    if not isinstance(values, dict):
        raise HpcgenError(
            f"expected a mapping of keys to values, got {_short(values)}", where=FilePlace(name, 1)
        )
    return Document(values, {**walk.origins, "": name})


SHIPPED = Path(__file__).with_name("shipped.json")
"""hpcgen's own YAML files, parsed when it was installed (hatch_build.py). A file edited since is parsed again."""


@functools.cache
def _shipped() -> dict[str, Any]:
    """SHA-256 of a text -> its values, and the line of each path."""
    return cast(dict[str, Any], json.loads(SHIPPED.read_bytes())) if SHIPPED.exists() else {}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_shipped(target: Path, files: Sequence[Path]) -> None:
    """Writes the documents of files in the form of SHIPPED."""
    documents = {}
    for file in files:
        document = read(file)
        lines = {
            path: place.line
            for path, place in document.origins.items()
            if isinstance(place, FilePlace) and path
        }
        documents[_sha256(read_text(file))] = {"values": document.values, "lines": {"": 0, **lines}}
    target.write_text(json.dumps(documents))


YAML_HINTS = {
    "character '\\t'": "use spaces in place of tabs",
    "could not find expected ':'": "write KEY: VALUE, with a space after the colon",
    "mapping values are not allowed here": "indent the keys of a section alike, write a space after each colon, "
    "also in the line before, and quote a value that contains a colon",
    "expected a single document": "remove the line ---",
    "but got": "close the bracket, and quote a value that contains one",
    "end of stream": "close the quote",
    "but found": "indent the keys of a section alike, and quote a value that begins with a bracket, a quote, * or &",
    "cannot start any token": "quote the value",
    "undefined alias": "quote a value that begins with *",
}
"""Part of ruamel's message -> what to do."""


@contextlib.contextmanager
def _yaml_errors(name: str) -> Iterator[None]:
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        yield
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error).split("\n")[0].split())
        if "could not find" in problem or "end" in problem:  # found on a later line
            mark = error.context_mark or mark
        if problem.startswith("but "):
            problem = f"{error.context}, {problem}"
        hint = next((hint for part, hint in YAML_HINTS.items() if part in problem), "")
        where = _line(name, mark.line + 1) if mark else name
        raise HpcgenError(f"not valid YAML: {problem}", hint, where=where) from error
    except YAMLError as error:
        raise HpcgenError(f"not valid YAML: {' '.join(str(error).split())}", where=name) from error
    except RecursionError as error:
        raise _nested_too_deeply(name) from error
    except ValueError as error:  # a number or date that is valid in YAML but not in Python
        raise HpcgenError(f"not valid YAML: {error}", where=name) from error


class _Directives:
    """Receives the directives found by ruamel's scanner, as ruamel's own loading functions do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tags: list[Any] = []

    @property
    def doc_version(self) -> Any:
        """The version in a %YAML directive."""
        return None

    @doc_version.setter
    def doc_version(self, version: Any) -> None:
        if (version.major, version.minor) != (1, 2):
            raise HpcgenError(
                f"%YAML {version.major}.{version.minor}: only YAML 1.2 is supported",
                "remove the line",
                where=self.name,
            )


class _Walk:
    """Converts YAML into plain data and records the line of every value.

    It reads ruamel's node graph, because the objects of its round-trip loader take three times as long.
    """

    def __init__(self, name: str, text: str) -> None:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import ReusedAnchorWarning

        from hpcgen.config.yaml_scanner import FastScanner

        self.name = name
        self.origins: dict[str, str] = {}
        self._values = 0
        self._merged: dict[int, int] = {}
        with _yaml_errors(name), warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)  # YAML allows it; the last one counts
            yaml = YAML(typ="safe", pure=True)
            yaml.Scanner = FastScanner
            yaml.doc_infos = [cast(Any, _Directives(name))]
            self._constructor, _ = yaml.get_constructor_parser(text)
            self._bound_depth(self._constructor.composer)
            self.root: Any = self._constructor.composer.get_single_node()

    def _bound_depth(self, composer: Any) -> None:
        """Makes the composer stop at MAX_DEPTH, because ruamel takes seconds to reach Python's recursion limit."""
        compose, depth = composer.compose_node, 0

        def compose_node(parent: Any, index: Any) -> Any:
            nonlocal depth
            depth += 1
            if depth > MAX_DEPTH + 1:  # the document itself is at depth 0
                line = composer.parser.peek_event().start_mark.line + 1
                raise _nested_too_deeply(_line(self.name, line))
            node = compose(parent, index)
            depth -= 1
            return node

        composer.compose_node = compose_node

    def plain(self) -> Any:
        """The document as plain data."""
        with _yaml_errors(self.name):
            return self._plain(self.root, "", 1, 0)

    def _plain(self, node: Any, path: str, line: int, depth: int) -> Any:
        where = _line(self.name, line)
        self._values += 1
        if self._values > MAX_VALUES:
            raise HpcgenError(f"more than {MAX_VALUES} values after expanding aliases", where=where)
        if depth > MAX_DEPTH:
            raise _nested_too_deeply(where)
        self.origins[path] = where
        if node.tag not in PLAIN_TAGS:
            hint = "use a plain value, or quote it"
            raise HpcgenError(f"{_tag(node)} is not supported", hint, where=where)
        if node.id == "mapping":
            self._refuse_repeated_keys(node, path)
            self._bound_merges(node, where)
            self._constructor.flatten_mapping(node)  # puts the keys merged by << before the mapping's own
            return {
                key: self._plain(item, inner, at, depth + 1)
                for key, item, inner, at in self._items(node, path)
            }
        if node.id == "sequence":
            return [
                self._plain(item, f"{path}[{index}]", item.start_mark.line + 1, depth + 1)
                for index, item in enumerate(node.value)
            ]
        return self._scalar(node, where)

    def _bound_merges(self, node: Any, where: str) -> int:
        """The number of keys of a mapping after expanding `<<`, counted before any of them is copied.

        A few lines of nested merges can expand to billions of keys, as nested aliases can.
        """
        if node.id != "mapping":
            return 0  # the constructor reports that it cannot be merged
        if id(node) not in self._merged:
            self._merged[id(node)] = 0  # a mapping can merge itself
            count = 0
            for key, item in node.value:
                parts = item.value if item.id == "sequence" else [item]
                count += sum(self._bound_merges(part, where) for part in parts) if key.tag == MERGE else 1
            self._merged[id(node)] = count
        if self._merged[id(node)] > MAX_VALUES:
            raise HpcgenError(f"more than {MAX_VALUES} values after expanding aliases", where=where)
        return self._merged[id(node)]

    def _scalar(self, node: Any, where: str) -> Any:
        try:
            value = self._constructor.construct_object(node)
            if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
                raise ValueError
            return value
        except (KeyError, ValueError) as error:  # "!!bool maybe", "!!int x", a number of 5000 digits
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            raise HpcgenError(
                f"{_short(node.value)} is not a value of type {kind}", "quote it", where=where
            ) from error

    def _refuse_repeated_keys(self, node: Any, path: str) -> None:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            where = _line(self.name, key.start_mark.line + 1)
            if key.id != "scalar" or key.tag not in (STRING, MERGE):
                is_scalar = key.id == "scalar"
                found = f"{_short(key.value)} is not" if is_scalar else f"is a {key.id}, not"
                raise HpcgenError(f"the key {found} a string", "quote it", where=where)
            if key.value in seen:
                reason = f"duplicate key {_join(path, key.value)}, first on line {seen[key.value]}"
                raise HpcgenError(reason, "remove one of the two lines", where=where)
            seen[key.value] = key.start_mark.line + 1

    def _items(self, node: Any, path: str) -> Iterator[tuple[str, Any, str, int]]:
        for key, item in node.value:
            yield key.value, item, _join(path, key.value), key.start_mark.line + 1


STRING, MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")}


def _line(name: str, line: int) -> str:
    """The place of a line in a file, or in the value of --set."""
    return FilePlace(name, line) if isinstance(name, FilePlace) else f"{name}:{line}"


def _nested_too_deeply(where: str) -> HpcgenError:
    return HpcgenError(f"nested too deeply (at most {MAX_DEPTH} levels)", where=where)


def _tag(node: Any) -> str:
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    return f"{_short(node.value)} (a {kind})" if node.id == "scalar" else f"the tag {node.tag}"


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _inside(path: str, section: str) -> bool:
    return not section or path == section or path.startswith((f"{section}.", f"{section}["))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _printable(text: str) -> str:
    """The text on one printable line."""
    text = text if len(text) <= 120 else text[:117] + "..."
    return text if text.isprintable() else repr(text)
