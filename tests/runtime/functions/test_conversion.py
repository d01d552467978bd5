"""A checkpoint of machines becomes the state from which functions start: same tensors, same samples, same losses."""

import hashlib
import json
import uuid

import msgspec
import pytest
import torch

from kits.runtime.function_plane import KEYS, NUM_LAYERS, SOURCE, FunctionPlane, plan_of
from springtide.core.errors import CheckpointError, InvalidRequest
from springtide.core.wire.functions import ConversionOrder, ConversionResult, Place
from springtide.core.workload import Entrypoint
from springtide.runtime.data.shards import SampleSchedule, seed_everything
from springtide.runtime.elastic.checkpoint import FILES, StateSnapshot, list_checkpoints, write_checkpoint
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.functions.conversion import convert_checkpoint, run_conversion
from springtide.runtime.functions.pipeline.state import load_state
from springtide.runtime.functions.pipeline.task_parts import stage_training, task_parts
from springtide.runtime.functions.pipeline.worker import PipelineWorker
from springtide.runtime.functions.place_worker import task_worker
from springtide.runtime.models.named_tensors import TrainingState
from springtide.runtime.process.entry import load_object
from springtide.storage.bundles import pack

# Without batch normalisation a step of micro-batches is the same step; with Adam every parameter has two moments.
PLAIN = SOURCE.replace("nn.BatchNorm1d(9), ", "nn.Tanh(), ").replace(
    "torch.optim.SGD(p, lr=0.05, momentum=0.9)", "torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)"
)
MOVED_AT = 4


