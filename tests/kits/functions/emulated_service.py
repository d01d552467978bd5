"""An emulator on its own directory with the echo handler, and a provider that waits for the end of an invocation."""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from springtide.backends.functions.emulator.config import EmulatorConfig
from springtide.backends.functions.emulator.launch import EmulatorAddress, ensure_emulator, stop_emulator
from springtide.backends.functions.provider import FunctionProvider, InvocationEnd
from springtide.backends.functions.providers.aws import LambdaProvider, emulator_provider
from springtide.core.functions import FunctionService
from springtide.perf.functions import services as function_services

HERE = Path(__file__).parent
ECHO = "echo_function.handler"
LIMIT_S = 60.0


def small_service(**changes: Any) -> FunctionService:
    """Two sizes, short lives."""
    given = {"memory_mb": (128, 1769), "lifetime_s": 20, "cold_start_s": 0.0, "concurrency": 3, **changes}
    return function_services.emulator(**given)


class Caller:
    """Invokes and waits."""

    def __init__(self, provider: FunctionProvider) -> None:
        self.provider = provider

    def start(self, payload: object, memory_mb: int = 1769) -> queue.Queue[InvocationEnd]:
        ends: queue.Queue[InvocationEnd] = queue.Queue()
        self.provider.invoke(memory_mb, json.dumps(payload).encode(), ends.put)
        return ends

    def call(self, payload: object, memory_mb: int = 1769) -> InvocationEnd:
        return self.start(payload, memory_mb).get(timeout=LIMIT_S)

    def result(self, payload: object, memory_mb: int = 1769) -> Any:
        end = self.call(payload, memory_mb)
        assert end.outcome == "returned", end
        return json.loads(end.payload)


@contextlib.contextmanager
def running_emulator(state_dir: Path, **changes: Any) -> Iterator[tuple[EmulatorAddress, LambdaProvider]]:
    """An emulator whose functions run the echo handler, deployed in all sizes."""
    service = changes.pop("service", small_service())
    given = {"handler": ECHO, "python_path": (str(HERE),), "cpu_fraction": 8.0, **changes}
    address = ensure_emulator(state_dir, EmulatorConfig(service=service, **given))
    provider = emulator_provider(address, service, handler=ECHO)
    try:
        provider.deploy([size.memory_mb for size in service.sizes])
        yield address, provider
    finally:
        provider.close()
        stop_emulator(state_dir)
