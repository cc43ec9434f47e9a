"""A reader for small, untrusted XML files.

ElementTree of the standard library cannot reject document type declarations, which may define entities of exponential
size. Its parser, expat, can reject them before it expands an entity, so no other library is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from hpcgen.errors import FilePlace, HpcgenError

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32


@dataclass(frozen=True)
class Element:
    """One element, without the text between elements."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        """Children with this tag."""
        return [child for child in self.children if child.tag == tag]


def read(path: Path) -> Element:
    """Reads an XML file and returns its root.

    Raises:
        HpcgenError: the file is unreadable, too large, or not plain XML.
    """
    try:
        if not path.is_file():
            raise HpcgenError("not a regular file" if path.exists() else "no such file", where=path)
        if (size := path.stat().st_size) > MAX_BYTES:
            raise HpcgenError(
                f"{size:,} bytes exceed the maximum of a topology file ({MAX_BYTES:,})", where=path
            )
        return parse(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        raise HpcgenError(f"cannot read {path}: {error}") from error


def parse(data: bytes, name: str) -> Element:
    """Parses the document in `data` and returns its root. `name` is the file name in errors.

    Raises:
        HpcgenError: the document is not plain XML.
    """
    parser = expat.ParserCreate()
    open_elements: list[Element] = []
    roots: list[Element] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, parser.CurrentLineNumber)
        (open_elements[-1].children if open_elements else roots).append(element)
        open_elements.append(element)
        if len(open_elements) > MAX_DEPTH:
            raise HpcgenError(
                f"nested too deeply (at most {MAX_DEPTH} levels)", where=FilePlace(name, element.line)
            )

    def end(_: str) -> None:
        open_elements.pop()

    def refuse(*_: object) -> None:
        line = parser.CurrentLineNumber
        raise HpcgenError(
            "document type declarations are not allowed", "remove <!DOCTYPE ...>", where=FilePlace(name, line)
        )

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise HpcgenError(
            f"not XML: {expat.errors.messages[error.code]}", where=FilePlace(name, error.lineno)
        ) from error
    except (LookupError, ValueError) as error:  # unknown encoding
        raise HpcgenError(f"not XML: {error}", where=FilePlace(name)) from error
    return roots[0]