class OnMachines:
    """One worker on a machine, in this process: trains the task's steps, and saves and logs as a worker does."""

    def __init__(self, tmp_path, source):
        self.work_dir = tmp_path / "job"
        self.work_dir.mkdir()
        path = tmp_path / "task.py"
        path.write_text(source)
        self.plane = FunctionPlane(f"memory://{uuid.uuid4().hex}", source=source, plan=plan_of(2, 1))
        job = self.plane.job
        self.task = load_object(Entrypoint(source_path=str(path), object_name="task"), f"machines_{uuid.uuid4().hex}")
        self.parts = task_parts(self.task, job.seed)
        self.optimizer = self.task.optimizer(self.parts.model.parameters())
        self.state = TrainingState(self.parts.model, self.optimizer, torch.device("cpu"))
        self.schedule = SampleSchedule(num_samples=44, global_batch_size=16, num_epochs=3, seed=job.seed)
        self.step = 0
        self.losses = []

    def train(self, num_steps):
        for _ in range(num_steps):
            batch = self.schedule.batch(self.step)
            seed_everything(self.plane.job.seed, self.step)
            x, y = self.parts.fetch([int(one) for one in batch.ids])
            self.optimizer.zero_grad()
            loss = self.parts.loss(self.parts.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.losses.append(float(loss.detach()))
            with (self.work_dir / "steps.jsonl").open("a") as log:
                record = {"generation": 1, "step": self.step, "loss": self.losses[-1], "ids_digest": batch.ids_digest}
                log.write(json.dumps(record) + "\n")

    def save(self, generation=2, **cursor):
        snapshot = StateSnapshot()
        found = {"step": self.step, "num_seen": self.schedule.num_seen(self.step), "global_batch_size": 16, **cursor}
        snapshot.take(self.state, Cursor(**found), 0)
        return write_checkpoint(self.work_dir, snapshot, generation)

    def order(self, **fields):
        given = {"store_url": self.plane.url, "prefix": KEYS.prefix, "work_dir": str(self.work_dir)}
        given |= {"num_layers": NUM_LAYERS, "result_path": str(self.work_dir / "result.json")}
        return ConversionOrder(**{**given, **fields})

    def digest(self, num_steps):
        digest = ""
        for step in range(num_steps):
            digest = hashlib.sha256((digest + self.schedule.batch(step).ids_digest).encode()).hexdigest()[:16]
        return digest


@pytest.fixture
def machines(tmp_path):
    return OnMachines(tmp_path, PLAIN)


def test_the_rest_on_functions_has_the_losses_and_the_samples_of_the_undisturbed_run(machines):
    machines.train(MOVED_AT)
    machines.save()
    moved = convert_checkpoint(machines.order())
    assert moved == ConversionResult(step=MOVED_AT, ids_digest=machines.digest(MOVED_AT))
    machines.train(9 - MOVED_AT)
    plane = machines.plane
    worker = PipelineWorker(
        parts=task_parts(machines.task, plane.job.seed + 1),
        job=plane.job,
        plan=plan_of(1, 1),
        place=Place(0, 0),
        wire=plane.store,
        check=lambda: None,
    )
    worker.load_state(plane.store, KEYS, MOVED_AT)
    seen, losses = [], []
    while not worker.is_over:
        done = worker.run_step(f"{KEYS.prefix}/wire/3.0/{worker.position.step:09d}")
        losses.append(done.loss)
        seen.append(done.batch.ids.tolist())
    worker.close()
    assert seen == [machines.schedule.batch(step).ids.tolist() for step in range(MOVED_AT, 9)]
    assert worker.position.ids_digest == machines.digest(9)
    assert losses == pytest.approx(machines.losses[MOVED_AT:], rel=1e-5)


@pytest.mark.parametrize("cuts", [[2], [1, 3, 5]])
def test_the_stages_of_any_plan_take_their_part(machines, cuts):
    machines.train(MOVED_AT)
    machines.save()
    convert_checkpoint(machines.order())
    parts = task_parts(machines.task, 99)
    model, moments = machines.parts.model.state_dict(), machines.optimizer.state
    names = dict(machines.parts.model.named_parameters())
    for stage, (first, end) in enumerate(zip([0, *cuts], [*cuts, NUM_LAYERS], strict=True)):
        training = stage_training(parts, first, end)
        position = load_state(machines.plane.store, KEYS, MOVED_AT, stage, training)
        assert position.num_seen == 16 + 16 + 12 + 16
        for name, parameter in training.parameters.items():
            assert torch.equal(parameter, model[name])
            for key, value in moments[names[name]].items():
                assert torch.equal(training.optimizer.state[parameter][key], value)


def test_running_statistics_and_momentum_come_over_too(tmp_path):
    machines = OnMachines(tmp_path, SOURCE)
    machines.train(2)
    machines.save()
    convert_checkpoint(machines.order())
    training = stage_training(task_parts(machines.task, 99), 0, NUM_LAYERS)
    load_state(machines.plane.store, KEYS, 2, 0, training)
    expected = machines.parts.model.state_dict()
    assert all(torch.equal(tensor, expected[key[6:]]) for key, tensor in training.model_tensors().items())
    assert int(expected["1.num_batches_tracked"]) == 2


WHOLE = PLAIN.replace("    return made\n", "    return Whole(made)\n").replace(
    "def model():",
    "class Whole(nn.Module):\n    def __init__(self, inner):\n        super().__init__()\n"
    "        self.inner = inner\n\n    def forward(self, x):\n        return self.inner(x)\n\n\ndef model():",
)


def test_a_model_that_is_no_list_of_layers_comes_over_whole(tmp_path):
    machines = OnMachines(tmp_path, WHOLE)
    machines.train(MOVED_AT)
    machines.save()
    convert_checkpoint(machines.order(num_layers=1))
    machines.train(1)
    plane = machines.plane
    worker = task_worker(
        machines.task, plane.job, None, Place(0, 0), store=plane.store, wire=plane.store, check=lambda: None
    )
    worker.load_state(plane.store, KEYS, MOVED_AT)
    assert worker.run_step(f"{KEYS.prefix}/wire/3.0/0").loss == pytest.approx(machines.losses[MOVED_AT], rel=1e-5)
    assert worker.position.ids_digest == machines.digest(MOVED_AT + 1)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(machines):
    machines.train(2)
    machines.save()
    machines.train(2)
    newest = machines.save()
    (machines.work_dir / "checkpoints" / newest.path.rpartition("/")[2] / FILES[0]).write_bytes(b"torn")
    assert convert_checkpoint(machines.order()).step == 2


def test_other_samples_than_were_trained_are_refused(machines):
    machines.train(3)
    machines.save()
    log = machines.work_dir / "steps.jsonl"
    log.write_text(log.read_text().replace(machines.schedule.batch(1).ids_digest, "0" * 16))
    with pytest.raises(CheckpointError, match="step 2 was trained on other samples"):
        convert_checkpoint(machines.order())


def test_a_batch_that_has_changed_is_refused(machines):
    machines.train(3)
    machines.save(num_seen=60)
    with pytest.raises(CheckpointError, match="the size of its batch, or its data, has changed"):
        convert_checkpoint(machines.order())


def test_a_checkpoint_of_another_model_is_refused_and_leaves_no_state(machines):
    machines.train(1)
    machines.save()
    other = PLAIN.replace("nn.Linear(8, 3)", "nn.Linear(8, 4)")
    machines.plane.store.put(KEYS.bundle, pack("task.py", other))
    with pytest.raises(CheckpointError, match="was saved as float32"):
        convert_checkpoint(machines.order())
    assert not machines.plane.store.keys(f"{KEYS.prefix}/state/")


def test_what_is_prepared_beside_the_optimizer_is_refused(machines):
    machines.train(1)
    scheduler = torch.optim.lr_scheduler.StepLR(machines.optimizer, 1)
    machines.state = TrainingState(machines.parts.model, machines.optimizer, torch.device("cpu"), [scheduler])
    machines.save()
    with pytest.raises(CheckpointError, match="prepared objects"):
        convert_checkpoint(machines.order())


GROWING = WHOLE.replace(
    "    def forward(self, x):", "    def begin_epoch(self, epoch):\n        pass\n\n    def forward(self, x):"
)


def test_a_model_that_grows_is_refused(tmp_path):
    machines = OnMachines(tmp_path, GROWING)
    machines.train(1)
    machines.save()
    with pytest.raises(InvalidRequest, match="grows"):
        convert_checkpoint(machines.order(num_layers=1))


def test_the_process_says_in_its_result_what_is_wrong(machines):
    order = machines.order()
    assert run_conversion(order) == 1
    result = msgspec.json.decode((machines.work_dir / "result.json").read_bytes(), type=ConversionResult)
    assert result.error == "no checkpoint can be read: there is none"
    assert list_checkpoints(machines.work_dir) == []
