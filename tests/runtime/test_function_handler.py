import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load

import springtide
from kits.runtime.function_plane import KEYS, SOURCE, Context, FunctionPlane, plan_of
from springtide.core.errors import BackendError, CheckpointError, InvalidRequest, ObjectMissing, PeerLost, StorageError
from springtide.core.wire.functions import FunctionOrder, FunctionReport, FunctionResult, Place, ProfileOrder
from springtide.runtime.function_handler import ProfileResult, code_of, handler, open_stores, read_order
from springtide.storage.datasets.manifest import DatasetLost
from springtide.storage.stores.linked import DuplexLink, LinkedStore
from springtide.storage.stores.memory import MemoryStore
from springtide.storage.stores.open import memory_store


def event_of(order):
    return msgspec.json.decode(msgspec.json.encode(order))


def make_order(**fields):
    known = {"job_id": "job-1", "store_url": "memory://none", "prefix": "jobs/job-1", "generation": 1, "attempt": 0}
    return FunctionOrder(**{**known, "stage": 0, "replica": 0, "incarnation": 0, **fields})


def test_an_order_comes_as_json_of_either_kind():
    order = make_order(stage=2, is_successor=True)
    assert read_order(event_of(order)) == order
    profile = ProfileOrder(job_id="job-1", store_url="memory://none", prefix="jobs/job-1", micro_batch_size=4)
    assert read_order(event_of(profile)) == profile


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({}, "no order"),
        (None, "no order"),
        ({"order": "train"}, "no order"),
        ({**event_of(make_order()), "stage": -1}, "must not be negative"),
        ({**event_of(make_order()), "stage": "0"}, "no order"),
        ({**event_of(make_order()), "prefix": "x" * 70_000}, "at most 65,536 bytes"),
        ({"order": object()}, "no order"),
    ],
)
def test_what_is_no_order_is_refused(event, sentence):
    with pytest.raises(InvalidRequest, match=sentence):
        read_order(event)


def test_both_stores_share_the_functions_link():
    environment = DuplexLink(up_bytes_per_s=1e6, down_bytes_per_s=2e6, latency_s=0.001).to_environment()
    stores = open_stores("memory://one", "memory://two", environment)
    assert all(isinstance(store, LinkedStore) for store in stores)
    assert stores[0]._lanes is stores[1]._lanes
    assert [type(store.raw) for store in open_stores("memory://one", "", {})] == [MemoryStore]
    # One that is opened later is behind the same link.
    assert stores[0].beside(stores[1].store)._lanes is stores[0]._lanes


