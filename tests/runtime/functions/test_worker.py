import hashlib
import threading
import time
import uuid

import msgspec
import pytest
import torch
from safetensors.torch import load

from kits.runtime.function_plane import KEYS, NUM_LAYERS, SOURCE, Context, FunctionPlane, Killed, plan_of
from springtide.core.errors import ObjectMissing
from springtide.core.functions import FunctionPlan, FunctionStage
from springtide.core.wire.functions import Place
from springtide.runtime.data.shards import SampleSchedule
from springtide.runtime.functions import control_watch as function_watch
from springtide.runtime.functions.pipeline import executor as pipeline_executor
from springtide.runtime.functions.pipeline import worker as pipeline_worker
from springtide.runtime.functions.pipeline.state import StageTraining
from springtide.runtime.functions.pipeline.worker import PipelineWorker
from springtide.runtime.functions.worker import FunctionWorker
from springtide.runtime.local.inprocess import run_local


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """The record and messages are looked for more often than in truth, so that nobody waits for a test."""
    monkeypatch.setattr(function_watch, "POLL_S", 0.05)
    monkeypatch.setattr(pipeline_executor, "POLL_S", 0.02)
    monkeypatch.setattr(pipeline_worker, "_WAIT_S", 0.05)
    monkeypatch.setattr(pipeline_worker, "_LONGEST_WAIT_S", 0.05)


@pytest.fixture
def make_plane():
    planes = []

    def make(**fields):
        planes.append(FunctionPlane(f"memory://{uuid.uuid4().hex}", **fields))
        return planes[-1]

    yield make
    for plane in planes:
        if any(invoked.is_alive() for invoked in plane.invoked):
            plane.write(verb="stop")
            plane.join()


def model_of(plane, step):
    """The model's file as the coordinator puts it together."""
    tensors = {}
    for stage in range(len(plane.plan.stages)):
        saved = load(plane.store.get(KEYS.state(step, stage)))
        tensors |= {name.removeprefix("model/"): saved[name] for name in saved if name.startswith("model/")}
    return tensors


def kill_once(monkeypatch, place, step, kind):
    """The function at that place dies in the middle of that step, once."""
    work, killed = PipelineWorker._work, []

    def dying(self, task, is_ended):
        if self.place == place and self.position.step == step and task.kind == kind and not killed:
            killed.append(True)
            raise Killed
        return work(self, task, is_ended)

    monkeypatch.setattr(PipelineWorker, "_work", dying)
    return killed


@pytest.fixture(scope="module")
def undisturbed():
    """Losses and the model of a run in which nothing happens, 2 stages x 2 replicas."""
    plane = FunctionPlane(f"memory://{uuid.uuid4().hex}")
    plane.start()
    results = plane.run()
    assert {result.outcome for result in results.values()} == {"finished"}
    return *plane.losses(), model_of(plane, 9), plane


@pytest.mark.slow
def test_a_run_to_its_end(undisturbed):
    losses, counts, model, plane = undisturbed
    assert list(losses) == list(range(1, 10))
    assert list(counts.values()) == [16, 16, 12] * 3
    assert sorted(model) == sorted(
        f"{layer}.{name}"
        for layer, names in {
            0: ("weight", "bias"),
            1: ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"),
            3: ("weight", "bias"),
            5: ("weight", "bias"),
        }.items()
        for name in names
    )
    for place in plane.places:
        report = plane.report(place)
        assert (report.phase, report.step, report.total_steps, report.attempt) == ("finished", 9, 9, 0)
        assert report.memory_bytes > 1 << 20
        assert report.usage.num_puts > 0
        assert report.usage.num_lists == 0
        assert report.lanes.step_s > 0
    assert [plane.report(Place(0, replica)).num_samples for replica in range(2)] == [66, 66]


