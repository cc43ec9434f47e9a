"""Object stores: Amazon S3 and compatible stores, Google Cloud Storage and Azure Blob Storage, through fsspec.

The libraries (s3fs, gcsfs, adlfs) read their credentials from the environment and from the files and the roles of each
cloud. They are imported when the first URL is read.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.parse import quote, unquote, urlsplit

from hpcgen.config.corpus import OBJECT_SCHEMES
from hpcgen.data.retries import TransientError
from hpcgen.data.stores.base import Body, FileNotInStore, Listed, StartOver, Stat, Store, Wanted, glob_pattern
from hpcgen.errors import HpcgenError

_BLOCK = 16 << 20
"""Bytes of one request."""
CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
"""The usual variables with credentials, for messages."""
_DENIED = (401, 403)


class Objects(Store):
    """Files in object stores, as s3://BUCKET/KEY, gs://BUCKET/KEY and az://CONTAINER/KEY."""

    schemes = OBJECT_SCHEMES
    modules: ClassVar[Mapping[str, str]] = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}

    def list(self, pattern: str) -> Iterator[Listed]:
        """Lists the objects that match, sorted by key."""
        scheme = urlsplit(pattern).scheme
        file_system = _file_system(scheme)
        with _explained(pattern):
            found = file_system.glob(glob_pattern(_path(pattern)), detail=True)
        for path, details in sorted(found.items()):
            if details["type"] == "file":
                yield Listed(url=f"{scheme}://{quote(path)}", stat=_stat(details))

    def stat(self, url: str) -> Stat:
        """Asks for the size and the ETag of an object."""
        file_system = _file_system(urlsplit(url).scheme)
        with _explained(url):
            file_system.invalidate_cache()  # an answer from a listing would hide changes
            return _stat(file_system.info(_path(url)))

    @contextmanager
    def read(self, file: Wanted, start: int, version: str | None) -> Iterator[Body]:
        """Opens an object."""
        now = self.stat(file.url)
        begin = start if version == now.version else 0
        yield Body(
            blocks=self._blocks(file.url, begin, now),
            start=begin or None,
            total=now.size,
            version=now.version,
        )

    def _blocks(self, url: str, start: int, before: Stat) -> Iterator[bytes]:
        """Yields the object from `start` on. Each block is a request, so the version is checked again at the end."""
        file_system, size = _file_system(urlsplit(url).scheme), before.size or 0
        while start < size:
            end = min(start + _BLOCK, size)
            with _explained(url):
                block = file_system.cat_file(_path(url), start=start, end=end)
            if len(block) != end - start:
                raise TransientError(f"received {len(block):,} bytes instead of {end - start:,}")
            yield block
            start = end
        if self.stat(url) != before:
            raise StartOver("the object changed while it was read")


@functools.cache
def _file_system(scheme: str) -> Any:
    """The library's access to a store.

    Raises:
        ModuleNotFoundError: the package for the store is not installed.
    """
    importlib.import_module(Objects.modules[scheme])
    import fsspec

    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


def _path(url: str) -> str:
    """BUCKET/KEY."""
    parts = urlsplit(url)
    return unquote(f"{parts.netloc}{parts.path}")


def _stat(details: dict[str, Any]) -> Stat:
    version = next((details[key] for key in ("generation", "ETag", "etag") if details.get(key)), None)
    return Stat(size=details["size"], version=None if version is None else str(version).strip('"'))


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turns the errors of the libraries into hpcgen's.

    The libraries have no common class of errors. Except for missing objects and denied access, every error is retried.
    """
    scheme = urlsplit(url).scheme
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotInStore(
            f"{url}: there is no such object, or no such bucket", "correct the source"
        ) from error
    except Exception as error:
        if _is_denied(error):
            names = CREDENTIALS[scheme]
            raise HpcgenError(
                f"{url}: the store denies access ({_first_line(error)})",
                f"export {' and '.join(names)}, and name them in `secrets` of the run file for jobs",
            ) from error
        raise TransientError(f"{type(error).__name__}: {_first_line(error)}") from error


def _is_denied(error: Exception) -> bool:
    """Returns whether credentials are missing, invalid or insufficient."""
    status = getattr(error, "status_code", None) or getattr(error, "code", None)
    return (
        isinstance(error, PermissionError)
        or status in _DENIED
        or any(word in type(error).__name__ for word in ("Credential", "Authentication"))
    )


def _first_line(error: Exception) -> str:
    """First line of the message, without the signatures of URLs."""
    line = (str(error).strip().splitlines() or ["no reason given"])[0]
    return re.sub(r"\b(sig|X-(?:Amz|Goog)-\w+)=[^&\s'\"]+", r"\1=...", line, flags=re.IGNORECASE)
