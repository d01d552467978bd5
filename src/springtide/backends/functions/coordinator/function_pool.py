"""The functions of one job: a slot for each place of its plan, the invocations in the slots, and the Invoke orders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from springtide.backends.functions.coordinator.invocations import FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.ledger import Ledger
from springtide.backends.functions.coordinator.messages import Invoke, Order
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionPlan, FunctionService
from springtide.core.wire.functions import ControlRecord, FunctionOrder, FunctionReport, Place
from springtide.core.workload import ReplicaId, WorkloadId


class StreamRules(msgspec.Struct, frozen=True, kw_only=True):
    """When the functions of a job on a stream end for lack of samples, and when they start again.

    They start once there are samples for `min_start_steps` steps, or once samples for one step have waited for
    `max_wait_s`. They end after `idle_s` without samples. None: after the time that a start takes; then neither waiting
    nor restarting costs more than twice what was unavoidable.
    """

    min_start_steps: int = 8
    max_wait_s: float = 600.0
    idle_s: float | None = None


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of one coordinator: the job, where its objects are, what the service offers.

    With `has_parameter_store` functions exchange data through a store that is up while they run. `used_incarnations` is
    the highest incarnation number used so far at any place of this job. `stream` names the growing dataset, if there is
    one; a step uses `global_batch_size` samples of it.
    """

    job_id: WorkloadId
    replica_id: ReplicaId
    prefix: str
    store_url: str
    service: FunctionService
    has_parameter_store: bool = False
    budget_usd: float | None = None
    menu: FunctionMenu | None = None
    used_incarnations: int = 0
    stream: str = ""
    global_batch_size: int = 1
    stream_rules: StreamRules = StreamRules()

    def option(self, plan: FunctionPlan) -> FunctionOption | None:
        """The menu's entry for a plan, with its predictions; None for a plan that is not on the menu."""
        return next((option for option in self.menu.options if option.plan == plan), None) if self.menu else None

    def next_larger_mb(self, memory_mb: int) -> int | None:
        """The next larger size of functions, where there is one."""
        return next((size.memory_mb for size in self.service.sizes if size.memory_mb > memory_mb), None)


def places_of(plan: FunctionPlan) -> list[Place]:
    """Every place of a plan."""
    return [Place(stage, replica) for stage in range(len(plan.stages)) for replica in range(plan.num_replicas)]


