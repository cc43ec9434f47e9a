"""Files in a store as a source, by number or by pattern, and availability checks of single files."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote, urlsplit

from hpcgen.config.corpus import UrlSource
from hpcgen.data.listed_files import UNSPLIT, Listing, ManifestFile
from hpcgen.data.retries import INTERACTIVE, RetryPolicy
from hpcgen.data.stores import open_store
from hpcgen.data.stores.base import FileNotInStore, Listed, Stat, Store
from hpcgen.data.urls import redacted, url_problem
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, few

_CONNECTIONS = 32


def list_urls(source: UrlSource, token_variable: str | None) -> Listing:
    """Lists the files of a template in order, with the sizes and versions that the store states.

    Raises:
        HpcgenError: some files are missing, or the store denies access or does not answer.
    """
    template = source.template
    subject = f"data.corpus.source.url.template = {redacted(template)}"
    if problem := url_problem(template.replace("{", "").replace("}", ""), subject):
        raise HpcgenError(problem)
    with open_store(template, token_variable, INTERACTIVE) as store:
        found = _matching(store, template) if "*" in template else _numbered(store, source)
    files = [
        ManifestFile(
            name=_name(template, file.url),
            split=UNSPLIT,
            size=file.stat.size,
            url=file.url,
            version=file.stat.version,
        )
        for file in found
    ]
    return Listing(redacted(template) + ("" if "*" in template else f" from {source.first} on"), files)


def _matching(store: Store, pattern: str) -> list[Listed]:
    """The files that match a pattern, in the order of the store."""
    if found := store.policy.retry(pattern, lambda: list(store.list(pattern))):
        return found
    raise HpcgenError(
        f"data.corpus.source.url.template = {pattern} matches no file",
        "correct it: * stands for any part of a name, ** for any directories",
    )


def _numbered(store: Store, source: UrlSource) -> list[Listed]:
    """The numbered files, in order."""
    urls = [source.template.format(index=source.first + number) for number in range(source.count)]
    found: list[Listed] = []
    missing: list[str] = []

    def ask(url: str) -> Stat | FileNotInStore:
        try:
            return store.policy.retry(url, lambda: store.stat(url))
        except FileNotInStore as error:
            return error

    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        try:
            for url, answer in zip(urls, threads.map(ask, urls), strict=True):
                if isinstance(answer, FileNotInStore):
                    missing.append(redacted(url))
                else:
                    found.append(Listed(url=url, stat=answer))
        except HpcgenError:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    if missing:
        raise HpcgenError(
            f"data.corpus.source.url: {len(missing):,} of {counted(len(urls), 'file')} not in the store: "
            f"{few(missing)}",
            "correct template, first or count, or use another source",
        )
    return found


def probe(urls: Iterable[str], token_variable: str | None, policy: RetryPolicy = INTERACTIVE) -> None:
    """Asks for each file.

    Raises:
        HpcgenError: a file is missing, access is denied, or its store does not answer.
    """
    for url in urls:
        with open_store(url, token_variable, policy) as store:
            store.policy.retry(url, functools.partial(store.stat, url))


def _name(template: str, url: str) -> str:
    """Returns the variable part of the URL: everything after the last slash before the number or the first *."""
    folder = re.split(r"\{index|\*", template)[0].rpartition("/")[0]
    return unquote(urlsplit(url).path.removeprefix(urlsplit(folder).path).lstrip("/"))
