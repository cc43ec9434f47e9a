"""The stage download: a file of the corpus from its server, whole and with the right hash, or an error."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2

from hpcgen.config.corpus import CorpusJob
from hpcgen.data.http import (
    TryAgain,
    Web,
    authorization,
    content_total,
    content_validator,
    range_start,
    shown,
)
from hpcgen.data.part import PartialFile, partial_file
from hpcgen.data.record import FileIdentity, Record, publish_unit, write_record
from hpcgen.data.space import bytes_left
from hpcgen.data.task import Context, Step
from hpcgen.data.unit import Unit
from hpcgen.errors import HpcgenError
from hpcgen.text import size_text

_BLOCK = 1 << 20
_MAGIC = {".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), ".gz": re.compile(rb"\x1f\x8b")}
"""How compressed data begins (zstd: a frame, or a skippable one)."""
_MEANINGFUL_BYTES, _MEANINGFUL_SHARE = 16 << 10, 1000
"""Progress that starts the count of attempts again: this many bytes, and a thousandth of the file, since the last."""
_LOOK_BYTES = 256 << 20
"""Bytes of a body of unknown length between two looks at the room that is left."""
MOST_UNKNOWN_BYTES = 1 << 40
"""The longest file (1 TiB) that is fetched when nobody states its size; the stream may never end."""
_HINT = "what was fetched is kept: run the stage again to go on from there"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the manifest says of a file."""

    name: str
    url: str
    size: int | None
    sha256: str | None


def download(unit: Unit, job: CorpusJob, context: Context, web: Web | None = None) -> Record:
    """Fetches the file of `unit` and publishes it with its record.

    A file that lies there already with the size and the hash of the manifest is taken as it is.

    Raises:
        HpcgenError: the server refuses, has something else, or fails too often; the disk is full.
    """
    started = time.monotonic()
    [item], target = unit.inputs, job.directory / unit.name
    if unit.url is None or not unit.url.startswith(("https://", "http://")):
        raise HpcgenError(f"{item.name}: has no http or https address", "run hpcgen data plan again")
    wanted = Wanted(name=item.name, url=unit.url, size=item.size, sha256=item.sha256)

    def advance(num_bytes: int) -> None:
        context.advance(Step(bytes=num_bytes))

    def recorded(size: int, sha256: str) -> Record:
        return Record(
            stage=unit.stage,
            configuration=context.configuration,
            inputs=(FileIdentity(item.name, item.size, sha256, item.modified_ns),),
            outputs=(FileIdentity(unit.name, size, sha256),),
            seconds=time.monotonic() - started,
        )

    try:
        if (size := _size_when_present(target, wanted, advance)) is not None and wanted.sha256:
            record = recorded(size, wanted.sha256)
            write_record(record, target)
            return record
        headers = authorization(unit.url, job.corpus.source.token_variable)
        with fetched(wanted, target, web or _web(), headers, advance) as part:
            record = recorded(part.size, part.sha256)
            publish_unit([(part.file, target)], record, target)
    except OSError as error:
        raise HpcgenError(f"cannot write {target}: {error.strerror}") from error
    return record


