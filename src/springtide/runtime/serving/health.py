"""A replica's health over HTTP, at the paths of the Open Inference Protocol, for probes over a network.

It reveals no secret and changes nothing, so it needs no token. The platform itself relies on the replica's reports.
"""

from __future__ import annotations

import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from springtide.core.workload import InferenceService
from springtide.runtime.serving.server import ReplicaServer
from springtide.serving.inference_protocol import model_metadata

_LOG = logging.getLogger("springtide.replica")
# Limits for one request and for concurrent requests: probes arrive every second or two.
_TIMEOUT_S = 5.0
_MAX_AT_ONCE = 16


class HealthServer:
    """Answers health probes from construction on; `attach` makes it report ready. The constructor raises OSError.

    Live: the process answers. Ready: the model is loaded, the gateway can send requests, and no drain has begun.
    """

    def __init__(self, host: str, port: int, service: InferenceService) -> None:
        self._service = service
        self._serving: ReplicaServer | None = None
        health = self

        class Handler(_Handler):
            def respond(self, path: str) -> tuple[int, dict[str, Any]]:
                return health.answer(path)

        self._server = _Server((host, port), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="springtide-health", daemon=True).start()

    @property
    def is_ready(self) -> bool:
        serving = self._serving
        return serving is not None and not serving.is_draining

    def attach(self, server: ReplicaServer) -> None:
        """Report the state of `server` from now on; its model is loaded."""
        self._serving = server

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        """The HTTP status and JSON body for a path: 503 if not ready, 404 for an unknown path."""
        parts = path.partition("?")[0].strip("/").split("/")
        if parts == ["v2", "health", "live"]:
            return 200, {"live": True}
        is_ready = self.is_ready
        if parts == ["v2", "health", "ready"]:
            return 200 if is_ready else 503, {"ready": is_ready}
        name, version = self._service.name, str(self._service.revision)
        model = parts[2:] if parts[:2] == ["v2", "models"] else []
        if model[1:3] == ["versions", version]:
            del model[1:3]
        if model == [name, "ready"]:
            return 200 if is_ready else 503, {"name": name, "ready": is_ready}
        if model == [name]:
            return 200, model_metadata(name, version, self._schema())
        return 404, {"error": f"there is /v2/health/live, /v2/health/ready and /v2/models/{name}"}

    def _schema(self) -> Any:
        return self._serving.schema if self._serving is not None else None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._request_slots = threading.BoundedSemaphore(_MAX_AT_ONCE)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the base class's reverse name look-up, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a new thread, or close the connection if too many requests are being answered."""
        if not self._request_slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._request_slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._request_slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level only: clients that disconnect early are normal."""
        _LOG.debug("a health request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server_version = "springtide"
    sys_version = ""

    def respond(self, path: str) -> tuple[int, dict[str, Any]]:
        """The HTTP status and JSON body for a path."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer as do_GET does, without the body."""
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        status, answer = self.respond(self.path)
        body = msgspec.json.encode(answer)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing: probes would fill the log."""
