"""A registry of images on loopback with one image in it, which keeps those who pull it waiting."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
_LONGEST_S = 120.0


@contextlib.contextmanager
def slow_registry(image: Path, name: str) -> Iterator[tuple[str, threading.Event]]:
    """The name under which the image in a docker archive can be pulled, and what lets it go."""
    contents, is_let_go = _contents_of(image), threading.Event()

    class Registry(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            kind, body = contents.get(self.path.rpartition("/")[2], ("text/plain", b""))
            if kind == _MANIFEST:
                is_let_go.wait(_LONGEST_S)
            self.send_response(200 if body or self.path == "/v2/" else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", _digest(body))
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}/{name}:1", is_let_go
    finally:
        is_let_go.set()
        server.shutdown()
        server.server_close()
        thread.join(10.0)


def _contents_of(image: Path) -> dict[str, tuple[str, bytes]]:
    """Manifest, configuration and layers by their digests, the manifest also by its tag."""
    with tarfile.open(image) as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(name)
            assert member is not None
            return member.read()

        (described,) = json.loads(read("manifest.json"))
        config, layers = read(described["Config"]), [read(name) for name in described["Layers"]]
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _described(_CONFIG, config),
            "layers": [_described(_LAYER, layer) for layer in layers],
        }
    ).encode()
    found = {_digest(config): (_CONFIG, config), **{_digest(layer): (_LAYER, layer) for layer in layers}}
    return {**found, _digest(manifest): (_MANIFEST, manifest), "1": (_MANIFEST, manifest)}


def _described(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "size": len(data), "digest": _digest(data)}


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
