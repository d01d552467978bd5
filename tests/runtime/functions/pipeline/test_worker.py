import threading
import time

import pytest
import torch

from kits.runtime.pipeline_plans import nothing, plan_of
from kits.runtime.pipeline_tasks_of_users import TASKS, job_of, reference
from springtide.client.functions import Task
from springtide.collectives.communicator import Communicator
from springtide.core.errors import InvalidRequest
from springtide.core.function_search import BatchPhase
from springtide.core.wire.functions import Keys, Place
from springtide.runtime.data.shards import SampleSchedule
from springtide.runtime.functions.pipeline.task_parts import task_parts
from springtide.runtime.functions.pipeline.worker import PipelineWorker
from springtide.storage.stores.open import memory_store

KEYS = Keys("job")


def one_at_a_time(work, lock):
    def locked(*arguments):
        with lock:
            return work(*arguments)

    return locked


class Pipeline:
    """All places of a plan as threads over one store."""

    def __init__(self, task, job, num_stages, num_replicas, *, micro_batch_size=2, num_micro_batches=8, **fields):
        self.store = memory_store()
        self.job = job
        num_layers = len(task_parts(task, job.seed).layers)
        self.plan = plan_of(
            num_layers,
            num_stages,
            num_replicas,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            **fields,
        )
        # Built one after the other: the seeds are the process's, and in truth every place is a process of its own.
        self.workers = {
            Place(stage, replica): PipelineWorker(
                parts=task_parts(task, job.seed),
                job=job,
                plan=self.plan,
                place=Place(stage, replica),
                wire=self.store,
                exchange=Communicator(
                    self.store, replica, num_replicas, now_s=time.monotonic, num_chunks=self.plan.num_chunks
                )
                if num_replicas > 1
                else None,
                check=self.check,
            )
            for stage in range(num_stages)
            for replica in range(num_replicas)
        }
        self.error = None
        self.gradients = []

    def check(self):
        if self.error is not None:
            raise RuntimeError("another place failed") from self.error

    def run(self, num_steps, *, ends_at=None):
        """The outcomes of every place, by step."""
        outcomes = {place: [] for place in self.workers}

        def work(place, worker):
            try:
                for step in range(num_steps):
                    outcome = worker.run_step(
                        KEYS.wire(1, 0, worker.position.step),
                        ends_here=place == Place(0, 0) and ends_at == step + 1,
                    )
                    outcomes[place].append(outcome)
                    if outcome.is_last:
                        break
            except BaseException as error:
                self.error = self.error or error

        threads = [threading.Thread(target=work, args=item) for item in self.workers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in self.workers.values():
            worker.close()
        if self.error is not None:
            raise self.error
        return outcomes

    def losses(self, outcomes, num_steps):
        last = len(self.plan.stages) - 1
        found = []
        for step in range(num_steps):
            steps = [outcomes[place][step] for place in outcomes if place.stage == last]
            found.append(
                sum(each.loss * each.num_samples for each in steps if each.num_samples)
                / sum(each.num_samples for each in steps)
            )
        return found

    def model(self, replica=0):
        return {
            name.removeprefix("model/"): tensor
            for place, worker in self.workers.items()
            if place.replica == replica
            for name, tensor in worker.training.model_tensors().items()
            if name.startswith("model/")
        }


def assert_same(pipeline, expected, *, atol=1e-5):
    for replica in range(pipeline.plan.num_replicas):
        model = pipeline.model(replica)
        assert model.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(model[name].double(), tensor.double(), atol=atol, rtol=0), name
    one = pipeline.model(0)
    for replica in range(1, pipeline.plan.num_replicas):
        assert all(torch.equal(tensor, one[name]) for name, tensor in pipeline.model(replica).items())


SHAPES = [(1, 1), (3, 1), (2, 2), (3, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "num_replicas"), SHAPES)
@pytest.mark.parametrize("name", ["mlp", "gpt", "cells"])
def test_training_equals_one_process_on_whole_batches(name, num_stages, num_replicas):
    """Twenty steps with SGD and momentum, or Adam: the same losses to 1e-6, the same model."""
    job = job_of()
    parts = task_parts(TASKS[name], job.seed)
    expected, _ = reference(parts, job, 20)
    pipeline = Pipeline(TASKS[name], job, num_stages, num_replicas)
    outcomes = pipeline.run(20)
    assert pipeline.losses(outcomes, 20) == pytest.approx(expected, abs=1e-6, rel=0)
    assert_same(pipeline, parts.model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "num_replicas"), SHAPES)
