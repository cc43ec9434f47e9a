"""A registry of one image over HTTP, enough of the distribution API for enroot's import."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@contextlib.contextmanager
def registry(rootfs: Path, name: str, tag: str) -> Iterator[tuple[str, str]]:
    """Serves the tree as `name`:`tag`; the address of the registry and the digest of the image."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(rootfs, ".")
    layer = gzip.compress(archive.getvalue())
    config = json.dumps({"architecture": "amd64", "config": {"Env": [], "Cmd": ["/bin/bash"]}}).encode()
    described = [
        {"mediaType": media_type, "digest": digest_of(blob), "size": len(blob)}
        for media_type, blob in ((CONFIG, config), (LAYER, layer))
    ]
    document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described[0], "layers": described[1:]}
    manifest = json.dumps(document).encode()
    served = {
        **{f"/v2/{name}/manifests/{reference}": manifest for reference in (tag, digest_of(manifest))},
        **{f"/v2/{name}/blobs/{digest_of(blob)}": blob for blob in (config, layer)},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = served.get(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("Docker-Content-Digest", digest_of(content or b""))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        do_HEAD = do_GET  # noqa: N815 (the name that http.server looks for)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", digest_of(manifest)
        finally:
            server.shutdown()
            thread.join()
