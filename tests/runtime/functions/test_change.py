"""Real functions, in threads, whose plan changes while they train: who stays, who joins, who leaves, who waits."""

from __future__ import annotations

import time
import uuid

import msgspec
import pytest
import torch
from safetensors.torch import load

from kits.runtime.function_plane import KEYS, SOURCE, Context, FunctionPlane, Invoked, Killed, plan_of
from springtide.core.errors import ObjectMissing, StorageError
from springtide.core.wire.functions import Place, Upcoming
from springtide.runtime.functions import control_watch as function_watch
from springtide.runtime.functions import place_worker
from springtide.runtime.functions import worker as function_worker
from springtide.runtime.functions.pipeline import executor as pipeline_executor
from springtide.runtime.functions.pipeline import worker as pipeline_worker
from springtide.runtime.functions.wire_store import WireStore, WireTrouble

# Batch normalisation would make losses depend on how many replicas share a batch.
PLAIN = SOURCE.replace("nn.BatchNorm1d(9), ", "nn.Tanh(), ")
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(function_watch, "POLL_S", 0.05)
    monkeypatch.setattr(function_worker, "PARK_POLL_S", 0.02)
    monkeypatch.setattr(function_worker, "WAIT_POLL_S", 0.02)
    monkeypatch.setattr(function_worker, "_BOUNDARY_POLL_S", 0.0)
    monkeypatch.setattr(pipeline_executor, "POLL_S", 0.02)
    monkeypatch.setattr(pipeline_worker, "_WAIT_S", 0.05)
    monkeypatch.setattr(pipeline_worker, "_LONGEST_WAIT_S", 0.05)


@pytest.fixture
def plane():
    made = FunctionPlane(f"memory://{uuid.uuid4().hex}", source=PLAIN, plan=plan_of(1, 2, num_micro_batches=4))
    yield made
    if any(invoked.is_alive() for invoked in made.invoked):
        made.write(verb="stop", upcoming=None)
        made.join()


def reported(plane, place, incarnation):
    try:
        return plane.report(place, incarnation)
    except ObjectMissing:
        return None


def until(condition):
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)


def phase_of(plane, invoked):
    report = reported(plane, invoked.place, invoked.order.incarnation)
    return report.phase if report is not None else ""


def call_joiner(plane, place, incarnation, plan):
    order = msgspec.structs.replace(plane.order(place, incarnation), generation=plane.record.generation + 1, plan=plan)
    invoked = Invoked(order, Context())
    plane.invoked.append(invoked)
    invoked.start()
    return invoked


def hold_at(monkeypatch, step):
    """Nobody begins that step before the test says so."""
    run_step, gate = pipeline_worker.PipelineWorker.run_step, [False]

    def held(self, prefix, *, ends_here=False):
        until(lambda: gate[0] or self.position.step != step)
        return run_step(self, prefix, ends_here=ends_here)

    monkeypatch.setattr(pipeline_worker.PipelineWorker, "run_step", held)
    return gate


def undisturbed_losses():
    made = FunctionPlane(f"memory://{uuid.uuid4().hex}", source=PLAIN, plan=plan_of(1, 2, num_micro_batches=4))
    made.start()
    made.run()
    return made.losses()[0]


def park(plane, plan, joiners):
    """Name who is to join, wait until they are warm, and let everybody come to a boundary."""
    names = {str(place): incarnation for place, incarnation in joiners.items()}
    plane.write(upcoming=Upcoming(plan=plan, joiners=names))
    called = [call_joiner(plane, place, incarnation, plan) for place, incarnation in joiners.items()]
    until(lambda: all(phase_of(plane, each) == "warm" for each in called))
    return called


def take_up(plane, plan, incarnations, step):
    record = plane.record
    plane.plan = plan
    plane.write(
        generation=record.generation + 1,
        attempt=record.attempt + 1,
        stays_from=record.stays_from or record.generation,
        plan=plan,
        restore_step=step,
        incarnations=incarnations,
        upcoming=None,
        last_step=None,
    )


