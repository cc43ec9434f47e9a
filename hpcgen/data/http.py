"""HTTP requests, for servers that are busy, slow or down, or redirect to others.

The client is httpx2, which is a dependency of huggingface_hub. It has separate timeouts for connecting and reading,
keeps connections open, reads the proxies of the environment, detects a body that ends early, and drops the token when
a server redirects to another server. It takes 2 to 3 s of CPU time per GB, including hash and write (http.client: 2 s,
without these features). A download task has one process per connection.
"""

from __future__ import annotations

import itertools
import logging
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx2

from hpcgen.data.http_headers import retry_after_s
from hpcgen.data.retries import RetryPolicy, TransientError
from hpcgen.data.stores.base import FileNotInStore
from hpcgen.data.urls import redacted
from hpcgen.errors import HpcgenError
from hpcgen.version import __version__

logging.getLogger("httpx2").setLevel(logging.WARNING)
"""httpx2 logs complete URLs at INFO, including signatures."""

_SHOWN_BYTES = 80
"""Bytes of an unexpected answer that a message shows."""

TRANSIENT_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))
"""HTTP statuses worth a retry."""


class Web:
    """HTTP client of a process. When a server sends Retry-After, all threads pause their requests to it.

    The processes of a download task do not share these pauses: the server tells each of them, and the random part of
    the wait keeps them from retrying at the same moment.
    """

    def __init__(self, policy: RetryPolicy | None = None, connections: int = 64) -> None:
        self.policy = policy or RetryPolicy()
        timeout = httpx2.Timeout(self.policy.read_timeout_s, connect=self.policy.connect_timeout_s)
        self._client = httpx2.Client(
            follow_redirects=True,
            max_redirects=10,
            timeout=timeout,
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            # identity: lengths, ranges and hashes refer to the file itself
            headers={"User-Agent": f"hpcgen/{__version__}", "Accept": "*/*", "Accept-Encoding": "identity"},
            event_hooks={"response": [_refuse_other_scheme]},
        )
        self._lock = threading.Lock()
        self._paused_until: dict[str, float] = {}

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the open connections."""
        self._client.close()

    @contextmanager
    def request(
        self, method: str, url: str, headers: Mapping[str, str], also: tuple[int, ...] = ()
    ) -> Iterator[httpx2.Response]:
        """Sends one request. Yields the response, with status 200, 206 or one of `also`, before its body is read.

        Raises:
            TransientError: the server is busy or unreachable, or the connection broke (also while the body is read).
            HpcgenError: the server refuses access, does not have the file, or redirects to another protocol.
        """
        self._wait_while_paused(url)
        try:
            with self._client.stream(method, url, headers=dict(headers)) as response:
                if response.status_code not in (200, 206, *also):
                    raise self._refusal(response, url, has_token="Authorization" in headers)
                yield response
        except (httpx2.UnsupportedProtocol, httpx2.TooManyRedirects, httpx2.InvalidURL) as error:
            raise HpcgenError(f"{redacted(url)}: {error}", "correct the source") from error
        except httpx2.RequestError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise HpcgenError(
                    f"{redacted(url)}: this machine does not trust the server's certificate",
                    "set SSL_CERT_FILE to the certificates of your site",
                ) from error
            raise TransientError(_broken(error, self.policy)) from error

    def _refusal(self, response: httpx2.Response, url: str, has_token: bool) -> Exception:
        error = _refusal(response, url, has_token)
        if isinstance(error, TransientError) and error.retry_after_s is not None:
            self.pause(url, min(error.retry_after_s, self.policy.longest_retry_after_s))
        return error

    def pause(self, url: str, seconds: float) -> None:
        """Delays all further requests to the server of `url` by `seconds` from now."""
        with self._lock:
            until = max(self._paused_until.get(_host(url), 0.0), time.monotonic() + seconds)
            self._paused_until[_host(url)] = until

    def _wait_while_paused(self, url: str) -> None:
        with self._lock:
            seconds = self._paused_until.get(_host(url), 0.0) - time.monotonic()
        if seconds > 0:
            time.sleep(seconds + random.uniform(0, self.policy.first_wait_s))


def describe_answer(url: str, headers: Mapping[str, str]) -> str:
    """Requests `url` again to describe an unexpected answer: status, content type and first words."""
    try:
        with Web() as web, web.request("GET", url, headers, also=(204,)) as response:
            begin = str(b"".join(itertools.islice(response.iter_raw(_SHOWN_BYTES), 1)), "utf-8", "replace")
            kind = response.headers.get("Content-Type", "no content type")
            words = repr(" ".join(begin.split())) if begin.strip() else "nothing"
            return f"{redacted(str(response.url))} answers HTTP {response.status_code} ({kind}): {words}"
    except (HpcgenError, TransientError) as error:
        return str(error)


def _refusal(response: httpx2.Response, url: str, has_token: bool) -> Exception:
    status = response.status_code
    words = f"HTTP {status} {response.reason_phrase}".strip()
    if status in TRANSIENT_STATUSES:
        return TransientError(f"the server answers {words}", retry_after_s(response.headers))
    if status in (401, 403):
        hint = (
            "check that the token has read access, and accept the dataset's terms on its page on the hub"
            if has_token
            else "set data.corpus.source.token_variable to the name of the environment variable with your token"
        )
        return HpcgenError(f"{redacted(url)}: the server denies access ({words})", hint)
    if status in (404, 410):
        return FileNotInStore(
            f"{redacted(url)}: the server does not have this file ({words})",
            "set another source in data.corpus.source and plan again",
        )
    return HpcgenError(f"{redacted(url)}: the server answers {words}", "try the URL by hand: curl -I")


def _refuse_other_scheme(response: httpx2.Response) -> None:
    """Rejects redirects to other protocols. httpx2 reports `javascript:` and the like as a broken connection.

    Raises:
        HpcgenError: the scheme of the redirect is not http or https.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", response.headers.get("Location", "").strip())
    if response.is_redirect and scheme and scheme[1].lower() not in ("http", "https"):
        raise HpcgenError(
            f"{redacted(str(response.url))}: redirects to an unsupported protocol ({scheme[1]})",
            "correct the source",
        )


def _broken(error: httpx2.RequestError, policy: RetryPolicy) -> str:
    """Describes a broken connection."""
    if isinstance(error, httpx2.ConnectTimeout):
        return f"no connection within {policy.connect_timeout_s:g} s"
    if isinstance(error, httpx2.ReadTimeout):
        return f"no data for {policy.read_timeout_s:g} s"
    if isinstance(error, httpx2.ConnectError):
        return f"no connection ({error})"
    return f"the connection broke ({error or type(error).__name__})"


def _host(url: str) -> str:
    return urlsplit(url).netloc
