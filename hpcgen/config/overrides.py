"""--set: values on the command line that override those of the run file."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Union

from hpcgen.config import document as documents
from hpcgen.config.document import Document
from trainer.contract.config import field_hints


def override(cls: type, assignment: str) -> Document:
    """The document of one `--set a.b=c`, for a document that describes `cls`.

    The value is parsed as YAML ("4", "true", "[1, 2]"). But a scalar for a string field is used as typed, because the
    shell removes the quotes that a file would have.

    Raises:
        HpcgenError: the assignment is malformed, or its value is not YAML.
    """
    path = assignment.partition("=")[0].split(".")
    return documents.override(assignment, typed_texts=_typed_texts(cls, path))


def _typed_texts(hint: Any, path: Sequence[str]) -> documents.TypedTexts:
    """The scalars to use as strings at `path` of a document of type `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _typed_texts(arguments[0], path)
    if origin in (Union, types.UnionType):
        [inner] = [argument for argument in arguments if argument is not type(None)]
        found = _typed_texts(inner, path)
        return "all but null" if found == "all" and not path else found
    if not path:
        return "all" if hint is str else "quoted"
    if origin is dict:
        return _typed_texts(arguments[1], path[1:])
    if dataclasses.is_dataclass(hint):
        inner = field_hints(typing.cast(type, hint)).get(path[0])
        return "quoted" if inner is None else _typed_texts(inner, path[1:])
    return "quoted"
