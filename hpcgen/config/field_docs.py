"""The documentation below each field of a configuration class, for run files and the JSON Schema."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal below the field, including those of base classes, or the field's metadata."""
    docs = {field.name: field.metadata["doc"] for field in dataclasses.fields(cls) if "doc" in field.metadata}
    for base in reversed(cls.__mro__[:-1]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, following in zip(definition.body, definition.body[1:], strict=False):
            match field, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(sentence))
                ):
                    docs[name] = " ".join(sentence.split())
    return docs