@contextlib.contextmanager
def fetched(
    wanted: Wanted,
    target: Path,
    web: Web,
    headers: dict[str, str],
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[PartialFile]:
    """The whole file, private beside `target`. `advance` is told the bytes that come, less those thrown away.

    Raises:
        HpcgenError: as `download`.
        OSError: the disk is full, or does not work.
    """
    with partial_file(target, wanted.url) as part:
        advance(part.size)
        transfer = _Transfer(wanted, part, web, headers, advance)
        web.patiently(wanted.url, transfer.once, progress=transfer.progress, hint=_HINT)
        yield part


class _Transfer:
    """A file on its way, over as many requests as it takes."""

    def __init__(
        self,
        wanted: Wanted,
        part: PartialFile,
        web: Web,
        headers: dict[str, str],
        advance: Callable[[int], None],
    ) -> None:
        self._wanted, self._part, self._web = wanted, part, web
        self._headers, self._advance = headers, advance
        self._takes_ranges = True
        self._content_type = ""
        self._wrong_answers = 0
        self._stated = None if part.total is None else (part.validator, part.total)
        """The last statement of a server about the length: of which content, and how many bytes."""
        self._furthest = part.size
        """Most bytes that there ever were."""

    def progress(self) -> int:
        """How far the transfer is, in steps large enough to justify further attempts."""
        total = self._wanted.size or self._part.total or 0
        return self._furthest // max(_MEANINGFUL_BYTES, total // _MEANINGFUL_SHARE)

    def once(self) -> None:
        """One request, for what is missing; the part is whole and right when it returns.

        Raises:
            TryAgain: it broke off, or must begin anew.
            HpcgenError: it is not what the manifest says, or no data at all.
        """
        if not self._is_whole():
            self._request()
        self._check()

    def _is_whole(self) -> bool:
        return self._part.size > 0 and self._part.size == self._wanted.size

    def _request(self) -> None:
        part, wanted = self._part, self._wanted
        if part.size and not (self._takes_ranges and (part.validator or wanted.sha256)):
            self._restart()  # nothing would tell whether the rest belongs to the same content
        headers = dict(self._headers)
        if part.size:
            headers["Range"] = f"bytes={part.size}-"
            if part.validator:
                headers["If-Range"] = part.validator
        with self._web.answer("GET", wanted.url, headers, also=(416,)) as response:
            if response.status_code == 416:
                self._beyond_the_end(response)
                return
            self._begin(response)
            self._read(response)

    def _beyond_the_end(self, response: httpx2.Response) -> None:
        """The server has no more than there is: fine when that is all, else it is other content."""
        if content_total(response) != self._part.size:
            self._restart()
            raise TryAgain("the server has less than was fetched before")
        self._note_total(self._part.validator, self._part.size)

    def _begin(self, response: httpx2.Response) -> None:
        """Makes the part fit the answer, or the other way round: what comes now continues the part."""
        part, wanted = self._part, self._wanted
        validator, total = content_validator(response), content_total(response)
        self._content_type = response.headers.get("Content-Type", "")
        if wanted.size is not None and total is not None and total != wanted.size:
            raise (
                self._web_page()
                if self._content_type.startswith("text/html")
                else self._wrong(
                    f"has {total:,} bytes, and {wanted.size:,} in the manifest: it has changed",
                    "run hpcgen data plan again",
                )
            )
        if response.status_code == 206:
            first = range_start(response)
            same = part.validator in (None, validator) or (validator is None and wanted.sha256 is not None)
            if first != part.size or not part.size or not same:
                self._takes_ranges = first == part.size and same
                self._restart()
                raise TryAgain("the server sends another range, or of other content, than was asked for")
            if total is None and part.total is None and wanted.size is None and wanted.sha256 is None:
                self._takes_ranges = False  # a range may be shorter than was asked for (RFC 9110, 15.3.7)
                self._restart()
                raise TryAgain("the server sends a part, and does not say of how much")
        elif part.size:
            self._restart()  # the server knows no ranges, or its content has changed: this is all of it
        self._refuse_unmeasurable(response)
        self._note_total(validator, total)
        part.validator = validator or part.validator
        self._require_room()

    def _note_total(self, validator: str | None, total: int | None) -> None:
        """Takes the server's word for the length of the content, unless it said otherwise before.

        Two lengths of one content cannot both be right. The transfer starts over, and believes the later one if the
        next answer confirms it. Only two different validators tell that the content itself has changed.

        Raises:
            TryAgain: the server contradicts itself.
        """
        if total is None or self._wanted.size is not None:
            return
        before, self._stated = self._stated, (validator, total)
        if before and before[1] != total and (before[0] == validator or None in (before[0], validator)):
            self._restart()
            raise TryAgain(f"the server has {total:,} bytes now, and said {before[1]:,} before")
        self._part.total = total

    def _require_room(self) -> None:
        """Keeps a file whose size is not in the manifest from filling the disk: nobody could plan for it.

        Raises:
            HpcgenError: it is longer than the room that is left, or has no end in sight.
        """
        part, reason = self._part, ""
        if self._wanted.size is not None:
            return
        left, limit = bytes_left(Path(part.file.name).parent)
        room = f"{limit} has room for {size_text(left)} more"
        if part.total is not None and part.total - part.size > left:
            reason = f"has {size_text(part.total)}, and {room}"
        elif part.total is None and part.size > min(left, MOST_UNKNOWN_BYTES):
            reason = f"{size_text(part.size)} have come, its length is not known, and {room}"
        if reason:
            self._restart()
            raise HpcgenError(
                f"{shown(self._wanted.url)}: {reason}",
                "make room, or name its size in a list (data.corpus.source.manifest) and plan again",
            )

    def _refuse_unmeasurable(self, response: httpx2.Response) -> None:
        """An answer of which nobody could say whether all of it came, or which is not the file byte for byte."""
        wanted, headers = self._wanted, response.headers
        encoding = headers.get("Content-Encoding", "identity")
        # some servers say gzip of every .gz file
        if encoding != "identity" and not ("gzip" in encoding and wanted.name.endswith(".gz")):
            raise self._wrong(
                f"the server sends it encoded ({encoding}), though asked not to",
                "mend the server, or fetch the files by other means and name their directory",
            )
        ends = "Content-Length" in headers or "Transfer-Encoding" in headers or response.status_code == 206
        if not ends and wanted.size is None and wanted.sha256 is None:
            raise HpcgenError(
                f"{shown(wanted.url)}: neither server nor manifest says how long it is: a cut file would look whole",
                "name the files in a list with their size or sha256 (data.corpus.source.manifest)",
            )

    def _read(self, response: httpx2.Response) -> None:
        part, wanted, patience = self._part, self._wanted, self._web.patience
        window, bytes_in_window = time.monotonic(), 0
        has_begun, looked = part.size > 0, part.size
        for block in response.iter_raw():
            part.write(block)
            self._advance(len(block))
            self._furthest = max(self._furthest, part.size)
            if not has_begun and len(part.head) >= 64:
                has_begun = True
                self._refuse_other_data()
            if wanted.size is not None and part.size > wanted.size:
                self._restart()
                raise self._wrong(
                    f"more than the {wanted.size:,} bytes of the manifest: it has changed",
                    "run hpcgen data plan again",
                )
            if part.size - looked >= _LOOK_BYTES:
                looked = part.size
                self._require_room()
            bytes_in_window += len(block)
            if (seconds := time.monotonic() - window) > patience.read_timeout_s:
                if bytes_in_window < patience.slowest_bytes_per_s * seconds:
                    raise TryAgain(f"only {bytes_in_window:,} bytes came in {seconds:.0f} s")
                window, bytes_in_window = time.monotonic(), 0

    def _check(self) -> None:
        part, wanted = self._part, self._wanted
        self._refuse_other_data()
        if part.total is None:
            self._note_total(part.validator, part.size)  # the server ended the stream: that says it as well
        total = part.total if wanted.size is None else wanted.size
        if total is not None and part.size < total:
            raise TryAgain(f"the body ended after {part.size:,} of {total:,} bytes")
        if total is not None and part.size > total:
            found = part.size
            self._restart()
            raise TryAgain(f"{found:,} bytes came of {total:,}")
        if wanted.sha256 is not None and part.sha256 != wanted.sha256:
            reason = (
                f"its {part.size:,} bytes have the SHA-256 {part.sha256}, and {wanted.sha256} in the manifest"
            )
            self._restart()
            raise self._wrong(f"{reason}: it is damaged, or has changed", "run hpcgen data plan again")

    def _refuse_other_data(self) -> None:
        """Looks whether something else comes under the name of the file."""
        reason = no_data_reason(self._wanted.name, self._part.head, self._content_type)
        if reason:
            self._restart()
            raise (
                self._web_page()
                if reason == "a web page"
                else self._wrong(f"is {reason}", "correct the source")
            )

    def _web_page(self) -> Exception:
        return self._wrong(
            "is a web page (HTML), not data",
            "look at it in a browser: a login, a license to accept, or a proxy that answers in its place",
        )

    def _wrong(self, reason: str, hint: str) -> Exception:
        """The exception for an answer that is not the file: another attempt until `Patience.wrong_answers`.

        A proxy, or one of the servers behind an address, may be wrong for a moment.
        """
        self._wrong_answers += 1
        if self._wrong_answers < self._web.patience.wrong_answers:
            return TryAgain(reason)
        return HpcgenError(f"{shown(self._wanted.url)}: {reason}", hint)

    def _restart(self) -> None:
        self._advance(-self._part.size)
        self._part.restart()


def no_data_reason(name: str, head: bytes, content_type: str = "") -> str | None:
    """What a file that begins with `head` is, when it cannot be what `name` says; None when it can.

    What the server calls it counts only where the beginning leaves it open: many call everything a web page.
    """
    begins = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    is_page = content_type.startswith("text/html") and begins[:1] != b"{" and not name.endswith(tuple(_MAGIC))
    if is_page or begins[:1] == b"<":
        return "a web page"
    if begins.startswith(b"version https://git-lfs"):
        return "a pointer of git-lfs, not the data that it points to"
    if not head:
        return "empty"
    for suffix, magic in _MAGIC.items():
        if name.endswith(suffix):
            return None if magic.match(head) else f"no {suffix} data (it begins with {head[:4].hex(' ')})"
        if magic.match(head):
            return f"{suffix} data, under a name without {suffix}"
    return None


@functools.cache
def _web() -> Web:
    """The one of this process: its threads share connections."""
    web = Web()
    atexit.register(web.close)
    return web


def _size_when_present(target: Path, wanted: Wanted, advance: Callable[[int], None]) -> int | None:
    """The size of what lies at `target`, when it has the wanted hash: so downloads of other tools count."""
    if wanted.sha256 is None:
        return None
    digest, size = hashlib.sha256(), 0
    try:
        with target.open("rb", buffering=0) as file:
            if wanted.size not in (None, os.fstat(file.fileno()).st_size):
                return None
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
    except FileNotFoundError:
        return None
    if digest.hexdigest() != wanted.sha256:
        return None
    advance(size)
    return size
