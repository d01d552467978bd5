"""A world of functions in events: cold starts, steps, hand-overs and every fault there is, on a clock of its own.

Functions behave as core.function_wire says they should, and the world asserts what must never happen: two who may
write at one place in one attempt, a state to restore that is not complete, a step that is made twice in one attempt.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from kits.functions.world_functions import Functions
from kits.functions.world_parts import BATCH, PRICES, Faults, Function, plan_of, service_of, whole_plan
from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.coordinator.coordinator import Coordinator
from springtide.backends.functions.coordinator.function_pool import JobFacts, StreamRules
from springtide.core import events
from springtide.core.function_search import StreamView
from springtide.core.functions import (
    FunctionPlan,
    FunctionService,
    Usage,
)
from springtide.core.wire.functions import (
    ControlRecord,
    ErrorCode,
    FunctionReport,
    Keys,
    Place,
)
from springtide.core.workload import ReplicaId, WorkloadId

__all__ = ["BATCH", "PRICES", "Faults", "Function", "World", "plan_of", "service_of", "whole_plan"]


class World(Functions):
    """Plays one job. `tell` hands a stimulus to the present coordinator and carries out what it orders."""

    def __init__(
        self,
        seed: int = 0,
        *,
        plan: FunctionPlan | None = None,
        total_steps: int = 20,
        step_s: float = 2.0,
        faults: Faults | None = None,
        service: FunctionService | None = None,
        budget_usd: float | None = None,
        stream_rules: StreamRules | None = None,
        has_parameter_store: bool = False,
    ) -> None:
        self.stream = StreamView(name="clicks", num_samples=0) if stream_rules is not None else None
        self.stream_rules = stream_rules or StreamRules()
        self.has_parameter_store = has_parameter_store
        self.store_number = 0
        self.user_error = "ValueError: the loss is not finite"
        self.user_error_code: ErrorCode = "user_code"
        self.is_store_up = False
        self.store_up_s = 0.0
        self.random = random.Random(seed)
        self.plan = plan or plan_of()
        self.total_steps = total_steps
        self.step_s = step_s
        self.faults = faults or Faults()
        self.service = service or service_of()
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.control: ControlRecord | None = None
        self.reports: dict[tuple[Place, int], FunctionReport] = {}
        self.left: dict[tuple[Place, int], tuple[int, int, list[tuple[int, float, int]]]] = {}
        self.states: dict[str, tuple[list[int], tuple[int, int]]] = {}
        self.contributions: set[tuple[tuple[int, int], int, Place]] = set()
        self.stops: dict[tuple[int, int], int] = {}
        self.commits: set[tuple[tuple[int, int], Place, int]] = set()
        self.functions: list[Function] = []
        self.events: list[events.Event] = []
        self.losses: list[tuple[int, float, int]] = []
        self.num_samples: dict[int, set[int]] = {}
        self.model: list[int] | None = None
        self.is_over = False
        self.budget_usd = budget_usd
        self.keys = Keys("jobs/j")
        self.billed_gb_s = 0.0
        self.num_puts = 0
        self.generation = 0
        self.num_coordinators = 0
        self.restarts_left = 3
        self.base = Usage()
        self.new_coordinator()

    # --- the clock ------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.queue, (self.now_s + delay_s, self.number, call))

    def run(self, until_s: float = 20_000.0, *, until: Callable[[], bool] = lambda: False) -> None:
        while self.queue and not self.is_over and not until():
            due_s, _, call = self.queue[0]
            if due_s > until_s:
                break
            heapq.heappop(self.queue)
            self.now_s = due_s
            call()

    # --- the coordinator and those around it ----------------------------------------------------------------------

    def new_coordinator(self) -> None:
        used = max((function.order.incarnation for function in self.functions), default=0)
        last: list[tuple[int, float, int]] = []
        if self.num_coordinators:
            self.base = self.coordinator.run.ledger.usage(self.now_s)
            # What is on the platform's disk by then, of which the next one reads the end.
            self.losses += self.coordinator.run.progress.losses[len(self.losses[-1:]) :]
            last = self.losses[-1:]
        self.num_coordinators += 1
        self.facts = JobFacts(
            job_id=WorkloadId("j"),
            replica_id=ReplicaId(f"j.{self.num_coordinators}"),
            prefix=self.keys.prefix,
            store_url="memory://test",
            service=self.service,
            budget_usd=self.budget_usd,
            used_incarnations=used,
            has_parameter_store=self.has_parameter_store,
            stream="clicks" if self.stream is not None else "",
            global_batch_size=BATCH,
            stream_rules=self.stream_rules,
        )
        self.coordinator = Coordinator(self.facts, self.now_s, self.base)
        self.coordinator.run.progress.losses += last
        if self.num_coordinators == 1:
            self.after(0.25, self.tick)
            self.after(1.0, self.read)

    def start(self) -> None:
        self.generation += 1
        self.tell(messages.RunRequested(generation=self.generation, plan=self.plan))

    def tell(self, stimulus: messages.Stimulus) -> None:
        for order in self.coordinator.handle(self.now_s, stimulus):
            self.obey(order)

    def tick(self) -> None:
        self.tell(messages.TimePassed(own=Usage(num_puts=self.num_puts)))
        if self.is_store_up and self.random.random() < 0.25 * self.faults.store_dies_per_s:
            self.is_store_up = False
        self.after(0.25, self.tick)

    def read(self) -> None:
        if self.stream is not None and self.coordinator.wants_stream:
            self.tell(messages.StreamRead(stream=self.stream))
        if self.coordinator.run.mode == "running" and self.coordinator.run.pool.parameter_url and not self.is_store_up:
            self.tell(messages.ParameterStoreLost())
        for place, incarnation in self.coordinator.watched():
            report = self.reports.get((place, incarnation))
            if report is not None and self.random.random() >= self.faults.unread:
                self.see(report)
        self.after(1.0, self.read)

    def see(self, report: FunctionReport) -> None:
        if self.random.random() < self.faults.stale:
            self.after(self.random.uniform(0, 20), lambda: self.tell(messages.ReportRead(report=report)))
        else:
            self.tell(messages.ReportRead(report=report))

    def obey(self, order: messages.Order) -> None:
        if isinstance(order, messages.Invoke):
            self.invoke(order)
        elif isinstance(order, messages.WriteControl):
            self.write_control(order.record)
        elif isinstance(order, messages.FindStates):
            self.after(self.random.uniform(0.05, 0.5), lambda: self.look(order))
        elif isinstance(order, messages.Assemble):
            self.after(0.5, lambda: self.assemble(order.step, order.num_layers))
        elif isinstance(order, messages.OpenParameterStore):
            self.after(self.random.uniform(0.2, 3.0), self.open_store)
        elif isinstance(order, messages.CloseParameterStore):
            self.is_store_up = False
            self.store_number = 0
        elif isinstance(order, messages.DeleteKeys):
            for key in order.keys:
                self.states.pop(key, None)
        else:
            self.hear(order.event)

    def open_store(self) -> None:
        if not self.is_store_up and (self.faults.store_moves or self.store_number == 0):
            self.store_number += 1
        self.is_store_up = True
        self.tell(messages.ParameterStoreUp(url=f"redis://{self.store_number}"))

    def write_control(self, record: ControlRecord) -> None:
        self.num_puts += 1
        before = (self.control.generation, self.control.attempt) if self.control is not None else (0, 0)
        assert (record.generation, record.attempt) >= before
        if (record.generation, record.attempt) > before and record.restore_step:
            assert self.complete(record.restore_step, record.plan.stages[-1].end_layer)
        self.control = record

    def hear(self, event: events.Event) -> None:
        self.events.append(event)
        if isinstance(event, events.JobFinished | events.JobFailed):
            self.after(0.1, lambda: self.tell(messages.StopRequested()))
        elif isinstance(event, events.PauseRequested):
            self.after(0.1, lambda: self.tell(messages.PreemptRequested(generation=self.generation + 1, grace_s=15.0)))
        elif isinstance(event, events.ReplicaLost):
            if self.restarts_left == 0:
                self.is_over = True
                return
            self.restarts_left -= 1
            self.after(5.0, self.new_coordinator)
            self.after(5.1, self.start)
        elif isinstance(event, events.ReplicaStopped):
            self.is_over = True

    def check_told(self) -> None:
        """Each step's loss is told once, in order, over all samples of one of the plans under which it was made."""
        told = [*self.losses, *self.coordinator.run.progress.losses[len(self.losses[-1:]) :]]
        assert [step for step, _, _ in told] == list(range(1, self.total_steps + 1))
        missing = [(step, count) for step, _, count in told if count not in self.num_samples[step]]
        assert not missing, f"steps whose losses are not over all their samples: {missing}"

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    # --- the store ------------------------------------------------------------------------------------------------

    def complete(self, step: int, num_layers: int) -> bool:
        layer, stage = 0, 0
        while layer < num_layers:
            meta = self.states.get(self.keys.state_meta(step, stage))
            if meta is None or meta[1][0] != layer:
                return False
            layer, stage = meta[1][1], stage + 1
        return layer == num_layers

    def look(self, order: messages.FindStates) -> None:
        steps = sorted({int(key.split("/")[-2]) for key in self.states}, reverse=True)
        whole = [step for step in steps if self.complete(step, order.num_layers)]
        newest = whole[0] if whole and order.newest is None else order.newest or 0
        latest = whole[0] if whole and not order.may_begin_anew else 0
        found = next((step for step in whole if step <= newest), latest)
        torn = tuple(key for key in self.states if int(key.split("/")[-2]) > found)
        self.tell(messages.StatesFound(number=order.number, step=found, num_bytes=1 << 20, torn=torn))

    def assemble(self, step: int, num_layers: int) -> None:
        assert self.complete(step, num_layers)
        self.model = self.states[self.keys.state_meta(step, 0)][0]
        self.tell(messages.Assembled(path="model.safetensors"))
