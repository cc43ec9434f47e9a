"""Reads small XML files from other people.

The standard library's ElementTree cannot refuse a document type, where entities that grow without end come
from; expat, which it is made of, can. So nothing else is needed, and no entity is ever expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from hpcgen.errors import HpcgenError

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32


@dataclass(frozen=True)
class Element:
    """One element; text between elements is left out."""

    tag: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def all(self, tag: str) -> list[Element]:
        """The children of that name."""
        return [child for child in self.children if child.tag == tag]


def read(path: Path) -> Element:
    """The root of an XML file.

    Raises:
        HpcgenError: it can't be read, is too large, or is not plain XML.
    """
    try:
        if not path.is_file():
            raise HpcgenError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise HpcgenError(f"{path}: {size} bytes is more than a topology file may have ({MAX_BYTES})")
        return parse(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        raise HpcgenError(f"{path}: cannot be read ({error})") from error


def parse(data: bytes, name: str) -> Element:
    """The root of the document in `data`; `name` stands before the line in errors.

    Raises:
        HpcgenError: it is not plain XML.
    """
    parser = expat.ParserCreate()
    open_elements: list[Element] = []
    roots: list[Element] = []

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, parser.CurrentLineNumber)
        (open_elements[-1].children if open_elements else roots).append(element)
        open_elements.append(element)
        if len(open_elements) > MAX_DEPTH:
            raise HpcgenError(f"{name}:{element.line}: nested too deeply (at most {MAX_DEPTH} levels)")

    def end(_: str) -> None:
        open_elements.pop()

    def refuse(*_: object) -> None:
        line = parser.CurrentLineNumber
        raise HpcgenError(f"{name}:{line}: a document type or entity has no place here", "remove it")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise HpcgenError(f"{name}:{error.lineno}: not XML: {expat.errors.messages[error.code]}") from error
    except (LookupError, ValueError) as error:  # an encoding that Python does not know
        raise HpcgenError(f"{name}: not XML: {error}") from error
    return roots[0]