class FunctionPool:
    """The slots of the present plan. Incarnation numbers are never used twice in a job, whatever the place.

    `joining` are the slots of an upcoming plan, `retired` those of earlier plans whose functions may still be ending.
    `parameter_url` is the address of the parameter store for functions that are invoked now (empty: there is none).
    """

    def __init__(self, facts: JobFacts, ledger: Ledger) -> None:
        self._facts = facts
        self._ledger = ledger
        self.used_incarnations = facts.used_incarnations
        self.slots: dict[Place, PlaceSlot] = {}
        self.joining: dict[Place, PlaceSlot] = {}
        self.retired: list[PlaceSlot] = []
        self.parameter_url = ""
        self.num_invocations = 0
        self._number = 0
        self.num_replaced = 0
        self.num_handovers = 0
        self.num_lost = 0
        self.num_throttled = 0

    def open_slots(self, plan: FunctionPlan) -> None:
        """One empty slot for each place of a plan."""
        self.slots = {place: PlaceSlot(place=place) for place in places_of(plan)}

    def adopt(self, record: ControlRecord, now_s: float, invoked_at_s: Mapping[int, float]) -> None:
        """Take over the functions that are named in the control record of another coordinator."""
        self.open_slots(record.plan)
        for slot in self.slots.values():
            incarnation = record.incarnations.get(str(slot.place), 0)
            memory_mb = record.plan.stages[slot.place.stage].memory_mb
            invocation = FunctionInvocation(
                place=slot.place,
                incarnation=incarnation,
                memory_mb=memory_mb,
                invoked_at_s=invoked_at_s.get(incarnation, now_s),
                is_adopted=True,
                is_uncertain=True,
                heard_at_s=now_s,
            )
            slot.invocation = invocation
            slot.invocations.append(invocation)
            slot.recorded = incarnation
            slot.step = record.restore_step
            self.used_incarnations = max(self.used_incarnations, incarnation)
            self._ledger.open(invocation)

    def __iter__(self) -> Iterator[PlaceSlot]:
        """The slots of the present plan, in the order of their places."""
        return iter(self.slots.values())

    def reports(self) -> list[FunctionReport | None]:
        """The newest report from each slot of the present plan."""
        return [slot.invocation.report if slot.invocation is not None else None for slot in self]

    def living(self) -> list[FunctionInvocation]:
        """The invocations that may still be running, those of retired and joining slots included."""
        slots = (*self, *self.joining.values(), *self.retired)
        return [invocation for slot in slots for invocation in slot.living()]

    def find(self, place: Place, incarnation: int) -> tuple[PlaceSlot, FunctionInvocation] | None:
        """The invocation with that incarnation number, and its slot in the present, the upcoming or an earlier plan."""
        own = [known.get(place) for known in (self.slots, self.joining)]
        for slot in (*own, *self.retired):
            invocation = slot.of(incarnation) if slot is not None and slot.place == place else None
            if slot is not None and invocation is not None:
                return slot, invocation
        return None

    def is_joining(self, slot: PlaceSlot) -> bool:
        """Whether the slot belongs to the upcoming plan."""
        return self.joining.get(slot.place) is slot

    def is_present(self, slot: PlaceSlot) -> bool:
        """Whether the slot belongs to the present plan."""
        return self.slots.get(slot.place) is slot

    def retire(self, slots: Iterable[PlaceSlot]) -> None:
        """Drop these slots: their functions end by themselves, and are charged until they have."""
        known = [slot for slot in self.retired if any(invocation.end is None for invocation in slot.invocations)]
        self.retired = [*known, *slots][-256:]

    def incarnations(self) -> dict[str, int]:
        """The incarnations that may write, by place as text, as in the control record."""
        return {str(slot.place): slot.recorded for slot in self}

    def fill(self, record: ControlRecord, now_s: float) -> list[Order]:
        """Fill every slot for an attempt: with its living function, else its successor, else a new one.

        Returns the orders that invoke the new ones.
        """
        invokes: list[Order] = []
        for slot in self:
            slot.step = record.restore_step
            if slot.invocation is None or not slot.invocation.is_alive:
                successor, slot.successor = slot.successor, None
                if successor is not None and successor.is_alive:
                    slot.invocation = successor
                else:
                    invokes.append(self.launch(slot, record, now_s))
            assert slot.invocation is not None
            slot.recorded = slot.invocation.incarnation
        return invokes

    def launch(
        self,
        slot: PlaceSlot,
        record: ControlRecord,
        now_s: float,
        *,
        is_successor: bool = False,
        plan: FunctionPlan | None = None,
    ) -> Invoke:
        """Order a new function for a slot: to fill it, as a successor, or for an upcoming `plan`."""
        self.used_incarnations += 1
        before = slot.invocation.incarnation if is_successor and slot.invocation is not None else -1
        invocation = FunctionInvocation(
            place=slot.place,
            incarnation=self.used_incarnations,
            memory_mb=(plan or record.plan).stages[slot.place.stage].memory_mb,
            invoked_at_s=now_s,
            is_successor=is_successor,
            follows=before,
            plan=plan,
            heard_at_s=now_s,
        )
        slot.invocations = [*slot.invocations[-31:], invocation]
        if is_successor and slot.invocation is not None and slot.invocation.is_alive:
            slot.successor = invocation
        else:
            slot.invocation = invocation
            slot.successor = None
        self._ledger.open(invocation)
        return self.invoke(invocation, record, now_s)

    def invoke(self, invocation: FunctionInvocation, record: ControlRecord, now_s: float) -> Invoke:
        """The order for one try of an invocation: the first, or a retry after a refusal."""
        invocation.invoked_at_s = now_s
        invocation.retry_at_s = None
        self.num_invocations += 1
        self._number += 1
        invocation.number = self._number
        self._ledger.count_invocation()
        return Invoke(
            number=invocation.number,
            memory_mb=invocation.memory_mb,
            order=FunctionOrder(
                job_id=self._facts.job_id,
                store_url=self._facts.store_url,
                prefix=self._facts.prefix,
                generation=record.generation,
                attempt=record.attempt,
                stage=invocation.place.stage,
                replica=invocation.place.replica,
                incarnation=invocation.incarnation,
                restore_step=record.restore_step,
                parameter_url=self.parameter_url,
                is_successor=invocation.is_successor,
                follows=invocation.follows,
                plan=invocation.plan,
            ),
        )

    def refuse(self, invocation: FunctionInvocation, now_s: float, retry_after_s: float | None) -> None:
        """The provider refused an invocation: nothing ran, nothing is charged; schedule a retry."""
        self.num_throttled += 1
        self.num_invocations -= 1
        self._ledger.count_invocation(-1)
        wait_s = min(30.0, 0.5 * 2.0 ** min(invocation.num_refused, 6))
        invocation.num_refused += 1
        invocation.retry_at_s = now_s + max(wait_s, retry_after_s or 0.0)

    def give_up(self, invocation: FunctionInvocation, now_s: float) -> None:
        """Stop waiting for an invocation. If it starts after all, it ends: the control record does not name it."""
        invocation.is_given_up = True
        invocation.over_at_s = now_s

    def give_up_all(self, now_s: float) -> None:
        """Stop waiting for all of them."""
        for invocation in self.living():
            self.give_up(invocation, now_s)
