"""The HTTP server in a custom container of Alibaba Function Compute: POST /invoke runs the handler, as on Lambda.

Run as `python -m springtide.backends.functions.container_server`; the function's environment names the handler and
the lifetime of an invocation. It imports only the standard library, so that a container starts fast.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PORT = 9000
_MAX_BODY_BYTES = 6 * 1024 * 1024
_DEFAULT_HANDLER = "springtide.runtime.function_handler.handler"
# The role's credentials arrive with each request; the clients of object stores read these variables.
_CREDENTIALS = (
    ("x-fc-access-key-id", "AWS_ACCESS_KEY_ID"),
    ("x-fc-access-key-secret", "AWS_SECRET_ACCESS_KEY"),
    ("x-fc-security-token", "AWS_SESSION_TOKEN"),
)


class Context:
    """The handler's second argument: what Lambda offers there, as far as this service provides it."""

    def __init__(self, request_id: str, lifetime_s: float, memory_mb: str, function_name: str) -> None:
        self.aws_request_id = request_id
        self.memory_limit_in_mb = memory_mb
        self.function_name = function_name
        self._ends_at_s = time.monotonic() + lifetime_s

    def get_remaining_time_in_millis(self) -> int:
        """Milliseconds until the service ends the invocation; never below 0."""
        return max(0, int((self._ends_at_s - time.monotonic()) * 1000))


class ContainerServer(ThreadingHTTPServer):
    """Serves one invocation at a time, which is the concurrency that the function is configured with; others wait."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: Callable[[Any, Any], Any], lifetime_s: float) -> None:
        super().__init__(address, _InvokeRequest)
        self.handler = handler
        self.lifetime_s = lifetime_s
        self.turn = threading.Lock()

    def run(self, body: bytes, headers: Mapping[str, str]) -> tuple[bool, bytes]:
        """Call the handler; returns whether it returned, and its answer or its error as JSON."""
        for name, variable in _CREDENTIALS:
            if headers.get(name):
                os.environ[variable] = headers[name]
        request_id = headers.get("x-fc-request-id", "")
        memory_mb = headers.get("x-fc-function-memory", "")
        context = Context(request_id, self.lifetime_s, memory_mb, headers.get("x-fc-function-name", ""))
        _log(f"FC Invoke Start RequestId: {request_id}")
        try:
            return True, json.dumps(self.handler(json.loads(body or b"null"), context)).encode()
        except Exception as error:
            traceback.print_exc()
            return False, json.dumps({"errorType": type(error).__name__, "errorMessage": str(error)}).encode()
        finally:
            _log(f"FC Invoke End RequestId: {request_id}")


class _InvokeRequest(BaseHTTPRequestHandler):
    server: ContainerServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """The service calls /invoke and /initialize."""
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > _MAX_BODY_BYTES:
            self.close_connection = True
            self._answer(413, False, b'{"errorType":"TooLarge","errorMessage":"the request is too large"}')
            return
        body = self.rfile.read(int(length))
        if self.path == "/initialize":
            self._answer(200, True, b"")
        elif self.path == "/invoke":
            with self.server.turn:
                has_returned, answer = self.server.run(
                    body, {name.lower(): value for name, value in self.headers.items()}
                )
            self._answer(200 if has_returned else 404, has_returned, answer)
        else:
            self._answer(404, False, b'{"errorType":"NotFound","errorMessage":"there is /invoke"}')

    def do_GET(self) -> None:
        """Health checks."""
        self._answer(200, True, b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: the log is for the handler's output."""

    def _answer(self, status: int, is_good: bool, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-fc-status", "200" if is_good else "404")
        self.end_headers()
        self.wfile.write(body)


def load_handler(name: str) -> Callable[[Any, Any], Any]:
    """The function of that dotted name. Raises ImportError, AttributeError."""
    module, _, function = name.rpartition(".")
    found = getattr(importlib.import_module(module), function)
    assert callable(found), f"{name} is not a function"
    return found  # type: ignore[no-any-return]


def main() -> int:
    """Serve until the container is ended."""
    handler = load_handler(os.environ.get("SPRINGTIDE_HANDLER", _DEFAULT_HANDLER))
    lifetime_s = float(os.environ.get("SPRINGTIDE_LIFETIME_S", "600"))
    # All addresses: the service reaches the container from outside, and nothing else can.
    ContainerServer(("0.0.0.0", _PORT), handler, lifetime_s).serve_forever()
    return 0


def _log(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
