"""One function process at a time in its box: what it is given, what it is working on, and how its work ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from springtide.backends.functions.emulator.launchers import FunctionProcess
from springtide.backends.functions.emulator.limits import CpuShare, kill_all, memory_bytes
from springtide.backends.functions.emulator.logs import TAIL_BYTES, LogIndex, OutputPipe

# Why an instance is ended; the REPORT line of its last invocation follows from it.
Ending = Literal["idle", "timeout", "out_of_memory", "killed", "init_failed", "emulator_ended"]
_MIB = 1 << 20
_NO_TRACE = "Root=1-00000000-000000000000000000000000;Parent=0000000000000000;Sampled=0"


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function as created: what CreateFunction said. `code_dir` is where its zip lies (empty: the emulator's own)."""

    name: str
    memory_mb: int
    timeout_s: float
    handler: str
    environment: dict[str, str]
    role: str = ""
    image_uri: str = ""
    code_dir: str = ""
    code_sha256: str = ""
    modified_at: str = ""
    revision: str = ""

    @property
    def group(self) -> str:
        return f"/aws/lambda/{self.name}"


class InvocationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What an invocation came to. `function_error` is as in X-Amz-Function-Error; `log` is the tail."""

    payload: bytes
    function_error: str = ""
    log: bytes = b""


class EmulatedInvocation:
    """One run: its request, and the answer once there is one. `how` is what ended it, for the REPORT line."""

    def __init__(self, function: Function, payload: bytes, invocation_id: str = "") -> None:
        self.id = invocation_id or str(uuid.uuid4())
        self.function = function
        self.payload = payload
        self.answered: asyncio.Future[tuple[str, bytes]] = asyncio.get_running_loop().create_future()
        self.lines: deque[str] = deque()
        self.begun_at_s: float | None = None

    def answer(self, function_error: str, payload: bytes) -> None:
        """Set the invocation's answer, the function's or the emulator's; only the first one counts."""
        if not self.answered.done():
            self.answered.set_result((function_error, payload))

    def fail(self, kind: str, message: str) -> None:
        """The runtime did not answer: say so as Lambda does."""
        text = f"RequestId: {self.id} Error: {message}"
        self.answer("Unhandled", json.dumps({"errorType": kind, "errorMessage": text}).encode())

    def note(self, line: str) -> None:
        self.lines.append(line)
        while sum(len(one) + 1 for one in self.lines) > 4 * TAIL_BYTES:
            self.lines.popleft()

    def tail(self) -> bytes:
        """The last 4 KB of what it wrote."""
        return "\n".join([*self.lines, ""]).encode()[-TAIL_BYTES:]