@pytest.mark.slow
def test_replicas_stay_join_and_leave_at_one_boundary(plane, monkeypatch):
    builds = []
    build = place_worker.build_place_worker

    def counted(*arguments, **fields):
        builds.append(arguments[2])
        return build(*arguments, **fields)

    monkeypatch.setattr(function_worker, "build_place_worker", counted)
    gate = hold_at(monkeypatch, 3)
    plane.start()
    first, second = plane.invoked
    wider = plan_of(1, 3, num_micro_batches=4)
    [joiner] = park(plane, wider, {Place(0, 2): 7})
    # The others trained on meanwhile, and hold where the test holds them.
    until(lambda: all(plane.report(each.place).step == 3 for each in (first, second)))
    assert {phase_of(plane, first), phase_of(plane, second)} == {"training"}
    plane.write(last_step=4)
    gate[0] = True
    until(lambda: phase_of(plane, first) == phase_of(plane, second) == "parked")
    step = plane.report(Place(0, 0)).step
    assert step in (4, 5)
    assert plane.meta(step, 0) is not None
    take_up(plane, wider, {"0.0": 0, "0.1": 0, "0.2": 7}, step)
    plane.join()
    assert [each.result.outcome for each in (first, second, joiner)] == ["finished"] * 3
    # The two who stayed were never built again.
    assert sorted(builds) == [Place(0, 0), Place(0, 1), Place(0, 2)]
    assert plane.losses()[0] == pytest.approx(undisturbed_losses(), rel=1e-4)
    report = plane.report(Place(0, 0))
    assert (report.generation, report.attempt, report.pause_s > 0.0) == (2, 1, True)
    assert report.totals.num_steps == 9 - step - 1


@pytest.mark.slow
def test_a_leaver_returns_as_stopped(plane, monkeypatch):
    gate = hold_at(monkeypatch, 3)
    plane.start()
    first, second = plane.invoked
    alone = plan_of(1, 1, num_micro_batches=4)
    plane.write(upcoming=Upcoming(plan=alone), last_step=4)
    gate[0] = True
    until(lambda: phase_of(plane, first) == phase_of(plane, second) == "parked")
    take_up(plane, alone, {"0.0": 0}, plane.report(Place(0, 0)).step)
    plane.join()
    assert (first.result.outcome, second.result.outcome) == ("finished", "stopped")
    assert plane.losses()[0] == pytest.approx(undisturbed_losses(), rel=1e-4)


@pytest.mark.slow
def test_other_memory_is_taken_over_by_functions_that_load_the_state(plane, monkeypatch):
    gate = hold_at(monkeypatch, 3)
    plane.start()
    old = list(plane.invoked)
    stage = msgspec.structs.replace(plan_of(1, 2).stages[0], memory_mb=1024)
    larger = msgspec.structs.replace(plan_of(1, 2, num_micro_batches=4), stages=(stage,))
    new = park(plane, larger, {Place(0, 0): 5, Place(0, 1): 6})
    plane.write(last_step=4)
    gate[0] = True
    until(lambda: all(phase_of(plane, each) == "parked" for each in old))
    take_up(plane, larger, {"0.0": 5, "0.1": 6}, plane.report(Place(0, 0)).step)
    plane.join()
    assert [each.result.outcome for each in old] == ["stopped"] * 2
    assert [each.result.outcome for each in new] == ["finished"] * 2
    assert plane.losses()[0] == pytest.approx(undisturbed_losses(), abs=1e-6)


def test_a_change_that_is_called_off_ends_joiners_and_those_who_wait(plane, monkeypatch):
    gate = hold_at(monkeypatch, 3)
    plane.start()
    old = list(plane.invoked)
    wider = plan_of(1, 3, num_micro_batches=4)
    [joiner] = park(plane, wider, {Place(0, 2): 7})
    plane.write(last_step=4)
    gate[0] = True
    until(lambda: all(phase_of(plane, each) == "parked" for each in old))
    plane.write(upcoming=None)
    plane.join()
    assert joiner.result.outcome == "superseded"
    assert [each.result.outcome for each in old] == ["stopped"] * 2
    [step] = {each.result.step for each in old}
    assert plane.meta(step, 0) is not None


@pytest.mark.slow
def test_a_successor_does_not_follow_a_joiner_into_its_place(plane, monkeypatch):
    """It was called to follow one function; another one fills the place now."""
    gate = hold_at(monkeypatch, 3)
    plane.start()
    order = msgspec.structs.replace(plane.order(Place(0, 1), 9, is_successor=True), follows=0)
    successor = Invoked(order, Context())
    plane.invoked.append(successor)
    successor.start()
    stage = msgspec.structs.replace(plan_of(1, 2).stages[0], memory_mb=1024)
    larger = msgspec.structs.replace(plan_of(1, 2, num_micro_batches=4), stages=(stage,))
    old = plane.invoked[:2]
    park(plane, larger, {Place(0, 0): 5, Place(0, 1): 6})
    plane.write(last_step=4)
    gate[0] = True
    until(lambda: all(phase_of(plane, each) == "parked" for each in old))
    take_up(plane, larger, {"0.0": 5, "0.1": 6}, plane.report(Place(0, 0)).step)
    plane.join()
    assert successor.result.outcome == "superseded"


