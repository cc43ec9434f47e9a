"""A file on a web server, and its download."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

import zstandard

from hpcgen.config.corpus import CorpusConfig, CorpusJob, SourceConfig, UrlSource
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data import part
from hpcgen.data.http import Web
from hpcgen.data.listed_files import ManifestFile
from hpcgen.data.manifest import Manifest
from hpcgen.data.retries import RetryPolicy
from hpcgen.data.stores.base import Wanted
from hpcgen.data.stores.http import Http
from hpcgen.data.transfer import fetched
from hpcgen.files import publish
from tests.http_server import Server

QUICK = RetryPolicy(
    attempts=4,
    first_wait_s=0.01,
    longest_wait_s=0.02,
    longest_retry_after_s=0.3,
    connect_timeout_s=20,
    read_timeout_s=20,
)
TOKEN = "hf_planted0secret0value0that0must0not0leak"
LINES = b"".join(b'{"text": "line %d of the corpus"}\n' % number for number in range(9000))
CONTENT = zstandard.compress(random.Random(7).randbytes(300_000))
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PATH = "/corpus/part.jsonl.zst"


def wanted(server: Server, *, size: int | None = len(CONTENT), sha256: str | None = SHA256) -> Wanted:
    return Wanted(name="part.jsonl.zst", url=server.url + PATH, size=size, sha256=sha256)


def fetch(
    what: Wanted,
    target: Path,
    web: Web,
    advance: Callable[[int], None] = lambda n: None,
    token_variable: str | None = None,
) -> tuple[int, str]:
    """As the stage does it, without a record; size and hash."""
    with fetched(what, target, Http(web.policy, token_variable, web), advance) as content:
        publish(content.file, target)
        return content.size, content.sha256


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def corpus_job(tmp_path: Path, server: Server, token_variable: str | None = None) -> CorpusJob:
    source = SourceConfig(url=UrlSource(template=f"{server.url}/x"), token_variable=token_variable)
    return CorpusJob(
        corpus=CorpusConfig(directory=str(tmp_path / "corpus"), source=source, download_connections=4),
        tokenizer=TokenizerConfig(kind="bytes"),
    )


def manifest_of(server: Server, files: dict[str, bytes], *, with_hash: bool = True) -> Manifest:
    server.files |= {f"/{name}": content for name, content in files.items()}
    listed = [
        ManifestFile(
            name=name,
            split="corpus",
            size=len(content),
            sha256=hashlib.sha256(content).hexdigest() if with_hash else None,
            url=f"{server.url}/{name}",
        )
        for name, content in files.items()
    ]
    return Manifest("test", listed)


def become_another_process() -> None:
    """Clears the cache of folder scans, so that the next scan is that of a new process."""
    part._leftover_parts.cache_clear()
