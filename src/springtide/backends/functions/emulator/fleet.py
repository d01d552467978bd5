"""All functions and their instances: assigns invocations, ends instances, and injects faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec

from springtide.backends.functions.emulator.boxes import Boxes
from springtide.backends.functions.emulator.config import EmulatorConfig, EmulatorFaults, Fate, fate_of
from springtide.backends.functions.emulator.instances import (
    EmulatedInvocation,
    Ending,
    Function,
    Instance,
    InvocationResult,
)
from springtide.core.errors import BackendError

_TICK_S = 0.02
_TICKS_A_MEASUREMENT = 8
_MIB = 1 << 20


class Throttled(Exception):
    """No room for another invocation now: 429."""


class Lost(Exception):
    """No answer will be sent: the connection breaks."""


class Counts(msgspec.Struct, kw_only=True):
    """Counters of what has happened so far."""

    num_invocations: int = 0
    num_throttled: int = 0
    num_lost: int = 0
    num_late: int = 0
    num_killed: int = 0
    num_slowed: int = 0
    num_cold_starts: int = 0
    num_timed_out: int = 0
    num_out_of_memory: int = 0


class Injection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault to inject into the next `num_times` invocations."""

    fault: Literal["lost", "answer-lost", "late", "throttled", "kill", "slow"]
    num_times: int = 1
    seconds: float = 0.0
    factor: float = 0.25