def test_training_with_batch_normalisation_equals_one_process_on_the_same_micro_batches(num_stages, num_replicas):
    job = job_of(batch=12, epochs=5)
    parts = task_parts(TASKS["convolutional"], job.seed)
    expected, _ = reference(parts, job, 20, num_replicas=num_replicas, micro_batch_size=3)
    pipeline = Pipeline(TASKS["convolutional"], job, num_stages, num_replicas, micro_batch_size=3)
    outcomes = pipeline.run(20)
    assert pipeline.losses(outcomes, 20) == pytest.approx(expected, abs=1e-6, rel=0)
    assert_same(pipeline, parts.model.state_dict())
    assert int(pipeline.model()["1.num_batches_tracked"]) == 20


@pytest.mark.parametrize(("num_stages", "num_replicas"), SHAPES)
def test_gradients_equal_those_of_one_process(num_stages, num_replicas):
    job = job_of()
    parts = task_parts(TASKS["gpt"], job.seed)
    _, gradients = reference(parts, job, 1)
    names = {id(parameter): name for name, parameter in parts.model.named_parameters()}
    expected = {
        names[id(parameter)]: gradient
        for parameter, gradient in zip(parts.model.parameters(), gradients[0], strict=True)
    }
    pipeline = Pipeline(TASKS["gpt"], job, num_stages, num_replicas)
    pipeline.run(1)
    found = {}
    for worker in pipeline.workers.values():
        stage = worker.training.stage
        found |= {stage.names[name][0]: parameter.grad for name, parameter in stage.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, atol=1e-6, rtol=0), name


@pytest.mark.slow
def test_every_sample_is_used_once_an_epoch_whatever_is_left_for_its_last_batch():
    """40 samples in batches of 16: the last has 8, fewer than 3 x 4 micro-batches of 2 hold; then one of 3 samples."""
    job = job_of(batch=16, epochs=2)
    parts = task_parts(TASKS["mlp"], job.seed)
    expected, _ = reference(parts, job, 6)
    pipeline = Pipeline(TASKS["mlp"], job, 2, 3)
    outcomes = pipeline.run(6)
    assert pipeline.losses(outcomes, 6) == pytest.approx(expected, abs=1e-6, rel=0)
    worked = [sum(outcomes[Place(1, replica)][step].num_samples for replica in range(3)) for step in range(6)]
    assert worked == [16, 16, 8, 16, 16, 8]


def test_a_batch_smaller_than_the_replicas_leaves_some_of_them_without_work():
    task = Task(
        model=TASKS["mlp"].model,
        dataset=lambda: tuple(array[:17] for array in TASKS["mlp"].dataset()),
        loss=TASKS["mlp"].loss,
        optimizer=TASKS["mlp"].optimizer,
    )
    job = job_of(batch=16, epochs=2)
    expected, _ = reference(task_parts(task, job.seed), job, 4)
    pipeline = Pipeline(task, job, 2, 3)
    outcomes = pipeline.run(4)
    assert pipeline.losses(outcomes, 4) == pytest.approx(expected, abs=1e-6, rel=0)
    assert [outcomes[Place(0, replica)][1].num_samples for replica in range(3)] == [0, 0, 1]


