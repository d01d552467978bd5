"""The handler as a LitServe API: one worker, one API server, the ZeroMQ queue that it has for many requests."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import litserve
from fastapi import Request


class LitHandler(litserve.LitAPI):  # type: ignore[misc]
    """One request at a time."""

    def setup(self, device: str) -> None:
        """Load the handler, in the worker."""
        handlers = runpy.run_path(str(Path(__file__).with_name("handlers.py")))["HANDLERS"]
        self.handler = handlers[os.environ["BENCH_HANDLER"]]()
        self.handler.load()

    def decode_request(self, request: Request) -> list[float]:
        """The body's `values`. LitServe reads the annotation, and passes the body as JSON."""
        values: list[float] = request["values"]
        return values

    def predict(self, x: list[float]) -> Any:
        """What the handler returns."""
        return self.handler.predict(x)

    def encode_response(self, output: Any) -> Any:
        """As it is; it becomes JSON."""
        return output


if __name__ == "__main__":
    server = litserve.LitServer(LitHandler(), accelerator="cpu", fast_queue=True)
    port = int(sys.argv[1])
    server.run(host="127.0.0.1", port=port, num_api_servers=1, generate_client_file=False, log_level="warning")