def test_every_sample_is_in_the_chain_of_ids(undisturbed):
    *_, plane = undisturbed
    schedule = SampleSchedule(num_samples=44, global_batch_size=16, num_epochs=3, seed=plane.job.seed)
    digest = ""
    for step in range(9):
        digest = hashlib.sha256((digest + schedule.batch(step).ids_digest).encode()).hexdigest()[:16]
    assert plane.report(Place(0, 0)).ids_digest == plane.report(Place(0, 1)).ids_digest == digest
    assert plane.report(Place(1, 0)).ids_digest == ""
    assert plane.meta(9, 0).ids_digest == digest


def test_nothing_is_left_on_the_wire_but_the_last_exchange(undisturbed):
    *_, plane = undisturbed
    left = [key for key in plane.store.keys(KEYS.prefix) if "/wire/" in key]
    assert all("/000000008/sync/" in key for key in left), left


@pytest.mark.slow
def test_it_learns_what_training_in_one_process_learns(make_plane, tmp_path):
    """Without batch normalisation the cut does not matter: the same model as `task.local()` learns."""
    source = SOURCE.replace("nn.BatchNorm1d(9), ", "nn.Tanh(), ")
    plane = make_plane(source=source)
    plane.start()
    plane.run()
    file = tmp_path / "task.py"
    file.write_text(source)
    namespace = {"__file__": str(file), "__name__": "task"}
    exec(compile(source, str(file), "exec"), namespace)
    result = run_local(namespace["task"], plane.job, tmp_path / "out", write=lambda line: None)
    expected = load((tmp_path / "out" / "model.safetensors").read_bytes())
    found = model_of(plane, 9)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6, rtol=0), name
    assert plane.losses()[0][9] == pytest.approx(result.loss, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "step", "kind"),
    [
        (Place(0, 1), 4, "send-output"),
        (Place(1, 0), 5, "exchange"),
        (Place(1, 1), 0, "backward"),
        (Place(0, 0), 8, "update"),
    ],
)
@pytest.mark.parametrize("save_every", [1, 3])
def test_a_function_that_dies_in_a_step_is_replaced(
    make_plane, monkeypatch, undisturbed, place, step, kind, save_every
):
    killed = kill_once(monkeypatch, place, step, kind)
    plane = make_plane(save_every=save_every)
    plane.start()
    results = plane.run()
    assert killed
    assert {result.outcome for result in results.values()} == {"finished"}
    losses, counts, model, _ = undisturbed
    assert plane.losses() == (losses, counts)
    found = model_of(plane, 9)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
    assert plane.report(place, 1).attempt >= 1
    assert plane.report(Place(0, 0), plane.record.incarnations["0.0"]).ids_digest == plane.meta(9, 0).ids_digest


@pytest.mark.slow
def test_an_update_is_made_once_when_the_step_is_given_up_before_all_of_it_has_gone_out(make_plane, monkeypatch):
    """The last stage has updated and still sends its gradient when the one that waits for it dies."""
    plan = plan_of(2, 1)
    expected = make_plane(plan=plan)
    expected.start()
    expected.run()

    work, update = PipelineWorker._work, StageTraining.update
    num_updates, updated, killed = [], threading.Event(), []
    plane = make_plane(plan=plan)

    def updating(self):
        update(self)
        if self.stage.first_layer and not updated.is_set():
            num_updates.append(1)
            if len(num_updates) == 5:
                updated.set()

    def working(self, task, is_ended):
        is_it = self.position.step == 4 and not killed
        if is_it and (self.place, task.kind, task.micro_batch) == (Place(1, 0), "send-gradient", 0):
            while not is_ended():
                time.sleep(0.01)
            return
        if is_it and (self.place, task.kind, task.micro_batch) == (Place(0, 0), "take-gradient", 0):
            assert updated.wait(20)
            killed.append(True)
            raise Killed
        work(self, task, is_ended)

    monkeypatch.setattr(StageTraining, "update", updating)
    monkeypatch.setattr(PipelineWorker, "_work", working)
    plane.start()
    plane.run()
    assert killed
    assert plane.losses() == expected.losses()
    found, model = model_of(plane, 9), model_of(expected, 9)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


