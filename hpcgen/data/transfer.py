"""The transfer of one file from its store to a partial file next to the target, over as many requests as necessary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcgen.data.first_bytes import WEB_PAGE, unexpected_content
from hpcgen.data.free_space import bytes_left
from hpcgen.data.part import PartialFile, partial_file
from hpcgen.data.retries import TransientError
from hpcgen.data.stores.base import Body, NotTheFile, StartOver, Store, Wanted
from hpcgen.data.urls import redacted
from hpcgen.errors import HpcgenError
from hpcgen.text import counted, size_text

_MEANINGFUL_BYTES, _MEANINGFUL_SHARE = 16 << 10, 1000
"""Progress that resets the count of attempts: at least this many bytes, and a thousandth of the file."""
_SPACE_CHECK_BYTES = 256 << 20
"""Bytes between two checks of free space, for a body of unknown length."""
MAX_UNKNOWN_BYTES = 1 << 40
"""Maximum size (1 TiB) of a file of unknown length, because the stream might never end."""
_HINT = "the downloaded part is kept; run the stage again to resume"


@contextlib.contextmanager
def fetched(
    wanted: Wanted,
    target: Path,
    store: Store,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[PartialFile]:
    """Downloads to a private file next to `target` and yields it.

    Calls `advance` with the number of bytes received, or the negative number of bytes discarded.

    Raises:
        HpcgenError: the server denies access, sends other content, or fails too often; or the file is too large.
        OSError: the disk is full or fails.
    """
    with partial_file(target, wanted.url) as part:
        advance(part.size)
        transfer = _Transfer(wanted, part, store, advance)
        store.policy.retry(wanted.url, transfer.once, progress=transfer.progress, hint=_HINT)
        yield part


class _Transfer:
    """Download of one file, over as many requests as necessary."""

    def __init__(
        self,
        wanted: Wanted,
        part: PartialFile,
        store: Store,
        advance: Callable[[int], None],
    ) -> None:
        self._wanted, self._part, self._store = wanted, part, store
        self._advance = advance
        self._supports_ranges = True
        self._content_type = ""
        self._invalid_responses = 0
        self._stated = None if part.total is None else (part.validator, part.total)
        """Validator and size that the server stated last."""
        self._furthest = part.size
        """Maximum size that the part has ever had."""

    def progress(self) -> int:
        """Progress of the transfer, in steps large enough to justify further attempts."""
        total = self._wanted.size or self._part.total or 0
        return self._furthest // max(_MEANINGFUL_BYTES, total // _MEANINGFUL_SHARE)

    def once(self) -> None:
        """Sends one request for the missing bytes. When it returns, the part is complete and valid.

        Raises:
            TransientError: the transfer broke off, or must start over.
            HpcgenError: the content does not match the manifest, or is not data.
        """
        if not self._is_complete():
            self._request()
        self._check()

    def _is_complete(self) -> bool:
        return self._part.size > 0 and self._part.size == self._wanted.size

    def _request(self) -> None:
        part, wanted = self._part, self._wanted
        if part.size and not (self._supports_ranges and (part.validator or wanted.sha256)):
            self._restart()  # nothing would show whether the rest belongs to the same content
        try:
            with self._store.read(wanted, part.size, part.validator) as body:
                self._begin(body)
                self._read(body)
        except StartOver:
            self._restart()
            raise
        except NotTheFile as problem:
            raise self._invalid(problem.reason, problem.hint) from problem

    def _begin(self, body: Body) -> None:
        """Checks the store's answer, and discards the part if the content would not continue it."""
        part, wanted = self._part, self._wanted
        self._content_type = body.content_type
        if None not in (wanted.version, body.version) and body.version != wanted.version:
            raise self._invalid(
                f"the file has changed: its version is {body.version}, but the manifest has {wanted.version}",
                "run hpcgen data plan again",
            )
        if wanted.size is not None and body.total is not None and body.total != wanted.size:
            raise (
                self._web_page()
                if self._content_type.startswith("text/html")
                else self._invalid(
                    f"the file has changed: it has {body.total:,} bytes, but the manifest has {wanted.size:,}",
                    "run hpcgen data plan again",
                )
            )
        if body.start is not None:
            self._require_continuation(body, body.start)
        elif part.size:
            self._restart()  # no support for ranges, or changed content: the body is the complete file
        self._set_total(body.version, body.total)
        part.validator = body.version or part.validator
        self._require_space()

    def _require_continuation(self, body: Body, start: int) -> None:
        """Checks that a part of the file continues what has been downloaded.

        Raises:
            TransientError: it does not, or its end is unknown.
        """
        part, wanted = self._part, self._wanted
        same = part.validator in (None, body.version) or (body.version is None and wanted.sha256 is not None)
        if start != part.size or not part.size or not same:
            self._supports_ranges = start == part.size and same
            self._restart()
            raise TransientError("the server sent another range than requested, or a range of other content")
        if body.total is None and part.total is None and wanted.size is None and wanted.sha256 is None:
            self._supports_ranges = False  # a range may be shorter than requested (RFC 9110, 15.3.7)
            self._restart()
            raise TransientError("the server sent a range without the total size")

    def _set_total(self, validator: str | None, total: int | None) -> None:
        """Accepts the size stated by the server, unless it contradicts an earlier statement.

        Two sizes of the same content cannot both be right. The transfer then starts over, and accepts the later size
        if the next response confirms it. Only different validators prove that the content itself has changed.

        Raises:
            TransientError: the server contradicts itself.
        """
        if total is None or self._wanted.size is not None:
            return
        before, self._stated = self._stated, (validator, total)
        if before and before[1] != total and (before[0] == validator or None in (before[0], validator)):
            self._restart()
            raise TransientError(
                f"the server states a size of {total:,} bytes, but stated {before[1]:,} before"
            )
        self._part.total = total

    def _require_space(self) -> None:
        """Stops a file of unknown size before it fills the disk. Planning could not account for it.

        Raises:
            HpcgenError: the file is larger than the space left, or exceeds MAX_UNKNOWN_BYTES.
        """
        part, reason = self._part, ""
        if self._wanted.size is not None:
            return
        left, limit = bytes_left(Path(part.file.name).parent)
        space = f"{limit} has {size_text(left)} left"
        if part.total is not None and part.total - part.size > left:
            reason = f"the file has {size_text(part.total)}, but {space}"
        elif part.total is None and part.size > min(left, MAX_UNKNOWN_BYTES):
            reason = f"{size_text(part.size)} received so far, but the total is unknown and {space}"
        if reason:
            self._restart()
            raise HpcgenError(
                f"{redacted(self._wanted.url)}: {reason}",
                "free some space, or give its size in a list (data.corpus.source.manifest) and plan again",
            )

    def _read(self, body: Body) -> None:
        part, wanted, policy = self._part, self._wanted, self._store.policy
        window, bytes_in_window = time.monotonic(), 0
        is_checked, space_checked_at = part.size > 0, part.size
        for block in body.blocks:
            part.write(block)
            self._advance(len(block))
            self._furthest = max(self._furthest, part.size)
            if not is_checked and len(part.head) >= 64:
                is_checked = True
                self._require_expected_content()
            if wanted.size is not None and part.size > wanted.size:
                self._restart()
                raise self._invalid(
                    f"the file has changed: it has more than the {wanted.size:,} bytes of the manifest",
                    "run hpcgen data plan again",
                )
            if part.size - space_checked_at >= _SPACE_CHECK_BYTES:
                space_checked_at = part.size
                self._require_space()
            bytes_in_window += len(block)
            if (seconds := time.monotonic() - window) > policy.read_timeout_s:
                if bytes_in_window < policy.slowest_bytes_per_s * seconds:
                    raise TransientError(f"only {counted(bytes_in_window, 'byte')} in {seconds:.0f} s")
                window, bytes_in_window = time.monotonic(), 0

    def _check(self) -> None:
        part, wanted = self._part, self._wanted
        self._require_expected_content()
        if part.total is None:
            self._set_total(part.validator, part.size)  # the end of the stream states the size as well
        total = part.total if wanted.size is None else wanted.size
        if total is not None and part.size < total:
            raise TransientError(f"the body ended after {part.size:,} of {total:,} bytes")
        if total is not None and part.size > total:
            found = part.size
            self._restart()
            raise TransientError(f"received {found:,} bytes instead of {total:,}")
        if wanted.sha256 is not None and part.sha256 != wanted.sha256:
            reason = (
                f"the file is damaged or has changed: its SHA-256 is {part.sha256} ({part.size:,} bytes), "
                f"but the manifest has {wanted.sha256}"
            )
            self._restart()
            raise self._invalid(reason, "run hpcgen data plan again")

    def _require_expected_content(self) -> None:
        """Checks that the first bytes match the file name."""
        found = unexpected_content(self._wanted.name, self._part.head, self._content_type)
        if found:
            self._restart()
            raise (
                self._web_page()
                if found == WEB_PAGE
                else self._invalid(f"the content is {found}", "correct the source")
            )

    def _web_page(self) -> Exception:
        return self._invalid(
            "the content is a web page (HTML), not data",
            "open it in a browser: it may need a login or a license agreement, or come from a proxy",
        )

    def _invalid(self, reason: str, hint: str) -> Exception:
        """Exception for a response that is not the file: transient until `RetryPolicy.invalid_responses` is reached.

        A proxy, or one of the servers behind an address, may be wrong temporarily.
        """
        self._invalid_responses += 1
        if self._invalid_responses < self._store.policy.invalid_responses:
            return TransientError(reason)
        return HpcgenError(f"{redacted(self._wanted.url)}: {reason}", hint)

    def _restart(self) -> None:
        self._advance(-self._part.size)
        self._part.restart()
