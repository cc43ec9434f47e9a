"""Headers of HTTP: the token of a request, and what a response says about its file. Needs no HTTP client."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from hpcgen.data.urls import redacted
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    import httpx2


def authorization(url: str, token_variable: str | None) -> dict[str, str]:
    """HTTP headers with the token of `token_for`.

    Raises:
        HpcgenError: see `token_for`.
    """
    token = token_for(url, token_variable)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def token_for(url: str, token_variable: str | None) -> str | None:
    """Reads the token for the server of `url` from the environment variable; None if no variable is given.

    Raises:
        HpcgenError: the variable is empty, or the token would be sent without encryption.
    """
    if token_variable is None:
        return None
    token = os.environ.get(token_variable, "").strip()
    if not token:
        raise HpcgenError(
            f"data.corpus.source.token_variable: ${token_variable} is empty or not set",
            f"export {token_variable} in the shell that plans, submits or runs the download",
        )
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise HpcgenError(
            f"${token_variable} contains characters that are invalid in a token",
            "check it for a line break or a space",
        )
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise HpcgenError(
            f"{redacted(url)}: the token in ${token_variable} would be sent without encryption", "use https"
        )
    return token


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks its clients to wait; None if it does not state them.

    The value is in Retry-After (in seconds or as a date) or, as on the Hugging Face hub, in
    `RateLimit: "resolvers";r=0;t=55` (draft-ietf-httpapi-ratelimit-headers): no requests remain for 55 seconds.
    """
    value = headers.get("Retry-After", "").strip()
    limit = re.search(r";\s*r=0\s*;\s*t=(\d{1,9})", headers.get("RateLimit", ""))
    if not value and limit:
        return float(limit[1])
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
        return float(value)
    try:
        moment = _date(value).timestamp()
        now = _date(headers["Date"]).timestamp() if "Date" in headers else time.time()
    except (ValueError, TypeError):
        return None
    return max(0.0, moment - now)


def content_validator(response: httpx2.Response) -> str | None:
    """Validator for If-Range: a strong ETag, or a Last-Modified that is at least a minute old.

    A more recent Last-Modified may not be unique: the file can change twice in a second (RFC 9110, 8.8.2.2).
    """
    headers = response.headers
    if headers.get("ETag", "").startswith('"'):
        return str(headers["ETag"])
    try:
        changed, now = (_date(headers[name]) for name in ("Last-Modified", "Date"))
    except (KeyError, ValueError, TypeError):
        return None
    return str(headers["Last-Modified"]) if (now - changed).total_seconds() >= 60 else None


def content_total(response: httpx2.Response) -> int | None:
    """Size of the complete file in bytes, if the response states it."""
    match = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d{1,18})", response.headers.get("Content-Range", ""))
    if match:
        return int(match[1])
    match = re.fullmatch(r"\d{1,18}", response.headers.get("Content-Length", ""))
    return int(match[0]) if match and response.status_code == 200 else None


def range_start(response: httpx2.Response) -> int | None:
    """Offset in the file of the first byte of a partial response; None if the response does not state it."""
    match = re.match(r"bytes (\d{1,18})-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _date(value: str) -> datetime:
    """The date in a header.

    Raises:
        ValueError: it is none.
    """
    from email.utils import parsedate_to_datetime  # imports socket

    return parsedate_to_datetime(value)