@pytest.mark.slow
def test_a_function_near_the_end_of_its_lifetime_hands_over_to_a_warm_one(make_plane, monkeypatch, undisturbed):
    """It leaves at a boundary; nobody else notices, and the attempt stays the same."""
    context = Context()
    committed = FunctionWorker._committed

    def later(self, done):
        if self._order.incarnation == 0 and self._place == Place(0, 1) and self._worker.position.step == 4:
            context.remaining_s = 1.0
        return committed(self, done)

    monkeypatch.setattr(FunctionWorker, "_committed", later)
    plane = make_plane(save_every=5)
    plane.start({Place(0, 1): context})
    plane.invoke(Place(0, 1), 1, is_successor=True)
    results = plane.run()
    assert {result.outcome for result in results.values()} == {"finished"}
    leaver = next(each for each in plane.invoked if each.place == Place(0, 1) and each.order.incarnation == 0)
    assert (leaver.result.outcome, leaver.result.step) == ("left", 4)
    assert plane.report(Place(0, 1), 0).phase == "left"
    assert plane.report(Place(0, 1), 1).phase == "finished"
    assert plane.record.attempt == 0
    losses, counts, model, _ = undisturbed
    assert plane.losses() == (losses, counts)
    found = model_of(plane, 9)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


@pytest.mark.slow
def test_a_successor_tells_on_what_the_one_before_it_has_told(make_plane, monkeypatch):
    """Its last report need not have been read by the time its successor is heard of."""
    context = Context()
    committed = FunctionWorker._committed

    def later(self, done):
        if self._order.incarnation == 0 and self._place == Place(1, 1) and self._worker.position.step == 4:
            context.remaining_s = 1.0
        return committed(self, done)

    monkeypatch.setattr(FunctionWorker, "_committed", later)
    plane = make_plane()
    plane.start({Place(1, 1): context})
    plane.invoke(Place(1, 1), 1, is_successor=True)
    plane.run()
    told, others = plane.report(Place(1, 1), 1).losses, plane.report(Place(1, 0), 0).losses
    assert [step for step, _, _ in told] == [step for step, _, _ in others] == list(range(1, 10))


@pytest.mark.slow
def test_a_successor_whose_forerunner_dies_takes_the_records_state(make_plane, monkeypatch, undisturbed):
    kill_once(monkeypatch, Place(1, 0), 5, "forward")
    plane = make_plane()
    plane.start()
    successor = plane.invoke(Place(1, 0), 1, is_successor=True)
    first = next(each for each in plane.invoked if each.place == Place(1, 0))
    first.join(20)
    assert isinstance(first.error, Killed)
    plane.write(attempt=1, restore_step=plane.newest_saved(), incarnations={**plane.record.incarnations, "1.0": 1})
    results = plane.run(dead=(first,))
    assert successor.result.outcome == "finished"
    assert {result.outcome for result in results.values()} == {"finished"}
    losses, _, _, _ = undisturbed
    assert plane.losses()[0] == losses


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 1), (3, 1), (2, 2), (1, 3)])
def test_everyone_stops_after_the_same_step(make_plane, num_stages, num_replicas):
    plane = make_plane(plan=plan_of(num_stages, num_replicas, num_micro_batches=4), last_step=4, save_every=100)
    plane.start()
    results = plane.run()
    assert {(result.outcome, result.step) for result in results.values()} == {("stopped", 4)}
    assert plane.newest_saved() == 4