@pytest.mark.slow
def test_chance_depends_on_the_place_and_not_on_the_run():
    job = job_of()
    runs = []
    # The generator is the process's; in truth every place has a process of its own.
    alone = threading.Lock()
    for _ in range(2):
        pipeline = Pipeline(TASKS["dropping"], job, 3, 2)
        for worker in pipeline.workers.values():
            worker._forward = one_at_a_time(worker._forward, alone)
        outcomes = pipeline.run(8)
        runs.append((pipeline.losses(outcomes, 8), pipeline.model()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(tensor, runs[1][1][name]) for name, tensor in runs[0][1].items())


def test_what_was_read_is_gone():
    pipeline = Pipeline(TASKS["mlp"], job_of(), 3, 1)
    pipeline.run(5)
    assert pipeline.store.keys("") == []
    assert pipeline.store.requests().num_lists == 1


@pytest.mark.parametrize(("num_stages", "num_replicas"), SHAPES)
def test_the_last_step_is_told_with_the_messages(num_stages, num_replicas):
    """Only the first stage's first replica decides; everyone finds it in the same step."""
    pipeline = Pipeline(TASKS["mlp"], job_of(), num_stages, num_replicas)
    outcomes = pipeline.run(20, ends_at=4)
    assert {len(found) for found in outcomes.values()} == {4}
    assert {worker.position.step for worker in pipeline.workers.values()} == {4}


def test_the_ids_of_every_step_are_chained_on_the_first_stage():
    job = job_of()
    pipeline = Pipeline(TASKS["mlp"], job, 2, 2)
    outcomes = pipeline.run(5)
    schedule = SampleSchedule(num_samples=40, global_batch_size=8, num_epochs=4, seed=job.seed)
    assert [each.batch.ids.tolist() for each in outcomes[Place(1, 1)]] == [
        schedule.batch(step).ids.tolist() for step in range(5)
    ]
    digests = {place: worker.position.ids_digest for place, worker in pipeline.workers.items()}
    assert digests[Place(0, 0)] == digests[Place(0, 1)] != ""
    assert digests[Place(1, 0)] == ""


def test_a_step_that_fails_leaves_the_place_as_it_was():
    job = job_of()
    whole = Pipeline(TASKS["convolutional"], job, 1, 1)
    whole.run(3)
    pipeline = Pipeline(TASKS["convolutional"], job, 1, 1)
    (worker,) = pipeline.workers.values()
    pipeline.run(2)
    loss, calls = worker._loss, []

    def fails(output, targets):
        calls.append(1)
        if len(calls) == 3:
            raise OSError("gone")
        return loss(output, targets)

    worker._loss = fails
    with pytest.raises(OSError, match="gone"):
        pipeline.run(1)
    assert worker.position.step == 2
    worker._loss, pipeline.error = loss, None
    pipeline.run(1)
    expected = whole.model()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in pipeline.model().items())


def test_the_time_of_a_step_is_told_by_lane():
    outcomes = Pipeline(TASKS["mlp"], job_of(), 2, 2).run(2)
    lanes = outcomes[Place(0, 1)][1].lanes
    assert lanes.step_s > 0
    assert min(lanes.forward_s, lanes.backward_s, lanes.upload_s, lanes.download_s, lanes.sync_s) > 0
    assert lanes.forward_s + lanes.backward_s + lanes.sync_s + lanes.update_s + lanes.flush_s <= 1.001 * lanes.step_s


def test_plans_that_do_not_fit_the_job_are_refused():
    parts = task_parts(TASKS["mlp"], 0)
    with pytest.raises(InvalidRequest, match="for 9 layers, but the model has 5"):
        PipelineWorker(
            parts=parts,
            job=job_of(),
            plan=plan_of(9, 3, 1, num_micro_batches=4, micro_batch_size=2),
            place=Place(0, 0),
            wire=memory_store(),
            exchange=None,
            check=nothing,
        )


def test_a_batch_that_is_larger_than_the_plan_says_takes_more_micro_batches():
    planned, larger = (Pipeline(TASKS["mlp"], job_of(), 2, 1, num_micro_batches=count) for count in (4, 2))
    assert planned.losses(planned.run(3), 3) == larger.losses(larger.run(3), 3)


def test_a_batch_schedule_is_followed_and_the_plan_may_change_between_steps():
    job = job_of(batch=8, epochs=3, batch_schedule=(BatchPhase(from_epoch=1, global_batch_size=16),))
    pipeline = Pipeline(TASKS["mlp"], job, 2, 1)
    outcomes = pipeline.run(pipeline.workers[Place(0, 0)].total_steps)[Place(0, 0)]
    for epoch in range(3):
        ids = [int(sample) for each in outcomes if each.batch.epoch == epoch for sample in each.batch.ids]
        assert sorted(ids) == list(range(len(ids)))
        assert {each.batch.global_batch_size for each in outcomes if each.batch.epoch == epoch} == {16 if epoch else 8}
    worker = pipeline.workers[Place(0, 0)]
    assert worker.is_over
    assert worker.global_batch_size == 16
    other = plan_of(worker.plan.stages[-1].end_layer, 2, 1, num_micro_batches=1, micro_batch_size=5)
    worker.set_plan(other)
    assert worker.plan == other
    with pytest.raises(InvalidRequest, match="cuts the model in another way"):
        worker.set_plan(plan_of(worker.plan.stages[-1].end_layer, 1, 1, num_micro_batches=1, micro_batch_size=5))


def test_only_tasks_can_be_taken_apart():
    with pytest.raises(InvalidRequest, match=r"only a declared st.Task"):
        task_parts(lambda ctx: None, 0)
    with pytest.raises(InvalidRequest, match="must be a factory of a torch optimizer"):
        Pipeline(
            Task(model=TASKS["mlp"].model, dataset=TASKS["mlp"].dataset, loss=TASKS["mlp"].loss, optimizer=list),
            job_of(),
            1,
            1,
        )
