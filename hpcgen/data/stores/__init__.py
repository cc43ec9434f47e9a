"""Stores of files, chosen by the scheme of a URL: web servers, object stores and the file system.

A module here imports what only an extra installs when its store is opened or reads a URL.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterable
from urllib.parse import urlsplit

from hpcgen.data.retries import RetryPolicy
from hpcgen.data.stores.base import Store
from hpcgen.data.stores.http import Http
from hpcgen.data.stores.local import Local
from hpcgen.data.stores.objects import Objects

STORES: tuple[type[Store], ...] = (Http, Objects, Local)


def open_store(url: str, token_variable: str | None, policy: RetryPolicy | None = None) -> Store:
    """Opens the store that reads `url`, which must be valid (hpcgen.data.urls.url_problem)."""
    return _store_class(urlsplit(url).scheme)(policy or RetryPolicy(), token_variable)


def store_modules(urls: Iterable[str]) -> set[str]:
    """Modules that reading `urls` imports and that only an extra installs."""
    schemes = {urlsplit(url).scheme for url in urls}
    return {store.modules[scheme] for store in STORES for scheme in schemes.intersection(store.modules)}


def store_of(url: str, token_variable: str | None) -> Store:
    """The store that reads `url`, as this process has opened it. Its threads share connections."""
    return _process_store(urlsplit(url).scheme, token_variable)


def _store_class(scheme: str) -> type[Store]:
    """The store for URLs with a scheme of SCHEMES."""
    return next(store for store in STORES if scheme in store.schemes)


@functools.cache
def _process_store(scheme: str, token_variable: str | None) -> Store:
    store = _store_class(scheme)(RetryPolicy(), token_variable)
    atexit.register(store.close)
    return store
