"""Whatever befalls functions, each step's loss is told once and over all its samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kits.functions.world import BATCH, Faults, World, service_of, whole_plan
from kits.simulation.sweeps import sampled
from springtide.backends.functions.coordinator import messages
from springtide.backends.functions.coordinator.coordinator import Coordinator
from springtide.backends.functions.coordinator.progress import FunctionProgress
from springtide.core import events
from springtide.core.functions import FunctionPlan
from springtide.core.wire.functions import FunctionReport, FunctionResult
from springtide.core.workload import WorkloadId

FIRST, SECOND = 0, 1
# Several steps to a report, as with models that are small.
STEP_S = 0.2


class Deaf(World):
    """What those in `unheard` report is not read; what the provider tells of their ends is."""

    unheard: frozenset[int] = frozenset()

    def see(self, report: FunctionReport) -> None:
        if report.replica not in self.unheard:
            super().see(report)


def deaf(**fields: object) -> Deaf:
    world = Deaf(plan=whole_plan(2), total_steps=120, step_s=STEP_S, **fields)  # type: ignore[arg-type]
    world.start()
    return world


def step_of(world: World, replica: int) -> int:
    return max((one.step for one in world.functions if one.order.replica == replica and not one.done), default=0)


def untold(world: World, replica: int) -> int:
    """How many steps it has made that its newest report does not know of."""
    reports = [report for (place, _), report in world.reports.items() if place.replica == replica]
    return step_of(world, replica) - max((report.step for report in reports), default=0)


def die(world: World, replica: int) -> None:
    world.die(next(one for one in world.functions if one.order.replica == replica and not one.done), "killed")


def check_finished(world: World) -> None:
    assert len(world.of(events.JobFinished)) == 1
    assert world.model == list(range(1, world.total_steps + 1))
    world.check_told()


def test_what_is_known_of_one_place_alone_removes_no_state_that_a_death_may_lead_back_to() -> None:
    world = deaf()
    world.run(until=lambda: world.coordinator.run.progress.furthest >= 10)
    # The one that dies was read last, time and again: of the other's steps nothing is known for a while.
    world.unheard = frozenset({SECOND})
    world.run(until=lambda: step_of(world, FIRST) >= 40 and untold(world, FIRST) >= 2)
    told = world.coordinator.run.progress.losses_known_step
    assert told is not None
    assert told <= 20
    die(world, FIRST)
    world.run(until=lambda: world.control is not None and world.control.attempt == 2)
    assert world.control is not None
    assert world.control.restore_step <= told
    world.unheard = frozenset()
    world.run()
    check_finished(world)


def test_who_dies_before_anything_was_told_leads_back_to_the_beginning() -> None:
    world = deaf()
    world.unheard = frozenset({FIRST, SECOND})
    world.run(until=lambda: step_of(world, FIRST) >= 3 and untold(world, FIRST) >= 2)
    die(world, FIRST)
    world.run(until=lambda: world.control is not None and world.control.attempt == 2)
    assert world.control is not None
    assert world.control.restore_step == 0
    world.unheard = frozenset()
    world.run()
    check_finished(world)


def test_states_are_removed_as_soon_as_nobody_needs_them() -> None:
    world = deaf()
    world.unheard = frozenset({SECOND})
    world.run(until=lambda: step_of(world, FIRST) >= 60)
    assert len(world.states) >= 60
    world.unheard = frozenset()
    world.run(until_s=world.now_s + 3.0)
    assert len(world.states) <= 30
    world.run()
    check_finished(world)


# --- one stimulus after the other -------------------------------------------------------------------------------------


class Script:
    """A coordinator with two replicas at work, and the orders it gives to what is said of them."""

    def __init__(self) -> None:
        facts = World(plan=whole_plan(2)).facts
        self.coordinator = Coordinator(facts, 0.0)
        self.now_s = 0.0
        self.orders: list[messages.Order] = []
        self.tell(messages.RunRequested(generation=1, plan=whole_plan(2)))
        self.found(0)
        self.numbers = [order.number for order in self.orders if isinstance(order, messages.Invoke)]

    def tell(self, stimulus: messages.Stimulus) -> None:
        self.now_s += 0.25
        self.orders += self.coordinator.handle(self.now_s, stimulus)

    def looks(self) -> list[messages.FindStates]:
        return [order for order in self.orders if isinstance(order, messages.FindStates)]

    def found(self, step: int) -> None:
        self.tell(messages.StatesFound(number=self.looks()[-1].number, step=step))

    def work(self, replica: int, step: int, *, saved: int | None = None, incarnation: int = 0, **fields: str) -> None:
        self.tell(messages.ReportRead(report=report(replica, step, saved=saved, incarnation=incarnation, **fields)))

    def end(self, replica: int, outcome: str, step: int = 0) -> None:
        slot = self.coordinator.run.pool.slots[next(p for p in self.coordinator.run.pool.slots if p.replica == replica)]
        assert slot.invocation is not None
        result = None
        if outcome == "left":
            result = FunctionResult(stage=0, replica=replica, incarnation=replica + 1, outcome="left", step=step)
        self.tell(
            messages.InvocationEnded(
                number=slot.invocation.number,
                place=slot.place,
                incarnation=slot.invocation.incarnation,
                outcome="returned" if result is not None else "killed",
                result=result,
            )
        )


def report(
    replica: int, step: int, *, saved: int | None = None, incarnation: int = 0, phase: str = "training"
) -> FunctionReport:
    return FunctionReport(
        stage=0,
        replica=replica,
        incarnation=incarnation or replica + 1,
        generation=1,
        attempt=1,
        phase=phase,  # type: ignore[arg-type]
        step=step,
        total_steps=100,
        saved_step=saved,
        losses=tuple((one, 1.0, BATCH) for one in range(1, step + 1)),
    )


def test_an_attempt_begins_with_the_answer_to_its_own_question() -> None:
    script = Script()
    script.work(FIRST, 3)
    script.work(SECOND, 3)
    script.end(FIRST, "killed")
    [*_, look] = script.looks()
    assert look.newest == 3
    # The other one tells of a state, the first that is heard of: how large states are is asked another time.
    script.work(SECOND, 5, saved=5)
    assert script.looks()[-1] is look
    script.tell(messages.StatesFound(number=look.number, step=3))
    assert script.coordinator.run.record is not None
    assert (script.coordinator.run.record.attempt, script.coordinator.run.record.restore_step) == (2, 3)


def test_no_state_goes_while_one_is_looked_for() -> None:
    script = Script()
    script.work(FIRST, 3, saved=2)
    script.work(SECOND, 5, saved=5)
    script.end(SECOND, "killed")
    [*_, look] = script.looks()
    assert look.newest == 3
    # By now the losses up to the fifth step are known, but the answer may be a state before it.
    script.work(FIRST, 6, saved=6)
    assert script.coordinator.run.progress.final_step == 5
    gone = [key for order in script.orders if isinstance(order, messages.DeleteKeys) for key in order.keys]
    assert max(int(key.split("/")[-2]) for key in gone) < 2


def test_what_one_did_before_it_left_counts_when_its_successor_was_heard_of_first() -> None:
    script = Script()
    for replica in (FIRST, SECOND):
        script.work(replica, 3, saved=3)
    coordinator = script.coordinator
    slot = next(one for one in coordinator.run.pool if one.place.replica == FIRST)
    assert coordinator.run.record is not None
    invoke = coordinator.run.pool.launch(slot, coordinator.run.record, script.now_s, is_successor=True)
    script.work(SECOND, 6, saved=5)
    # It begins after step 6, and is read before the last words of the one that it follows.
    begun = FunctionReport(
        stage=0, replica=FIRST, incarnation=invoke.order.incarnation, generation=1, attempt=1, phase="training", step=6
    )
    script.tell(messages.ReportRead(report=begun))
    script.work(FIRST, 6, saved=6, phase="left")
    script.work(SECOND, 6, saved=5, phase="waiting")
    script.tell(messages.ReportRead(report=begun))
    script.work(SECOND, 6, saved=5)
    assert [count for _, _, count in coordinator.run.progress.losses] == [2 * BATCH] * 6


# --- put together from reports ----------------------------------------------------------------------------------------


def losses(replica: int, step: int, *told: tuple[int, float, int]) -> FunctionReport:
    return FunctionReport(
        stage=0, replica=replica, incarnation=1, generation=1, attempt=1, phase="training", step=step, losses=told
    )


def test_what_was_told_of_a_step_before_it_is_redone_by_others_is_not_counted_with_theirs() -> None:
    progress = FunctionProgress(WorkloadId("j"))
    for replica in (FIRST, SECOND):
        progress.observe_losses(losses(replica, 2, (1, 1.0, 6), (2, 1.0, 6)), whole_plan(2))
    progress.commit(1)
    progress.new_attempt(1)
    # Three make it now, of whom two have told of it before and have not begun yet.
    for replica in (FIRST, SECOND):
        progress.observe_losses(losses(replica, 1, (1, 1.0, 6), (2, 1.0, 6)), whole_plan(3))
    progress.observe_losses(losses(2, 2, (2, 1.0, 4)), whole_plan(3))
    assert progress.losses_known_step == 1
    for replica in (FIRST, SECOND):
        progress.observe_losses(losses(replica, 2, (1, 1.0, 6), (2, 1.0, 4)), whole_plan(3))
    progress.commit(2)
    assert progress.losses == [(1, 1.0, 12), (2, 1.0, 12)]


def test_a_step_is_told_when_all_have_told_it_who_made_it() -> None:
    progress = FunctionProgress(WorkloadId("j"))
    for replica in (FIRST, SECOND):
        progress.observe_losses(losses(replica, 1, (1, 1.0, 4)), whole_plan(3))
    assert progress.losses_known_step is None
    # A plan of two does not make whole what two of three have told.
    progress.observe_losses(losses(FIRST, 1, (1, 1.0, 4)), whole_plan(2))
    progress.commit(1)
    assert progress.losses == []
    assert progress.losses_known_step is None


# --- everything at once -----------------------------------------------------------------------------------------------


def ask(world: World, plan: FunctionPlan) -> None:
    if not world.is_over:
        world.generation += 1
        world.tell(messages.RunRequested(generation=world.generation, plan=plan))


def random_world(seed: int) -> World:
    world = World(seed, plan=whole_plan(2), total_steps=150, has_parameter_store=True)
    draw = world.random
    world.step_s = draw.choice([0.1, STEP_S, 0.5])
    world.service = service_of(lifetime_s=draw.choice([30.0, 900.0]), cold_start_s=0.5)
    world.faults = Faults(
        killed_per_s=draw.choice([0.0, 0.02, 0.05]),
        unread=draw.choice([0.0, 0.5]),
        stale=draw.choice([0.0, 0.1]),
        lost_contact=draw.choice([0.0, 0.1]),
        store_dies_per_s=draw.choice([0.0, 0.02]),
        store_moves=draw.choice([False, True]),
    )
    world.restarts_left = 20
    world.num_coordinators = 0
    world.queue.clear()
    world.new_coordinator()
    return world


def changing(world: World) -> Callable[[], None]:
    def change() -> None:
        if world.coordinator.run.mode == "running":
            ask(world, whole_plan(world.random.choice([1, 2, 3])))
        world.after(world.random.uniform(4.0, 15.0), change)

    return change


@pytest.mark.slow
@pytest.mark.parametrize("first", sampled(range(0, 200, 25)))
def test_a_death_while_the_number_of_replicas_changes(first: int) -> None:
    finished = 0
    for seed in range(first, first + 25):
        world = random_world(seed)
        world.start()
        world.after(8.0, changing(world))
        try:
            world.run()
            if world.of(events.JobFinished):
                finished += 1
                check_finished(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert finished >= 10