@pytest.mark.slow
def test_an_attempt_of_the_past_does_not_say_what_is_saved(plane, monkeypatch):
    """A state that was saved, and removed because the step is redone, is saved again when its step comes again."""
    gate = hold_at(monkeypatch, 5)
    plane.start()
    until(lambda: all(plane.report(each.place).step == 5 for each in plane.invoked))
    until(lambda: plane.newest_saved() == 5)
    for step in (4, 5):
        plane.store.delete([KEYS.state_meta(step, 0), KEYS.state(step, 0)])
    plane.write(attempt=1, restore_step=3, last_step=4, save_every=100)
    gate[0] = True
    plane.join()
    assert {each.result.outcome for each in plane.invoked} == {"stopped"}
    assert plane.meta(4, 0) is not None
    assert "model/0.weight" in load(plane.store.get(KEYS.state(4, 0)))


class Broken:
    """A store of which every request fails while `is_down`."""

    def __init__(self, store):
        self.store, self.is_down = store, False

    def __getattr__(self, name):
        def call(*arguments):
            if self.is_down and name in ("put", "get", "wait", "delete"):
                raise StorageError("the connection is refused")
            return getattr(self.store, name)(*arguments)

        return call


def test_a_wire_s_failures_are_told_apart(plane):
    broken = Broken(plane.store)
    wire = WireStore(broken)
    wire.put("a", b"1")
    assert wire.get("a") == wire.wait("a", 0.1) == b"1"
    assert wire.keys("a") == ["a"]
    assert wire.requests().num_puts >= 1
    with pytest.raises(ObjectMissing):
        wire.get("b")
    wire.delete(["a"])
    broken.is_down = True
    for call in (lambda: wire.put("a", b"1"), lambda: wire.get("a"), lambda: wire.delete(["a"])):
        with pytest.raises(WireTrouble, match="refused"):
            call()
    wire.close()


@pytest.mark.slow
def test_functions_whose_wire_breaks_wait_for_a_new_attempt(plane, monkeypatch):
    """Nobody is restarted because a parameter store was: the step is redone."""
    wires = []

    class BrokenWire(WireStore):
        def __init__(self, store):
            wires.append(Broken(store))
            super().__init__(wires[-1])

    monkeypatch.setattr(function_worker, "WireStore", BrokenWire)
    order = plane.order
    other = f"memory://{uuid.uuid4().hex}"
    plane.order = lambda *a, **k: msgspec.structs.replace(order(*a, **k), parameter_url=other)
    gate = hold_at(monkeypatch, 4)
    plane.start()
    until(lambda: all(plane.report(each.place).step == 4 for each in plane.invoked))
    until(lambda: plane.newest_saved() == 4)
    for wire in wires:
        wire.is_down = True
    gate[0] = True
    until(lambda: all(phase_of(plane, each) == "stuck" for each in plane.invoked))
    assert "refused" in plane.report(Place(0, 0)).error
    for wire in wires:
        wire.is_down = False
    plane.write(attempt=1, restore_step=4)
    plane.join()
    assert [each.result.outcome for each in plane.invoked] == ["finished"] * 2
    assert plane.losses()[0] == pytest.approx(undisturbed_losses(), abs=1e-6)
    assert len(wires) == 2


@pytest.mark.slow
def test_a_killed_stayer_is_no_reason_to_hang(plane, monkeypatch):
    gate = hold_at(monkeypatch, 3)
    plane.start()
    first, second = plane.invoked
    wider = plan_of(1, 3, num_micro_batches=4)
    park(plane, wider, {Place(0, 2): 7})
    work = pipeline_worker.PipelineWorker._work

    def dying(self, task, is_ended):
        if self.place == Place(0, 1) and self.position.step == 3 and plane.record.attempt == 0:
            raise Killed
        return work(self, task, is_ended)

    monkeypatch.setattr(pipeline_worker.PipelineWorker, "_work", dying)
    gate[0] = True
    second.join(LIMIT_S)
    assert isinstance(second.error, Killed)
    # Its death is a boundary like any other.
    take_up(plane, wider, {"0.0": 0, "0.1": 8, "0.2": 7}, 3)
    plane.invoke(Place(0, 1), 8)
    for each in plane.invoked:
        each.join(LIMIT_S)
    outcomes = [each.result.outcome for each in plane.invoked if each.result is not None]
    assert outcomes == ["finished"] * 3
    assert first.is_alive() is False
    assert torch.isfinite(torch.tensor(list(plane.losses()[0].values()))).all()
