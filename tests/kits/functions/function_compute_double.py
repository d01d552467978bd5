"""A double of Function Compute's HTTP API, at the wire: it keeps functions and answers invocations as it was told to.

It is no Function Compute: it checks that the SDK's requests are what the API's documents say, and plays its answers.
"""

from __future__ import annotations

import base64
import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PREFIX = "/2023-03-30/functions"


class FunctionComputeDouble(ThreadingHTTPServer):
    """`answers` are (status, headers, body) for the next invocations; "hang up" breaks the connection instead."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.functions: dict[str, dict] = {}
        self.answers: deque = deque()
        self.invocations: list[tuple[str, dict, bytes]] = []
        self.refusal: tuple[int, dict] | None = None
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


def tail_of(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, body: object = None, headers: dict | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "x-fc-request-id": "r-1", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refused(self) -> bool:
        if not (self.headers.get("Authorization") or "").startswith("ACS3-HMAC-SHA256 Credential=test-key"):
            self._answer(403, {"Code": "InvalidAccessKeyId", "Message": "the key is not known"})
            return True
        if self.server.refusal is not None:
            status, body = self.server.refusal
            self._answer(status, body)
            return True
        return False

    def do_POST(self) -> None:
        body = self._body()
        if self._refused():
            return
        path = self.path.split("?")[0]
        if path == PREFIX:
            given = json.loads(body)
            if given["functionName"] in self.server.functions:
                self._answer(409, {"Code": "FunctionAlreadyExists", "Message": "it exists"})
                return
            self.server.functions[given["functionName"]] = given
            self._answer(200, given)
        elif path.endswith("/invocations"):
            name = path.removeprefix(PREFIX + "/").removesuffix("/invocations")
            self.server.invocations.append((name, dict(self.headers.items()), body))
            if name not in self.server.functions:
                self._answer(404, {"Code": "FunctionNotFound", "Message": f"function {name} does not exist"})
                return
            answer = self.server.answers.popleft()
            if answer == "hang up":
                self.close_connection = True
                self.connection.close()
                return
            self._answer(answer[0], answer[2], answer[1])
        else:
            self._answer(404, {"Code": "NotFound", "Message": path})

    def do_PUT(self) -> None:
        body = self._body()
        if self._refused():
            return
        self.server.functions[self.path.removeprefix(PREFIX + "/")].update(json.loads(body))
        self._answer(200, {})

    def do_GET(self) -> None:
        if self._refused():
            return
        self._answer(200, {"functions": list(self.server.functions.values())})

    def do_DELETE(self) -> None:
        if self._refused():
            return
        self.server.functions.pop(self.path.removeprefix(PREFIX + "/"), None)
        self._answer(204, b"")
