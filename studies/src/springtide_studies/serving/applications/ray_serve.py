"""The handler as a Ray Serve deployment of one replica on a Ray of its own, without dashboard and access log."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve

_HANDLERS = str(Path(__file__).with_name("handlers.py"))
_OBJECT_STORE_BYTES = 100 << 20


class RayHandler:
    """POST /."""

    def __init__(self, handlers: str, name: str) -> None:
        self.handler = runpy.run_path(handlers)["HANDLERS"][name]()
        self.handler.load()

    async def __call__(self, request: Any) -> Any:
        """What the handler returns for the body's `values`."""
        return self.handler.predict((await request.json())["values"])


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES, _temp_dir=sys.argv[2])
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(sys.argv[1])}, logging_config={"enable_access_log": False}
    )
    deployment: Any = serve.deployment(num_replicas=1, max_ongoing_requests=128)(RayHandler)
    serve.run(deployment.bind(_HANDLERS, os.environ["BENCH_HANDLER"]))
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    ray.shutdown()
