"""Converts errors in a template to one message with the template's file and line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jinja2

from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.slurm.rendering.filters import UnwritableValue
from hpcgen.text import did_you_mean

_JINJA = Path(jinja2.__file__).parent


@contextmanager
def template_errors(directories: Sequence[Path], name: str, values: Collection[str] = ()) -> Iterator[None]:
    """Raises errors in the template `name`, or in the templates that it uses, as HpcgenError.

    `values` are the names that it can use. An exception in hpcgen's own code is a bug and keeps its traceback.
    """
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        where = FilePlace(error.filename or error.name, error.lineno)
        raise HpcgenError(str(error.message), where=where) from error
    except jinja2.TemplateNotFound as error:
        searched = ", ".join(str(directory) for directory in directories)
        raise _placed(f"template {error.name!r} does not exist in {searched}", error, directories) from error
    except jinja2.UndefinedError as error:
        undefined = re.match(r"'(\w+)' is undefined", str(error.message))
        hint = undefined and did_you_mean(undefined[1], values)
        hint = hint or "see templates/README.md for the variables of each stage"
        raise _placed(str(error.message), error, directories, hint) from error
    except UnwritableValue as error:
        raise _placed(str(error), error, directories) from error
    except RecursionError as error:
        hint = f'extend "hpcgen/{name}"; the plain name refers to the site\'s own file'
        raise HpcgenError(f"{name}: the templates extend or include each other in a loop", hint) from error
    except (TypeError, ValueError) as error:
        if not _is_of_template(error, directories):
            raise
        raise _placed(str(error), error, directories) from error


def _placed(message: str, error: BaseException, directories: Sequence[Path], hint: str = "") -> HpcgenError:
    """The message with the innermost line of a template in the traceback of `error`, if there is one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_template(frame.filename, directories):
            line = f"`{frame.line}`: " if frame.line else ""
            return HpcgenError(f"{line}{message}", hint, where=FilePlace(frame.filename, frame.lineno or 0))
    return HpcgenError(message, hint)


def _is_of_template(error: BaseException, directories: Sequence[Path]) -> bool:
    """True if the template or Jinja raised the exception, not hpcgen's own code."""
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return _is_template(innermost, directories) or Path(innermost).is_relative_to(_JINJA)


def _is_template(filename: str, directories: Sequence[Path]) -> bool:
    return any(Path(filename).is_relative_to(directory) for directory in directories)