class Instance:
    """A function process and what holds it. It is one invocation's at a time, and warm in between."""

    def __init__(
        self,
        function: Function,
        directory: Path,
        share: CpuShare,
        vcpus: float,
        logs: LogIndex,
        identity: str,
    ) -> None:
        self.id = identity
        self.function = function
        self.directory = directory
        self.share = share
        self.vcpus = vcpus
        self.process: FunctionProcess | None = None
        self.current: EmulatedInvocation | None = None
        self.created_at_s = time.monotonic()
        self.idle_since_s = self.created_at_s
        self.init_s = 0.0
        self.is_init_charged = False
        self.peak_bytes = 0
        self.ending: Ending | Literal[""] = ""
        self.is_warm: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._orders: asyncio.Queue[EmulatedInvocation | None] = asyncio.Queue()
        self._log_index = logs
        self.pipe = OutputPipe(self._on_line)
        (directory / "tmp").mkdir(parents=True)

    @property
    def is_alive(self) -> bool:
        return not self.ending and (self.process is None or not self.process.exited.done())

    @property
    def is_idle(self) -> bool:
        return self.is_alive and self.current is None and self.is_warm.done() and not self.is_warm.cancelled()

    def say(self, line: str) -> None:
        """Write a line of the emulator into its log."""
        self._on_line(line)

    def give(self, invocation: EmulatedInvocation, cpu_factor: float) -> None:
        self.current = invocation
        self.share.set_vcpus(self.vcpus * cpu_factor)
        invocation.begun_at_s = time.monotonic()
        self.say(f"START RequestId: {invocation.id} Version: $LATEST")
        self._orders.put_nowait(invocation)

    async def next_order(self) -> tuple[EmulatedInvocation, dict[str, str]] | None:
        """What the Runtime API's `next` answers, once there is something: the invocation and its headers.

        None when the instance ends instead.
        """
        if not self.is_warm.done():
            self.init_s = time.monotonic() - self.created_at_s
            self.is_warm.set_result(None)
        invocation = await self._orders.get()
        if invocation is None:
            return None
        assert invocation.begun_at_s is not None
        left_s = invocation.begun_at_s + self.function.timeout_s - time.monotonic()
        # awslambdaric's client hangs without a content type and a trace id.
        return invocation, {
            "Content-Type": "application/json",
            "Lambda-Runtime-Aws-Request-Id": invocation.id,
            # Cut, not rounded: the handler must not see more time than the function has.
            "Lambda-Runtime-Deadline-Ms": str(int((time.time() + left_s) * 1000)),
            "Lambda-Runtime-Invoked-Function-Arn": f"arn:aws:lambda:::function:{self.function.name}",
            "Lambda-Runtime-Trace-Id": _NO_TRACE,
        }

    def measure(self) -> int:
        """The memory that its processes hold now, in bytes."""
        if self.process is None:
            return 0
        held = memory_bytes(self.share.pids(self.process.pid))
        self.peak_bytes = max(self.peak_bytes, held)
        return held

    def report(self, invocation: EmulatedInvocation, status: str) -> None:
        """Write the REPORT line with the charged duration: since August 2025 including a cold start's init."""
        assert invocation.begun_at_s is not None
        took_s = min(time.monotonic() - invocation.begun_at_s, self.function.timeout_s)
        init_s = 0.0 if self.is_init_charged else self.init_s
        self.is_init_charged = True
        fields = [
            f"REPORT RequestId: {invocation.id}",
            f"Duration: {took_s * 1000:.2f} ms",
            f"Billed Duration: {math.ceil((took_s + init_s) * 1000)} ms",
            f"Memory Size: {self.function.memory_mb} MB",
            f"Max Memory Used: {min(math.ceil(self.peak_bytes / _MIB), self.function.memory_mb)} MB",
        ]
        if init_s:
            fields.append(f"Init Duration: {init_s * 1000:.2f} ms")
        self.say(f"END RequestId: {invocation.id}")
        self.say("\t".join([*fields, status] if status else fields))

    def release(self) -> None:
        """Its invocation is done: it waits for the next, warm and unthrottled."""
        self.pipe.drain()
        self.current = None
        self.idle_since_s = time.monotonic()

    def end(self, ending: Ending) -> None:
        """Kill it; of several reasons the first counts."""
        if not self.ending:
            self.ending = ending
        if self.process is not None and not self.process.exited.done():
            # List them before the leader dies: its children have another parent afterwards.
            members = self.share.pids(self.process.pid)
            self.process.kill()
            kill_all(members)
        self._orders.put_nowait(None)

    def clear(self, forget: Callable[[Instance], None]) -> None:
        """Its process is gone or killed: remove its directory; `forget` removes its limits."""
        self.pipe.drain()
        self.pipe.close()
        if not self.is_warm.done():
            self.is_warm.cancel()
        self._orders.put_nowait(None)
        with contextlib.suppress(OSError):
            shutil.rmtree(self.directory)
        forget(self)

    def _on_line(self, line: str) -> None:
        self._log_index.add(self.function.group, self.id, line)
        if self.current is not None:
            self.current.note(line)