class Fleet:
    """The functions of one account. `addresses` are the Runtime API's by port, one for each possible instance."""

    def __init__(self, config: EmulatorConfig, boxes: Boxes, addresses: dict[int, str]) -> None:
        self.config = config
        self.boxes = boxes
        self.functions: dict[str, Function] = {}
        self.instances: dict[int, Instance] = {}
        self.counts = Counts()
        self.faults = config.faults
        self.num_running = 0
        self.used_at_s = time.monotonic()
        self._addresses = addresses
        self._free = sorted(addresses, reverse=True)
        self._injected: list[Fate] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._keep(self._watch())
        self._keep(self._warm_up())

    async def invoke(self, function: Function, payload: bytes, invocation_id: str) -> InvocationResult:
        """Run the function once. Raises Throttled, Lost."""
        self.used_at_s = time.monotonic()
        number = self.counts.num_invocations
        self.counts.num_invocations += 1
        fate = self._injected.pop(0) if self._injected else fate_of(self.faults, number)
        if fate.is_throttled or self.num_running >= self.config.service.concurrency:
            self.counts.num_throttled += 1
            raise Throttled
        if fate.is_lost:
            self.counts.num_lost += 1
            await asyncio.sleep(function.timeout_s)
            raise Lost
        self.num_running += 1
        try:
            if fate.late_s:
                self.counts.num_late += 1
                await asyncio.sleep(fate.late_s)
            answer = await self._run(EmulatedInvocation(function, payload, invocation_id), fate)
        finally:
            self.num_running -= 1
            self.used_at_s = time.monotonic()
        if fate.is_answer_lost:
            self.counts.num_lost += 1
            raise Lost
        return answer

    def invoke_later(self, function: Function, payload: bytes, invocation_id: str) -> None:
        """Run the function once without a waiting caller (and without Lambda's two retries)."""

        async def run() -> None:
            with contextlib.suppress(Throttled, Lost):
                await self.invoke(function, payload, invocation_id)

        self._keep(run())

    def inject(self, injection: Injection) -> None:
        """Inject a fault into the next invocations, instead of a random one."""
        fate = {
            "lost": Fate(is_lost=True),
            "answer-lost": Fate(is_answer_lost=True),
            "late": Fate(late_s=injection.seconds),
            "throttled": Fate(is_throttled=True),
            "kill": Fate(kill_after_s=injection.seconds),
            "slow": Fate(cpu_factor=min(1.0, max(0.01, injection.factor))),
        }[injection.fault]
        self._injected += [fate] * injection.num_times

    def set_faults(self, faults: EmulatorFaults) -> None:
        self.faults = faults

    def kill(self, instance_id: str) -> bool:
        """Kill an instance now; returns whether there was one."""
        for instance in self.instances.values():
            if instance.id == instance_id and instance.is_alive:
                self.counts.num_killed += 1
                instance.end("killed")
                return True
        return False

    def retire(self, name: str) -> None:
        """A function was changed or deleted: end its idle instances. Busy ones end after their invocation."""
        for instance in list(self.instances.values()):
            if instance.function.name == name and instance.is_idle:
                instance.end("idle")

    def end_all(self) -> None:
        """Kill every instance; waiting callers get the reason."""
        for instance in list(self.instances.values()):
            instance.end("emulator_ended")

    async def close(self) -> None:
        """End everything, and wait for that."""
        self.end_all()
        for task in self._tasks:
            task.cancel()
        exits = [instance.process.exited for instance in self.instances.values() if instance.process is not None]
        if exits:
            await asyncio.wait(exits, timeout=5.0)
        for port, instance in list(self.instances.items()):
            self._clear(port, instance)
        await self.boxes.close()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, invocation: EmulatedInvocation, fate: Fate) -> InvocationResult:
        """Find or start an instance, run the invocation, and enforce its time limit."""
        instance = await self._acquire(invocation)
        if instance is None:
            function_error, payload = await invocation.answered
            return InvocationResult(payload=payload, function_error=function_error, log=invocation.tail())
        assert instance.process is not None
        if fate.cpu_factor < 1:
            self.counts.num_slowed += 1
        instance.give(invocation, fate.cpu_factor)
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(invocation.function.timeout_s, self._time_out, instance, invocation)]
        if fate.kill_after_s is not None:
            timers.append(loop.call_later(fate.kill_after_s, self._kill_for_chance, instance, invocation))
        ends: list[asyncio.Future[Any]] = [invocation.answered, instance.process.exited]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for timer in timers:
            timer.cancel()
        instance.pipe.drain()
        if not invocation.answered.done():
            self._explain_exit(instance, invocation, instance.process.exited.result())
        instance.measure()
        function_error, payload = await invocation.answered
        instance.report(invocation, _status_of(instance.ending, function_error))
        answer = InvocationResult(payload=payload, function_error=function_error, log=invocation.tail())
        instance.release()
        if self.functions.get(instance.function.name) is not instance.function:
            instance.end("idle")
        return answer

    def _time_out(self, instance: Instance, invocation: EmulatedInvocation) -> None:
        if instance.current is invocation and not invocation.answered.done():
            self.counts.num_timed_out += 1
            limit_s = invocation.function.timeout_s
            invocation.fail("Sandbox.Timedout", f"Task timed out after {limit_s:.2f} seconds")
            instance.end("timeout")

    def _kill_for_chance(self, instance: Instance, invocation: EmulatedInvocation) -> None:
        if instance.current is invocation and not invocation.answered.done():
            self.counts.num_killed += 1
            instance.end("killed")

    def _explain_exit(self, instance: Instance, invocation: EmulatedInvocation, code: int) -> None:
        """Report an exit in Lambda's words; running out of memory shows only in the REPORT line."""
        if instance.ending == "out_of_memory" or code < 0:
            invocation.fail("Runtime.ExitError", "Runtime exited with error: signal: killed")
        elif code == 0:
            invocation.fail("Runtime.ExitError", "Runtime exited without providing a reason")
        else:
            invocation.fail("Runtime.ExitError", f"Runtime exited with error: exit status {code}")

    async def _acquire(self, invocation: EmulatedInvocation) -> Instance | None:
        """A warm instance, or a new one once it is warm; None (and an answer) if its start fails."""
        function = invocation.function
        idle = [one for one in self.instances.values() if one.is_idle and one.function is function]
        if idle:
            instance = max(idle, key=lambda one: one.idle_since_s)
            # Reserve it at once: there must be no await between the search and this.
            instance.current = invocation
            return instance
        if not self._free:
            self._evict()
        if not self._free:
            self.counts.num_throttled += 1
            raise Throttled
        port = self._free.pop()
        try:
            instance = self.boxes.box(function)
        except BackendError:
            self._free.append(port)
            raise
        self.instances[port] = instance
        instance.current = invocation
        self.counts.num_cold_starts += 1
        try:
            await self.boxes.start(instance, self._addresses[port])
        except BackendError as error:
            invocation.fail("Runtime.InitError", str(error))
            self._clear(port, instance)
            return None
        assert instance.process is not None
        instance.process.exited.add_done_callback(lambda _: self._clear_later(port, instance))
        return await self._warmed(instance, invocation)

    async def _warmed(self, instance: Instance, invocation: EmulatedInvocation) -> Instance | None:
        assert instance.process is not None
        ends: list[asyncio.Future[Any]] = [instance.is_warm, instance.process.exited]
        done, _ = await asyncio.wait(ends, timeout=self.config.init_limit_s, return_when=asyncio.FIRST_COMPLETED)
        if instance.is_warm in done and not instance.process.exited.done():
            missing_s = self.config.service.cold_start_s - (time.monotonic() - instance.created_at_s)
            if missing_s > 0:
                await asyncio.sleep(missing_s)
            if instance.is_alive:
                return instance
        instance.pipe.drain()
        invocation.begun_at_s = time.monotonic()
        instance.init_s = time.monotonic() - instance.created_at_s
        if not invocation.answered.done():
            if not instance.process.exited.done():
                limit_s = self.config.init_limit_s
                invocation.fail("Sandbox.Timedout", f"Init timed out after {limit_s:.2f} seconds")
            else:
                self._explain_exit(instance, invocation, instance.process.exited.result())
        instance.report(invocation, "Status: error\tError Type: Runtime.InitError")
        instance.end("init_failed")
        return None

    def fail_init(self, port: int, payload: bytes) -> None:
        """An instance reported to the Runtime API that its code cannot be imported: its caller gets that error."""
        instance = self.instances.get(port)
        if instance is not None and instance.current is not None:
            instance.current.answer("Unhandled", payload)

    def _evict(self) -> None:
        """Make room: end the instance that has been idle for longest."""
        idle = [(port, one) for port, one in self.instances.items() if one.is_idle]
        if idle:
            port, instance = min(idle, key=lambda pair: pair[1].idle_since_s)
            instance.end("idle")
            self._clear(port, instance)

    def _clear_later(self, port: int, instance: Instance) -> None:
        # Let the task that waits for its exit read the end of its output first.
        asyncio.get_running_loop().call_later(0.2, self._clear, port, instance)

    def _clear(self, port: int, instance: Instance) -> None:
        if self.instances.get(port) is instance:
            del self.instances[port]
            self._free.append(port)
            instance.clear(self.boxes.forget)

    async def _warm_up(self) -> None:
        # The first function that needs the template reports the error.
        with contextlib.suppress(BackendError):
            await self.boxes.warm_up()

    async def _watch(self) -> None:
        """Enforce CPU shares and memory limits, and end instances that have been idle for too long."""
        # Only stopping and continuing processes needs short ticks.
        needs_ticks = self.boxes.cpu_method == "duty-cycle"
        tick_s = _TICK_S if needs_ticks else _TICK_S * _TICKS_A_MEASUREMENT
        count = 0
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            now_s = time.monotonic()
            for instance in list(self.instances.values()):
                instance.share.tick(now_s - before_s)
                if (not needs_ticks or count % _TICKS_A_MEASUREMENT == 0) and instance.is_alive:
                    self._check(instance, now_s)
            before_s = now_s
            count += 1
            self.boxes.clear_up()

    def _check(self, instance: Instance, now_s: float) -> None:
        if instance.is_idle:
            if now_s - instance.idle_since_s > self.config.idle_s:
                instance.end("idle")
        elif instance.measure() > instance.function.memory_mb * _MIB:
            self.counts.num_out_of_memory += 1
            instance.end("out_of_memory")


def _status_of(ending: Ending | Literal[""], function_error: str) -> str:
    if ending == "out_of_memory":
        return "Status: error\tError Type: Runtime.OutOfMemory"
    if ending == "timeout":
        return "Status: timeout"
    return "Status: error\tError Type: Runtime.ExitError" if ending and function_error else ""


def summary(fleet: Fleet, clock_s: Callable[[], float] = time.monotonic) -> bytes:
    """The admin's status as JSON: counts, and the invocation of each instance."""
    now_s = clock_s()
    instances = [
        {
            "id": one.id,
            "function": one.function.name,
            "pid": one.process.pid if one.process else None,
            "is_idle": one.is_idle,
            "invocation": one.current.id if one.current else None,
            "age_s": round(now_s - one.created_at_s, 3),
            "memory_bytes": one.peak_bytes,
            "vcpus": one.vcpus,
        }
        for one in fleet.instances.values()
    ]
    counts = msgspec.to_builtins(fleet.counts)
    status = {"cpu_method": fleet.boxes.cpu_method, "num_running": fleet.num_running, "counts": counts}
    return json.dumps({**status, "faults": msgspec.to_builtins(fleet.faults), "instances": instances}).encode()
