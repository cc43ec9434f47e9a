"""A dataset repository on the Hugging Face hub as a source, pinned to a commit."""

from __future__ import annotations

import os
import time
from typing import Any
from urllib.parse import quote

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from hpcgen.config.corpus import HubSource
from hpcgen.data.http import TRANSIENT_STATUSES, describe_answer
from hpcgen.data.http_headers import authorization, retry_after_s, token_for
from hpcgen.data.listed_files import UNSPLIT, Listing, ManifestFile
from hpcgen.data.retries import INTERACTIVE, RetryPolicy
from hpcgen.data.urls import redacted, url_problem
from hpcgen.errors import HpcgenError

_TIMEOUT_S = 30.0
_UNEXPECTED = (ValueError, TypeError, LookupError, AttributeError, httpx2.DecodingError)
"""Exceptions of huggingface_hub for an answer that is not JSON or does not have the expected shape."""
_ELSEWHERE = "or use another source: a mirror (HF_ENDPOINT), url, directory or manifest"


def list_repository(
    source: HubSource, token_variable: str | None, policy: RetryPolicy = INTERACTIVE
) -> Listing:
    """Lists the files of the repository at the current commit of its revision, sorted by name.

    A token is sent only if `token_variable` is set, even if huggingface_hub has stored one.

    Raises:
        HpcgenError: hub, repository or revision is missing, not accessible, or empty.
    """
    endpoint = _endpoint()
    where = f"{source.repo_id} on {endpoint}"
    api = HfApi(endpoint=endpoint, token=token_for(endpoint, token_variable) or False)
    try:
        commit = _commit(api, source, policy)
        tree = api.list_repo_tree(source.repo_id, recursive=True, revision=commit, repo_type="dataset")
        found = [_checked(entry) for entry in tree if isinstance(entry, RepoFile)]
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        raise _explained(error, source, where, token_variable) from error
    except _UNEXPECTED as error:
        api_url = f"{endpoint}/api/datasets/{source.repo_id}/revision/{quote(source.revision, safe='')}"
        answer = describe_answer(api_url, authorization(endpoint, token_variable))
        raise HpcgenError(
            f"{where}: the answer is not from a hub. {answer}",
            f"check HF_ENDPOINT, and whether a proxy or a login page answers in its place, {_ELSEWHERE}",
        ) from error
    except httpx2.HTTPError as error:
        raise _explained(error, source, where, token_variable) from error
    if not found:
        raise HpcgenError(
            f"the repository {where} is empty at {source.revision}", f"check its name, {_ELSEWHERE}"
        )
    address = f"{endpoint}/datasets/{source.repo_id}/resolve/{commit}/"
    files = [
        ManifestFile(
            name=entry.path,
            split=UNSPLIT,
            size=entry.size,
            sha256=entry.lfs.sha256 if entry.lfs else None,
            url=address + quote(entry.path),
        )
        for entry in found
    ]
    return Listing(f"hub {source.repo_id} at {commit}", sorted(files, key=lambda file: file.name))


def _checked(entry: RepoFile) -> RepoFile:
    """Checks the types of an entry of a listing, and returns it.

    Raises:
        TypeError: it does not.
    """
    has_hash = entry.lfs is None or isinstance(entry.lfs.sha256, str)
    if isinstance(entry.path, str) and type(entry.size) is int and has_hash:
        return entry
    raise TypeError(f"not a file of a listing: {entry}")


def _endpoint() -> str:
    """URL of the hub.

    Raises:
        HpcgenError: HF_ENDPOINT is not a valid URL, or contains a password.
    """
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    if problem := url_problem(endpoint, f"HF_ENDPOINT = {redacted(endpoint)}"):
        raise HpcgenError(problem, "correct it, or unset it")
    return endpoint


def _commit(api: HfApi, source: HubSource, policy: RetryPolicy) -> str:
    """Returns the commit of the revision, with retries: huggingface_hub retries listings, but not this request.

    Raises:
        TypeError: the answer has no commit.
    """
    failures = 0
    while True:
        try:
            commit = api.dataset_info(source.repo_id, revision=source.revision, timeout=_TIMEOUT_S).sha
            if not isinstance(commit, str):
                raise TypeError(f"not a commit: {commit}")
            return commit
        except (HfHubHTTPError, httpx2.TransportError) as error:
            failures += 1
            response = error.response if isinstance(error, HfHubHTTPError) else None
            is_final = response is not None and response.status_code not in TRANSIENT_STATUSES
            if is_final or failures >= policy.attempts:
                raise
            time.sleep(policy.wait_s(failures, None if response is None else retry_after_s(response.headers)))


def _explained(error: Exception, source: HubSource, where: str, token_variable: str | None) -> HpcgenError:
    """Turns an error of huggingface_hub into a message with a hint."""
    page = f"{_endpoint()}/datasets/{source.repo_id}"
    token = f"the token in ${token_variable}" if token_variable else "no token"
    if isinstance(error, GatedRepoError):
        return HpcgenError(
            f"the repository {where} is gated, and {token} was sent",
            f"accept its terms at {page} and set data.corpus.source.token_variable",
        )
    if isinstance(error, DisabledRepoError):
        return HpcgenError(f"the hub has disabled the repository {where}", f"see {page}, {_ELSEWHERE}")
    status: Any = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, RevisionNotFoundError):
        return HpcgenError(
            f"the repository {where} has no revision {source.revision}",
            f"see {page}/tree/main for its branches and commits",
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return HpcgenError(
            f"the repository {where} does not exist, or it is private and {token} was sent",
            f"check {page}; set data.corpus.source.token_variable if it is private, {_ELSEWHERE}",
        )
    if isinstance(error, OfflineModeIsEnabled):
        return HpcgenError(f"{where}: HF_HUB_OFFLINE is set", "unset it to plan the corpus")
    if isinstance(error, HfHubHTTPError):
        words = f"HTTP {status} {error.response.reason_phrase}".strip()
        return HpcgenError(
            f"{where}: the hub answers {words}, and {token} was sent", f"check {page}, {_ELSEWHERE}"
        )
    if isinstance(error, HFValidationError):
        return HpcgenError(
            f"data.corpus.source.huggingface.repo_id = {source.repo_id!r} is not a valid repository name: {error}",
            "write OWNER/NAME",
        )
    return HpcgenError(
        f"{where}: the hub cannot be reached ({error or type(error).__name__})",
        f"check the network and the proxy (HTTPS_PROXY) of this machine, {_ELSEWHERE}",
    )
