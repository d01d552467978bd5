"""A program that listens on a port, as a service: it could be written in any language.

springtide deploy examples/serve_process.py

The second half of this file stands for your program. Without a file of ours it would be deployed in its folder by

springtide deploy --command "python serve_process.py {port}" --ready /health --name lines
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import springtide as st


@st.process(name="lines", ready="/health", scale=(0, 2))
def lines(port: int) -> list[str]:
    """Counts the lines of what is posted to any path below /f/lines/."""
    return ["python", __file__, str(port)]


class Lines(BaseHTTPRequestHandler):
    """Answers 200 to any path, and to a POST with the number of lines."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Count the lines of the body."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(f"{self.path} {len(body.splitlines())}\n".encode())

    def do_GET(self) -> None:
        """Say that this program is ready."""
        self.answer(b"ready\n")

    def answer(self, body: bytes) -> None:
        """Send the body with a length, so that the connection is kept."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Lines).serve_forever()
