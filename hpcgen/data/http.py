"""Web servers as they are: busy, slow, gone, or answering with a page for people instead of data.

httpx2 does the talking: huggingface_hub brings it along, it has separate timeouts for connecting and reading, keeps
connections open, reads the proxies of the environment, notices a body that ends early, and leaves the token out when
a server redirects to another one. It costs a core 2 to 3 seconds for a GB, hash and write included (http.client: 2,
without all this); a download task has a process for each of its connections.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx2

from hpcgen.errors import HpcgenError
from hpcgen.text import counted
from hpcgen.version import __version__

logging.getLogger("httpx2").setLevel(logging.WARNING)
"""At INFO it logs whole addresses, signatures included."""

Result = TypeVar("Result")

TRY_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Statuses that may be another one the next time."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a server is waited for."""

    attempts: int = 10
    """Without any progress between them; then it is given up."""
    first_wait_s: float = 1.0
    """Upper bound of the first wait; each further one is twice as long."""
    longest_wait_s: float = 120.0
    longest_retry_after_s: float = 900.0
    """The most that a server's Retry-After is believed."""
    connect_timeout_s: float = 20.0
    read_timeout_s: float = 60.0
    """A connection on which nothing comes for so long is dead."""
    slowest_bytes_per_s: float = 1024.0
    """A connection that is slower over `read_timeout_s` is given up too."""
    wrong_answers: int = 3
    """Answers of status 200 that are not the file (a web page, an empty body, another size); the last one is final."""

    def wait_s(self, failures: int, retry_after_s: float | None) -> float:
        """How long to wait after so many failures in a row.

        The whole wait is drawn at random ("full jitter"): clients that failed together do not come back together.
        """
        bound = min(self.longest_wait_s, self.first_wait_s * 2 ** (failures - 1))
        if retry_after_s is None:
            return random.uniform(0, bound)
        return min(retry_after_s, self.longest_retry_after_s) + random.uniform(0, self.first_wait_s)


class TryAgain(Exception):
    """What went wrong may be right the next time."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Gone(HpcgenError):
    """The server knows no such file (any more)."""


class Web:
    """The servers that a process talks to. Its threads wait together where a server asks to be left alone.

    The processes of a download task do not know of each other's waits: each is told so by the server itself, and the
    random part of its wait keeps it from coming back at the same moment as the others.
    """

    def __init__(self, patience: Patience | None = None, connections: int = 64) -> None:
        self.patience = patience or Patience()
        timeout = httpx2.Timeout(self.patience.read_timeout_s, connect=self.patience.connect_timeout_s)
        self._client = httpx2.Client(
            follow_redirects=True,
            max_redirects=10,
            timeout=timeout,
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            # identity: lengths, ranges and hashes are those of the file
            headers={"User-Agent": f"hpcgen/{__version__}", "Accept": "*/*", "Accept-Encoding": "identity"},
            event_hooks={"response": [_refuse_other_scheme]},
        )
        self._lock = threading.Lock()
        self._quiet_until: dict[str, float] = {}

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections that are kept open."""
        self._client.close()

    @contextmanager
    def answer(
        self, method: str, url: str, headers: Mapping[str, str], also: tuple[int, ...] = ()
    ) -> Iterator[httpx2.Response]:
        """The answer to one request, its body not read yet: of status 200, 206 or one of `also`.

        Raises:
            TryAgain: the server is busy or not there, or the connection broke, also while the body is read.
            HpcgenError: it refuses, has no such file, or redirects to what is no web server.
        """
        self._keep_quiet(url)
        try:
            with self._client.stream(method, url, headers=dict(headers)) as response:
                if response.status_code not in (200, 206, *also):
                    raise _refusal(response, url, has_token="Authorization" in headers)
                yield response
        except (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
            raise HpcgenError(f"{shown(url)}: {error}", "correct the source") from error
        except httpx2.RequestError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise HpcgenError(
                    f"{shown(url)}: its certificate is not trusted here",
                    "set SSL_CERT_FILE to the certificates of your site",
                ) from error
            raise TryAgain(_broken(error, self.patience)) from error

    def patiently(
        self, url: str, once: Callable[[], Result], progress: Callable[[], int] = lambda: 0, hint: str = ""
    ) -> Result:
        """What `once` returns, called again after each TryAgain.

        `progress` tells how far the work is: getting further starts the count of failures anew.

        Raises:
            HpcgenError: it failed too often in a row, or in a way that waiting does not mend.
        """
        failures, furthest, started = 0, progress(), time.monotonic()
        while True:
            try:
                return once()
            except TryAgain as problem:
                if progress() > furthest:
                    failures, furthest = 0, progress()
                failures += 1
                if failures >= self.patience.attempts:
                    after = f"after {counted(failures, 'attempt')} in {time.monotonic() - started:.0f} s"
                    raise HpcgenError(f"{shown(url)}: {problem} ({after})", hint) from problem
                wait_s = self.patience.wait_s(failures, problem.retry_after_s)
                if problem.retry_after_s is not None:
                    self.ask_for_quiet(url, min(problem.retry_after_s, self.patience.longest_retry_after_s))
                time.sleep(wait_s)

    def ask_for_quiet(self, url: str, seconds: float) -> None:
        """Holds back every request to the server of `url`, from now on and for so long."""
        with self._lock:
            until = max(self._quiet_until.get(_host(url), 0.0), time.monotonic() + seconds)
            self._quiet_until[_host(url)] = until

    def _keep_quiet(self, url: str) -> None:
        with self._lock:
            seconds = self._quiet_until.get(_host(url), 0.0) - time.monotonic()
        if seconds > 0:
            time.sleep(seconds + random.uniform(0, self.patience.first_wait_s))


def shown(url: str) -> str:
    """`url` for messages: without a query, which may hold a signature, and without a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # no address: then nobody knows where a password would end
        return url.partition("?")[0].rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", "")) + ("?..." if parts.query else "")


def authorization(url: str, token_variable: str | None) -> dict[str, str]:
    """The headers that carry the token of `token_for`.

    Raises:
        HpcgenError: as `token_for`.
    """
    token = token_for(url, token_variable)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def token_for(url: str, token_variable: str | None) -> str | None:
    """The token for the server of `url`, which the environment variable holds; None where none is named.

    Raises:
        HpcgenError: the variable is empty, or the token would cross the network in the clear.
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
            f"${token_variable} holds characters that no token has", "look for a line break or a space"
        )
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise HpcgenError(
            f"{shown(url)}: the token in ${token_variable} would be sent without encryption", "use https"
        )
    return token


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """How long a server asks to be left alone; None where it does not say.

    It says so by Retry-After, in seconds or as a date, or as the hub does, by `RateLimit: "resolvers";r=0;t=55`
    (draft-ietf-httpapi-ratelimit-headers): nothing remains for 55 seconds.
    """
    value = headers.get("Retry-After", "").strip()
    limit = re.search(r";\s*r=0\s*;\s*t=(\d{1,9})", headers.get("RateLimit", ""))
    if not value and limit:
        return float(limit[1])
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value):
        return float(value)
    try:
        moment = parsedate_to_datetime(value).timestamp()
        now = parsedate_to_datetime(headers["Date"]).timestamp() if "Date" in headers else time.time()
    except (ValueError, TypeError):
        return None
    return max(0.0, moment - now)


