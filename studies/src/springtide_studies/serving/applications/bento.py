"""The handler as a BentoML service with one worker. `bentoml serve` runs it."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import bentoml


@bentoml.service(workers=1)
class BentoHandler:
    """POST /predict."""

    def __init__(self) -> None:
        handlers = runpy.run_path(str(Path(__file__).with_name("handlers.py")))["HANDLERS"]
        self.handler = handlers[os.environ["BENCH_HANDLER"]]()
        self.handler.load()

    @bentoml.api  # type: ignore[untyped-decorator]
    def predict(self, values: list[float]) -> float:
        """What the handler returns."""
        return float(self.handler.predict(values))