@pytest.mark.slow
def test_a_stopped_job_goes_on_under_another_cut(make_plane, undisturbed):
    plane = make_plane(last_step=4, save_every=100)
    plane.start()
    plane.run()
    before, _ = plane.losses()
    plane.plan = plan_of(3, 1, num_micro_batches=4)
    plane.record = msgspec.structs.replace(
        plane.record, generation=2, attempt=0, plan=plane.plan, restore_step=4, last_step=None
    )
    plane.invoked.clear()
    plane.start()
    results = plane.run()
    assert {result.outcome for result in results.values()} == {"finished"}
    after, _ = plane.losses()
    losses, _, model, _ = undisturbed
    assert list(after) == [5, 6, 7, 8, 9]
    # Other replicas, other micro-batches under batch normalisation: near, not the same.
    assert before | after == pytest.approx(losses, rel=0.2)
    assert model_of(plane, 9).keys() == model.keys()


@pytest.mark.slow
def test_whoever_is_told_to_stop_returns_and_writes_nothing(make_plane):
    plane = make_plane(epochs=1000)
    plane.start()
    while not plane.losses()[0]:
        pass
    plane.write(verb="stop")
    plane.join()
    assert {invoked.result.outcome for invoked in plane.invoked} == {"stopped"}
    assert all(plane.report(place).phase == "training" for place in plane.places)


@pytest.mark.slow
def test_whoever_is_not_named_any_more_leaves(make_plane):
    plane = make_plane(epochs=1000)
    plane.start()
    while not plane.losses()[0]:
        pass
    plane.write(attempt=1, restore_step=0, incarnations={str(place): 1 for place in plane.places})
    plane.join()
    assert {invoked.result.outcome for invoked in plane.invoked} == {"superseded"}


@pytest.mark.slow
def test_a_newer_generation_supersedes(make_plane):
    plane = make_plane(epochs=1000)
    plane.start()
    while not plane.losses()[0]:
        pass
    plane.write(generation=2)
    plane.join()
    assert {invoked.result.outcome for invoked in plane.invoked} == {"superseded"}


def test_a_job_whose_code_fails_says_so_in_one_sentence(make_plane, capfd):
    plane = make_plane(
        source=SOURCE.replace("loss=nn.functional.cross_entropy", "loss=lambda x, y: (1 / 0) * x.mean()"),
        plan=plan_of(1, 1, num_micro_batches=4),
    )
    plane.start()
    (result,) = plane.run().values()
    assert result.outcome == "failed"
    assert result.error.startswith("ZeroDivisionError: division by zero (task.py:")
    report = plane.report(Place(0, 0))
    assert (report.phase, report.error) == ("failed", result.error)
    assert "Traceback" in capfd.readouterr().err


def test_a_torn_state_is_not_taken(make_plane, capfd):
    plane = make_plane(last_step=2, plan=plan_of(1, 1, num_micro_batches=4))
    plane.start()
    plane.run()
    key = KEYS.state(2, 0)
    plane.store.put(key, plane.store.get(key)[:-1] + b"x")
    plane.write(generation=2, attempt=0, restore_step=2, last_step=None, incarnations={"0.0": 1})
    plane.invoked.clear()
    plane.invoke(Place(0, 0), 1)
    (result,) = plane.run().values()
    assert result.outcome == "failed"
    assert result.error == (
        "CheckpointError: the state of stage 0 after step 2 is torn: its bytes are not those that were written"
    )


def test_a_plan_for_another_model_is_refused(make_plane):
    stages = (FunctionStage(first_layer=0, end_layer=NUM_LAYERS + 1, memory_mb=512),)
    plane = make_plane(plan=FunctionPlan(stages=stages, num_micro_batches=4))
    plane.start()
    (result,) = plane.run().values()
    assert result.outcome == "failed"
    assert "the plan is for 7 layers, but the model has 6" in result.error


def test_an_order_of_a_finished_attempt_ends_at_once(make_plane):
    plane = make_plane()
    plane.write(verb="stop", incarnations={"0.0": 3})
    assert plane.invoke(Place(0, 0), 2) is plane.invoked[0]
    plane.join()
    assert plane.invoked[0].result.outcome == "superseded"
    with pytest.raises(ObjectMissing):
        plane.store.get(KEYS.state_meta(0, 0))