def content_validator(response: httpx2.Response) -> str | None:
    """The validator for If-Range: a strong ETag, else the time of the last change where that was a minute ago or more.

    Within a minute a file might change twice under the same time (RFC 9110, 8.8.2.2).
    """
    headers = response.headers
    if headers.get("ETag", "").startswith('"'):
        return str(headers["ETag"])
    try:
        changed, now = (parsedate_to_datetime(headers[name]) for name in ("Last-Modified", "Date"))
    except (KeyError, ValueError, TypeError):
        return None
    return str(headers["Last-Modified"]) if (now - changed).total_seconds() >= 60 else None


def content_total(response: httpx2.Response) -> int | None:
    """Bytes of the whole file, where the answer says."""
    match = re.fullmatch(r"bytes (?:\d+-\d+|\*)/(\d{1,18})", response.headers.get("Content-Range", ""))
    if match:
        return int(match[1])
    match = re.fullmatch(r"\d{1,18}", response.headers.get("Content-Length", ""))
    return int(match[0]) if match and response.status_code == 200 else None


def range_start(response: httpx2.Response) -> int | None:
    """The place in the file, in bytes, of the first byte of a partial answer; None where it does not say."""
    match = re.match(r"bytes (\d{1,18})-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _refusal(response: httpx2.Response, url: str, has_token: bool) -> Exception:
    status = response.status_code
    words = f"HTTP {status} {response.reason_phrase}".strip()
    if status in TRY_AGAIN:
        return TryAgain(f"the server answers {words}", retry_after_s(response.headers))
    if status in (401, 403):
        hint = (
            "the token may lack the right to read this, or its terms may have to be accepted on the hub's page"
            if has_token
            else "set data.corpus.source.token_variable to the name of the variable that holds your token"
        )
        return HpcgenError(f"{shown(url)}: the server refuses us ({words})", hint)
    if status in (404, 410):
        return Gone(
            f"{shown(url)}: is gone ({words})", "name another source in data.corpus.source and plan again"
        )
    return HpcgenError(f"{shown(url)}: the server answers {words}", "try the address by hand: curl -I")


def _refuse_other_scheme(response: httpx2.Response) -> None:
    """Ends a redirect that leaves the web. httpx2 reports `javascript:` and the like as a broken connection.

    Raises:
        HpcgenError: the redirect names a scheme other than http and https.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", response.headers.get("Location", "").strip())
    if response.is_redirect and scheme and scheme[1].lower() not in ("http", "https"):
        raise HpcgenError(
            f"{shown(str(response.url))}: redirects to an unsupported protocol ({scheme[1]})",
            "correct the source",
        )


def _broken(error: httpx2.RequestError, patience: Patience) -> str:
    """What a broken connection means, in words."""
    if isinstance(error, httpx2.ConnectTimeout):
        return f"no connection within {patience.connect_timeout_s:g} s"
    if isinstance(error, httpx2.ReadTimeout):
        return f"nothing came for {patience.read_timeout_s:g} s"
    if isinstance(error, httpx2.ConnectError):
        return f"no connection ({error})"
    return f"the connection broke ({error or type(error).__name__})"


def _host(url: str) -> str:
    return urlsplit(url).netloc
