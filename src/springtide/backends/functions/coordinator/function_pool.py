"""The functions of one job: who fills which place, who is to follow, and the orders that bring them in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from springtide.backends.functions.coordinator.invocations import FunctionInvocation, PlaceSlot
from springtide.backends.functions.coordinator.ledger import Ledger
from springtide.backends.functions.coordinator.messages import Invoke
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionPlan, FunctionService
from springtide.core.wire.functions import ControlRecord, FunctionOrder, Place
from springtide.core.workload import ReplicaId, WorkloadId


class StreamRules(msgspec.Struct, frozen=True, kw_only=True):
    """When functions of a job on a stream rest and when they begin again.

    They begin once there are samples for `min_start_steps` steps, or for one that have lain there for `max_wait_s`.
    They rest after `idle_s` without any (None: as long as it takes to start anew, so that neither waiting nor starting
    ever costs more than twice what was needed).
    """

    min_start_steps: int = 8
    max_wait_s: float = 600.0
    idle_s: float | None = None


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while one coordinator works: the job, where its objects are, what is offered.

    With `has_parameter_store` what travels goes through one that is up while functions run. `used_incarnations` is the
    highest number that anyone has had at any place of this job. `stream` names the growing dataset, if there is one, of
    which a step uses `global_batch_size` samples.
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
        """What was predicted for a plan, where it is on the menu."""
        return next((option for option in self.menu.options if option.plan == plan), None) if self.menu else None


class FunctionPool:
    """All fillings of the present plan. Incarnation numbers are never used twice in a job, whatever the place.

    `joining` are those of a plan that is to follow, `former` those of the plans before, who may be ending yet.
    """

    def __init__(self, facts: JobFacts, ledger: Ledger) -> None:
        self._facts = facts
        self._ledger = ledger
        self.used_incarnations = facts.used_incarnations
        self.fillings: dict[Place, PlaceSlot] = {}
        self.joining: dict[Place, PlaceSlot] = {}
        self.former: list[PlaceSlot] = []
        self.parameter_url = ""
        self.num_invocations = 0
        self._number = 0
        self.num_replaced = 0
        self.num_handovers = 0
        self.num_lost = 0
        self.num_throttled = 0

    def take_places(self, plan: FunctionPlan) -> None:
        """The places of a plan, all empty."""
        places = [Place(stage, replica) for stage in range(len(plan.stages)) for replica in range(plan.num_replicas)]
        self.fillings = {place: PlaceSlot(place=place) for place in places}

    def adopt(self, record: ControlRecord, now_s: float, invoked_at_s: Mapping[int, float]) -> None:
        """Take over who fills the places of a control record that another coordinator wrote."""
        self.take_places(record.plan)
        for filling in self.fillings.values():
            incarnation = record.incarnations.get(str(filling.place), 0)
            memory_mb = record.plan.stages[filling.place.stage].memory_mb
            life = FunctionInvocation(
                place=filling.place,
                incarnation=incarnation,
                memory_mb=memory_mb,
                invoked_at_s=invoked_at_s.get(incarnation, now_s),
                is_adopted=True,
                is_uncertain=True,
                heard_at_s=now_s,
            )
            filling.life = life
            filling.lives.append(life)
            filling.named = incarnation
            filling.step = record.restore_step
            self.used_incarnations = max(self.used_incarnations, incarnation)
            self._ledger.open(life)

    def __iter__(self) -> Iterator[PlaceSlot]:
        """The fillings in the order of their places."""
        return iter(self.fillings.values())

    def living(self) -> list[FunctionInvocation]:
        """Everybody who may still do anything."""
        everyone = (*self, *self.joining.values(), *self.former)
        return [life for filling in everyone for life in filling.living()]

    def find(self, place: Place, incarnation: int) -> tuple[PlaceSlot, FunctionInvocation] | None:
        """Who has that number, and where it belongs: in the present plan, in the one to follow, or in one before."""
        own = [known.get(place) for known in (self.fillings, self.joining)]
        for filling in (*own, *self.former):
            life = filling.of(incarnation) if filling is not None and filling.place == place else None
            if filling is not None and life is not None:
                return filling, life
        return None

    def is_joining(self, filling: PlaceSlot) -> bool:
        """Whether it belongs to the plan that is to follow."""
        return self.joining.get(filling.place) is filling

    def is_present(self, filling: PlaceSlot) -> bool:
        """Whether it belongs to the present plan."""
        return self.fillings.get(filling.place) is filling

    def dismiss(self, fillings: Iterable[PlaceSlot]) -> None:
        """Nobody of these is needed any more: they end by themselves, and are charged until they have."""
        known = [filling for filling in self.former if any(life.end is None for life in filling.lives)]
        self.former = [*known, *fillings][-256:]

    def incarnations(self) -> dict[str, int]:
        """Who may write, as the control record says it."""
        return {str(filling.place): filling.named for filling in self}

    def call(
        self,
        filling: PlaceSlot,
        record: ControlRecord,
        now_s: float,
        *,
        is_successor: bool = False,
        plan: FunctionPlan | None = None,
    ) -> Invoke:
        """Call a new function to a place: into it, to follow who is there, or for a `plan` that is to follow."""
        self.used_incarnations += 1
        before = filling.life.incarnation if is_successor and filling.life is not None else -1
        life = FunctionInvocation(
            place=filling.place,
            incarnation=self.used_incarnations,
            memory_mb=(plan or record.plan).stages[filling.place.stage].memory_mb,
            invoked_at_s=now_s,
            is_successor=is_successor,
            follows=before,
            plan=plan,
            heard_at_s=now_s,
        )
        filling.lives = [*filling.lives[-31:], life]
        if is_successor and filling.life is not None and filling.life.is_alive:
            filling.successor = life
        else:
            filling.life = life
            filling.successor = None
        self._ledger.open(life)
        return self.invoke(life, record, now_s)

    def invoke(self, life: FunctionInvocation, record: ControlRecord, now_s: float) -> Invoke:
        """Invoke a function for a life, for the first time or again after a refusal."""
        life.invoked_at_s = now_s
        life.retry_at_s = None
        self.num_invocations += 1
        self._number += 1
        life.number = self._number
        self._ledger.count_invocation()
        return Invoke(
            number=life.number,
            memory_mb=life.memory_mb,
            order=FunctionOrder(
                job_id=self._facts.job_id,
                store_url=self._facts.store_url,
                prefix=self._facts.prefix,
                generation=record.generation,
                attempt=record.attempt,
                stage=life.place.stage,
                replica=life.place.replica,
                incarnation=life.incarnation,
                restore_step=record.restore_step,
                parameter_url=self.parameter_url,
                is_successor=life.is_successor,
                follows=life.follows,
                plan=life.plan,
            ),
        )

    def refuse(self, life: FunctionInvocation, now_s: float, retry_after_s: float | None) -> None:
        """The provider put an invocation off: nothing ran, nothing is charged, it is tried again after a while."""
        self.num_throttled += 1
        self.num_invocations -= 1
        self._ledger.count_invocation(-1)
        wait_s = min(30.0, 0.5 * 2.0 ** min(life.num_refused, 6))
        life.num_refused += 1
        life.retry_at_s = now_s + max(wait_s, retry_after_s or 0.0)

    def give_up(self, life: FunctionInvocation, now_s: float) -> None:
        """Count on this one no more. It may still come to life: then the control record does not name it."""
        life.is_given_up = True
        life.over_at_s = now_s

    def bury_all(self, now_s: float) -> None:
        """Count on nobody any more."""
        for life in self.living():
            self.give_up(life, now_s)
