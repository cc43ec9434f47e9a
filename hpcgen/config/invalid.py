"""INVALID, which takes the place of a missing or invalid value, so that one mistake is one message.

Compilers have an error type for the same purpose: a value with a mistake is reported once, and whatever depends on it
is not reported again. What does not depend on it is checked as usual.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

from hpcgen.config.validation import keys_of

T = TypeVar("T")


class InvalidValueError(Exception):
    """A decision or a text depends on INVALID."""


class _Invalid:
    """Stands for a value of any type. Whatever is computed from it is INVALID too.

    Deciding by it, iterating over it or printing it raises InvalidValueError. It is not None, because a missing or
    invalid value is not a null.
    """

    def _propagate(self, *_: object, **__: object) -> Any:
        return INVALID

    def _refuse(self, *_: object) -> NoReturn:
        raise InvalidValueError

    def __getattr__(self, name: str) -> Any:
        return self._refuse() if name.startswith("__") else INVALID

    def __repr__(self) -> str:
        return "INVALID"

    __call__ = __getitem__ = _propagate
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _propagate
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __divmod__ = _propagate
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _propagate
    __rdivmod__ = __neg__ = __round__ = _propagate
    __bool__ = __len__ = __iter__ = __contains__ = __hash__ = _refuse
    __int__ = __index__ = __float__ = __ceil__ = __str__ = __format__ = __fspath__ = _refuse


INVALID: Any = _Invalid()


def with_invalid(config: T, paths: Iterable[str]) -> T:
    """A copy of a configuration with INVALID at these dotted paths. Unknown keys change nothing."""
    for path in paths:
        config = _with_invalid(config, keys_of(path))
    return config


def _with_invalid(config: Any, keys: list[str]) -> Any:
    if not keys:
        return INVALID
    key, *rest = keys
    if isinstance(config, dict):
        return {**config, key: _with_invalid(config.get(key, INVALID), rest)}
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return INVALID  # an entry of a list, or a section that was left out
    if not hasattr(config, key):
        return config
    return dataclasses.replace(config, **{key: _with_invalid(getattr(config, key), rest)})


def is_invalid(config: Any, path: str) -> bool:
    """Returns True if a dotted path leads to INVALID, or to a value inside it."""
    for key in keys_of(path):
        if isinstance(config, dict):
            config = config.get(key)
        else:
            config = config[int(key)] if isinstance(config, tuple) else getattr(config, key, None)
        if config is INVALID:
            return True
    return False


def decidable(results: Iterable[T]) -> Iterator[T]:
    """Yields the results of a check up to the first decision that depends on INVALID."""
    with contextlib.suppress(InvalidValueError):
        yield from results


def if_valid(compute: Callable[[], T], otherwise: Any = INVALID) -> T:
    """The result of `compute`, or `otherwise` if it depends on INVALID."""
    try:
        return compute()
    except InvalidValueError:
        found: T = otherwise
        return found
