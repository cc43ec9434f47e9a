"""Converts errors in a template to one message with the template's file and line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jinja2

from hpcgen.errors import HpcgenError
from hpcgen.slurm.rendering.filters import UnwritableValue
from hpcgen.text import did_you_mean

_JINJA = Path(jinja2.__file__).parent


@contextmanager
def template_errors(directories: Sequence[Path], name: str, values: Collection[str] = ()) -> Iterator[None]:
    """Raises errors in the template `name`, or in those that it uses, as HpcgenError.

    `values` are the names that it can use. An exception in hpcgen's own code is a bug and keeps its traceback.
    """
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise HpcgenError(f"{error.filename or error.name}:{error.lineno}: {error.message}") from error
    except jinja2.TemplateNotFound as error:
        searched = ", ".join(str(directory) for directory in directories)
        where = _where(error, directories)
        raise HpcgenError(f"{where}template {error.name!r} does not exist in {searched}") from error
    except jinja2.UndefinedError as error:
        undefined = re.match(r"'(\w+)' is undefined", str(error.message))
        hint = undefined and did_you_mean(undefined[1], values)
        hint = hint or "see templates/README.md for the variables of each stage"
        raise HpcgenError(f"{_where(error, directories)}{error.message}", hint) from error
    except UnwritableValue as error:
        raise HpcgenError(f"{_where(error, directories)}{error}") from error
    except RecursionError as error:
        hint = f'extend "hpcgen/{name}"; the plain name refers to the site\'s own file'
        raise HpcgenError(f"{name}: the templates extend or include each other in a loop", hint) from error
    except (TypeError, ValueError) as error:
        if not _is_of_template(error, directories):
            raise
        raise HpcgenError(f"{_where(error, directories)}{error}") from error


def _where(error: BaseException, directories: Sequence[Path]) -> str:
    """The innermost template line in the traceback as "FILE:LINE: `the line`: ", or "" without one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_template(frame.filename, directories):
            line = f"`{frame.line}`: " if frame.line else ""
            return f"{frame.filename}:{frame.lineno}: {line}"
    return ""


def _is_of_template(error: BaseException, directories: Sequence[Path]) -> bool:
    """True if the template or Jinja raised the exception, not hpcgen's own code."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return _is_template(innermost, directories) or Path(innermost).is_relative_to(_JINJA)


def _is_template(filename: str, directories: Sequence[Path]) -> bool:
    return any(Path(filename).is_relative_to(directory) for directory in directories)
