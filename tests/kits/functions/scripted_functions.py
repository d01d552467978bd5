"""A provider whose functions are threads: they walk the steps of a job over a real store, and do as they are told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import numpy as np

from springtide.backends.functions.provider import InvocationEnd, LogLine, OnEnd
from springtide.core.errors import ObjectMissing
from springtide.core.functions import FunctionPrices, FunctionService, MemorySize, Usage
from springtide.core.ports import Store
from springtide.core.wire.functions import (
    ControlRecord,
    FunctionOrder,
    FunctionReport,
    FunctionResult,
    Keys,
    LaneTimes,
    Place,
    StageState,
)
from springtide.storage.frames import encode, tensor_of
from springtide.storage.stores.open import open_store

SERVICE = FunctionService(
    name="scripted",
    sizes=tuple(MemorySize(memory_mb=mb, vcpus=1.0, bytes_per_s=1e9) for mb in (512, 1024)),
    prices=FunctionPrices(usd_per_gb_s=0.0000166667, usd_per_put=5e-6, usd_per_get=4e-7),
    cold_start_s=0.1,
)


class ScriptedFunctions:
    """Every function makes `total_steps` steps of `step_s`, in step with the others of its attempt.

    `errors` are raised at a step by stage, `kills` end the n-th invocation without a word at a step. After the step
    `waits_at` all wait until they `may_go`.
    """

    def __init__(self, total_steps: int = 10, step_s: float = 0.03) -> None:
        self.total_steps = total_steps
        self.step_s = step_s
        self.kills: dict[int, int] = {}
        self.errors: dict[int, str] = {}
        self.refusal = ""
        self.waits_at: int | None = None
        self.may_go = threading.Event()
        self.deployed: list[int] = []
        self.num_invocations = 0
        self.threads: list[threading.Thread] = []
        self.service = SERVICE
        self._is_closed = False

    def deploy(self, memory_mb: Collection[int], environment: Mapping[str, str] | None = None) -> None:
        self.deployed += memory_mb

    def invoke(self, memory_mb: int, payload: bytes, on_end: OnEnd) -> str:
        self.num_invocations += 1
        number = self.num_invocations
        order = msgspec.json.decode(payload, type=FunctionOrder)
        run = threading.Thread(target=self._run, args=(order, number, on_end), daemon=True)
        self.threads.append(run)
        run.start()
        return str(number)

    def tail(self, since_s: float, limit: int = 1000) -> Sequence[LogLine]:
        return ()

    def remove(self) -> None:
        pass

    def close(self) -> None:
        self._is_closed = True
        for thread in self.threads:
            thread.join(5.0)

    def _run(self, order: FunctionOrder, number: int, on_end: OnEnd) -> None:
        began_s = time.monotonic()
        store = open_store(order.store_url)

        def end(outcome: str, **fields: object) -> None:
            lasted_s = time.monotonic() - began_s
            on_end(
                InvocationEnd(
                    invocation_id=str(number), outcome=outcome, duration_s=lasted_s, log="a line of its own\n", **fields
                )  # type: ignore[arg-type]
            )

        if self.refusal:
            end("refused", error=self.refusal)
            return
        result = _Function(self, store, order, number).run(lambda: self._is_closed)
        if result is None:
            end("killed", error="it was killed")
        else:
            end("returned", payload=msgspec.json.encode(result))


class _Function:
    """One invocation on its thread."""

    def __init__(self, world: ScriptedFunctions, store: Store, order: FunctionOrder, number: int) -> None:
        self.world, self.store, self.order, self.number = world, store, order, number
        self.keys = Keys(order.prefix)
        self.place = Place(order.stage, order.replica)
        self.attempt = -1
        self.step = 0
        self.saved: int | None = None

    def control(self) -> ControlRecord:
        return msgspec.json.decode(self.store.get(self.keys.control), type=ControlRecord)

    def run(self, is_closed: Callable[[], bool]) -> FunctionResult | None:
        self.report("starting")
        self.report("warm")
        while not is_closed():
            record = self.control()
            if record.verb == "stop":
                return self.result("stopped")
            if record.generation > self.order.generation or record.incarnations[str(self.place)] != (
                self.order.incarnation
            ):
                return self.result("superseded")
            if record.attempt != self.attempt:
                self.attempt, self.step = record.attempt, record.restore_step
                self.report("training")
            if self.step >= self.world.total_steps:
                return self.result("finished")
            if record.last_step is not None and self.step >= record.last_step:
                return self.result("stopped")
            if self.world.kills.get(self.number) == self.step:
                return None
            error = self.world.errors.get(self.order.stage)
            if error and self.step == 3:
                return self.result("failed", error)
            if self.step == self.world.waits_at and not self.world.may_go.wait(self.world.step_s):
                continue
            time.sleep(self.world.step_s)
            self.make_step(record)
        return None

    def make_step(self, record: ControlRecord) -> None:
        """A mark for each place; whoever finds all of them has made the step."""
        prefix = self.keys.wire(record.generation, record.attempt, self.step)
        self.store.put(f"{prefix}/{self.place}", b"1")
        places = [Place(s, r) for s in range(len(record.plan.stages)) for r in range(record.plan.num_replicas)]
        for place in places:
            try:
                self.store.wait(f"{prefix}/{place}", 0.2)
            except ObjectMissing:
                return
        self.step += 1
        if self.step % record.save_every == 0 or self.step == self.world.total_steps or self.step == record.last_step:
            self.save(record)
        self.report("training")

    def save(self, record: ControlRecord) -> None:
        stage = record.plan.stages[self.order.stage]
        values = np.full(3, float(self.step), dtype=np.float32)
        data = encode({f"model/layer{self.order.stage}.weight": tensor_of(values), "optimizer/x": tensor_of(values)})
        self.store.put(self.keys.state(self.step, self.order.stage), data)
        meta = StageState(
            stage=self.order.stage,
            step=self.step,
            num_seen=8 * self.step,
            key=self.keys.state(self.step, self.order.stage),
            num_bytes=len(data),
            sha256="",
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
        )
        self.store.put(self.keys.state_meta(self.step, self.order.stage), msgspec.json.encode(meta))
        self.saved = self.step

    def report(self, phase: str, error: str = "") -> None:
        report = FunctionReport(
            stage=self.order.stage,
            replica=self.order.replica,
            incarnation=self.order.incarnation,
            generation=self.order.generation,
            attempt=max(self.attempt, self.order.attempt),
            phase=phase,  # type: ignore[arg-type]
            step=self.step,
            total_steps=self.world.total_steps,
            global_batch_size=8,
            saved_step=self.saved,
            losses=tuple((step, 1.0 / step, 4) for step in range(1, self.step + 1)),
            lanes=LaneTimes(step_s=self.world.step_s),
            usage=Usage(num_puts=3, num_gets=5),
            error=error,
            error_code="user_code" if error else "",
        )
        self.store.put(self.keys.report(self.place, self.order.incarnation), msgspec.json.encode(report))

    def result(self, outcome: str, error: str = "") -> FunctionResult:
        if outcome != "superseded":
            self.report(outcome, error)
        return FunctionResult(
            stage=self.order.stage,
            replica=self.order.replica,
            incarnation=self.order.incarnation,
            outcome=outcome,  # type: ignore[arg-type]
            step=self.step,
            error=error,
            error_code="user_code" if error else "",
            usage=Usage(num_puts=3, num_gets=5),
        )