@pytest.mark.slow
def test_a_warm_process_keeps_nothing_of_the_order_before(monkeypatch, tmp_path):
    """The same file's name, another text: the second run must see its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = 0.0
    before = set(sys.modules), list(sys.path)
    for factor in ("1.0", "2.0"):
        source = SOURCE.replace("loss=nn.functional.cross_entropy", f"loss=lambda x, y: {factor} * x.square().mean()")
        plane = FunctionPlane(f"memory://{uuid.uuid4().hex}", source=source, plan=plan_of(1, 1, num_micro_batches=4))
        plane.start()
        (result,) = plane.run().values()
        assert result.outcome == "finished"
        first = plane.losses()[0][1]
        expected = first if factor == "1.0" else 2 * expected
    assert first == pytest.approx(expected)
    leaked = {name for name in set(sys.modules) - before[0] if name.startswith("springtide_user")}
    assert not leaked
    assert sys.path == before[1]
    assert list(tmp_path.glob("springtide-*")) == []


def test_what_user_code_sets_for_the_process_is_as_before_afterwards():
    changes = (
        "import os\nos.environ['LEAKED'] = '1'\nos.chdir('/')\n"
        "torch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(True)\n"
    )
    plane = FunctionPlane(
        f"memory://{uuid.uuid4().hex}", source=SOURCE + changes, plan=plan_of(1, 1, num_micro_batches=4)
    )
    before = os.getcwd()
    plane.start()
    plane.run()
    assert "LEAKED" not in os.environ
    assert os.getcwd() == before
    assert torch.get_default_dtype() == torch.float32


def test_a_job_that_is_gone_is_one_sentence(capfd):
    store = memory_store(name := uuid.uuid4().hex)
    result = msgspec.convert(handler(event_of(make_order(store_url=f"memory://{name}")), Context()), FunctionResult)
    assert result.outcome == "failed"
    assert result.error == "StorageError: there is no job under jobs/job-1/job; was it removed?"
    report = msgspec.json.decode(store.get(KEYS.report(Place(0, 0), 0)), type=FunctionReport)
    assert (report.phase, report.error) == ("failed", result.error)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StorageError("the bucket is gone"), "store"),
        (ObjectMissing("no such key"), "store"),
        (PeerLost("late"), "store"),
        (BackendError("no socket"), "store"),
        (CheckpointError("torn"), "store"),
        (DatasetLost("the dataset 'digits' has vanished"), "data"),
        (InvalidRequest("the plan is for 7 layers"), "user_code"),
        (ValueError("StorageError: told by the user's code"), "user_code"),
        (SystemExit(1), "user_code"),
    ],
)
def test_an_error_s_code_says_whether_another_function_may_fare_better(error, code):
    assert code_of(error) == code


def test_a_broken_bundle_is_one_sentence(capfd):
    plane = FunctionPlane(f"memory://{uuid.uuid4().hex}", plan=plan_of(1, 1, num_micro_batches=4))
    plane.store.put(KEYS.bundle, b"PK no zip")
    plane.start()
    (result,) = plane.run().values()
    assert result.outcome == "failed"
    assert result.error.startswith("StorageError: the bundle is broken")


def test_code_that_calls_exit_has_failed(capfd):
    source = SOURCE + "\nimport sys\nsys.exit(3)\n"
    plane = FunctionPlane(f"memory://{uuid.uuid4().hex}", source=source, plan=plan_of(1, 1, num_micro_batches=4))
    plane.start()
    (result,) = plane.run().values()
    assert result.outcome == "failed"
    assert result.error.startswith("SystemExit: 3 (task.py:")


def test_a_training_function_is_told_why_it_cannot_run(capfd):
    source = "import springtide as st\n\n@st.train\ndef task(ctx):\n    pass\n"
    plane = FunctionPlane(f"memory://{uuid.uuid4().hex}", source=source, plan=plan_of(1, 1, num_micro_batches=4))
    plane.start()
    (result,) = plane.run().values()
    assert result.outcome == "failed"
    assert result.error.startswith("InvalidRequest: only a declared st.Task can run on functions")


def test_a_profile_is_taken_where_the_function_runs():
    plane = FunctionPlane(f"memory://{uuid.uuid4().hex}")
    order = ProfileOrder(job_id="job-1", store_url=plane.url, prefix=KEYS.prefix, micro_batch_size=4, num_rounds=2)
    result = msgspec.convert(handler(event_of(order), Context()), ProfileResult)
    assert result.error == ""
    assert result.num_samples == 44
    assert result.profile is not None
    assert result.profile.memory_mb == (512,)
    assert [layer.name for layer in result.profile.layers] == [str(index) for index in range(6)]


def test_a_profile_that_fails_says_why(capfd):
    plane = FunctionPlane(f"memory://{uuid.uuid4().hex}", source="task = 3\n")
    order = ProfileOrder(job_id="job-1", store_url=plane.url, prefix=KEYS.prefix, micro_batch_size=4)
    result = msgspec.convert(handler(event_of(order), Context()), ProfileResult)
    assert result.profile is None
    assert result.error.startswith("InvalidRequest: pipeline is no st.Task")


RUN = """
import json, sys
from springtide.runtime.function_handler import handler

class Context:
    memory_limit_in_mb = "512"
    def get_remaining_time_in_millis(self):
        return 600_000

print(json.dumps(handler(json.loads(sys.argv[1]), Context())), file=sys.stderr)
"""


class Processes(FunctionPlane):
    """The same coordinator, but every function is a process."""

    def start_process(self, place, incarnation):
        event = msgspec.json.encode(self.order(place, incarnation)).decode()
        source = str(Path(springtide.__file__).parents[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
        return subprocess.Popen(
            [sys.executable, "-c", RUN, event],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_over_files_survive_a_kill_bit_for_bit(tmp_path):
    """Two stages, two replicas; one process is killed as the kernel kills, another takes its place."""
    models = []
    for kills in (False, True):
        plane = Processes(f"file://{tmp_path}/{kills}", epochs=10)
        plane.write(incarnations={str(place): 0 for place in plane.places})
        processes = {place: plane.start_process(place, 0) for place in plane.places}
        try:
            if kills:
                victim = Place(1, 0)
                deadline_s = time.monotonic() + 60
                while time.monotonic() < deadline_s:
                    try:
                        if plane.report(victim).step >= 3:
                            break
                    except ObjectMissing:
                        pass
                    time.sleep(0.02)
                os.kill(processes[victim].pid, signal.SIGKILL)
                processes[victim].communicate()
                plane.write(
                    attempt=1, restore_step=plane.newest_saved(), incarnations={**plane.record.incarnations, "1.0": 1}
                )
                processes[victim] = plane.start_process(victim, 1)
            ends = {place: process.communicate(timeout=120) for place, process in processes.items()}
        finally:
            for process in processes.values():
                process.kill()
        results = [msgspec.json.decode(err.splitlines()[-1], type=FunctionResult) for _, err in ends.values()]
        assert {(result.outcome, result.step) for result in results} == {("finished", 30)}
        model = {}
        for stage in range(2):
            model |= load(plane.store.get(KEYS.state(30, stage)))
        models.append(model)
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[1][name], tensor) for name, tensor in models[0].items())
