"""Workers that share no file system: the same bits, the same guarantees, over tcp and a real S3 API."""

from __future__ import annotations

import os
import secrets
import signal

import numpy as np
import pytest
from msgspec.structs import replace

from kits.runtime.pod_plane import PodPlane, kill_worker
from kits.runtime.runtime_plane import HELD_TRAIN, make_job
from kits.runtime.slow_link import SlowLink
from kits.runtime.tiny_wheels import make_wheel
from kits.servers import running_s3
from kits.service.sent_folders import folder_of_tree, sent_tree
from springtide.core.wire.workers import CheckpointWritten, Failed, Finished, Left, Preempt, Preparing, Switched
from springtide.core.workload import Packages, ReplicaId
from springtide.runtime.process.exits import EXIT_GRACE
from springtide.storage.datasets.store import put_dataset
from springtide.storage.folders.contents import ContentDirectory, write_archive
from springtide.storage.folders.tree import folder_name
from springtide.storage.step_lines import WORD, lines_above, unpack_lines

pytestmark = pytest.mark.slow
NUM_STEPS = 39


@pytest.fixture(scope="module")
def s3():
    with running_s3(buckets=("tests",)) as server:
        yield server


@pytest.fixture
def make_pods(s3, tmp_path, monkeypatch):
    """A function that makes a plane whose job's source is in the store."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    planes = []

    def make(source=HELD_TRAIN, *, step_s=0.05, optimizer="adamw", store_url="", lease_s=30.0, **fields):
        directory = tmp_path / f"p{len(planes)}"
        directory.mkdir()
        job = make_job(directory, source, **{"num_epochs": 3, **fields})
        url = store_url or s3.s3_url("tests", secrets.token_hex(6))
        plane = PodPlane(
            directory,
            url,
            job,
            lease_s=lease_s,
            environment={"STEP_S": str(step_s), "OPTIMIZER": optimizer, "HOLD": str(directory / "hold")},
        )
        key = plane.store.put_source("main.py", source.encode())
        plane.job = replace(job, entrypoint=replace(job.entrypoint, source_path=key))
        planes.append(plane)
        return plane

    yield make
    for plane in planes:
        plane.close()


def check_steps(plane, num_steps=NUM_STEPS):
    steps = plane.steps()
    assert [record["step"] for record in steps] == list(range(1, num_steps + 1)), plane.logs()
    return [(record["step"], record["loss"], record["ids_digest"]) for record in steps]


def finish(plane):
    plane.wait_finished()
    return plane.result_hash(), check_steps(plane)


def test_pods_grow_shrink_and_lose_members_and_the_result_is_the_same_bits(make_pods):
    single = make_pods(step_s=0.0)
    single.start_group("job.0")
    expected, losses = finish(single)

    plane = make_pods(step_s=0.15)
    plane.start_group("job.0", "job.1")
    pids = {name: plane.worker_pid(name) for name in ("job.0", "job.1")}
    plane.wait_step(3)
    plane.grow("job.2")
    assert plane.of(Switched, "job.2", direction="grow")
    assert {name: plane.worker_pid(name) for name in pids} == pids
    plane.wait_step(8)
    # The first member, in whose pod the others meet, leaves; then another one dies.
    plane.form("job.1", "job.2")
    plane.wait_exit("job.0")
    assert plane.of(Left, "job.0")
    plane.wait_step(12)
    kill_worker(plane, "job.2")
    plane.wait_exit("job.2", code=137)
    plane.form("job.1", forced=True)
    assert plane.worker_pid("job.1") == pids["job.1"]
    assert finish(plane) == (expected, losses)
    (finished,) = plane.of(Finished, "job.1")
    assert finished.artifact_path == plane.store.artifacts()["model.safetensors"]
    for name in ("job.0", "job.1", "job.2"):
        plane.store.read_log(ReplicaId(name))


def test_a_hook_takes_one_member_away_and_the_others_go_on(make_pods):
    plane = make_pods(step_s=0.15)
    plane.start_group("job.0", "job.1", "job.2")
    survivor = plane.worker_pid("job.1")
    plane.wait_step(3)
    hook = plane.prestop("job.0")
    plane.wait_exit("job.0")
    assert hook.wait(30) == 0
    assert plane.of(Left, "job.0")
    assert plane.of(CheckpointWritten, "job.0")
    plane.form("job.1", "job.2", forced=True)
    assert plane.of(Switched, "job.1", direction="recover")
    # The same by the signal alone.
    plane.signal("job.2", signal.SIGTERM)
    plane.wait_exit("job.2")
    plane.form("job.1", forced=True)
    assert plane.worker_pid("job.1") == survivor
    assert not plane.of(Failed)
    finish(plane)


def test_a_member_is_lost_while_a_group_forms_and_the_rest_forms_another_one(make_pods):
    plane = make_pods(step_s=0.15)
    plane.start_group("job.0")
    survivor = plane.worker_pid("job.0")
    plane.wait_step(3)
    with plane.held():
        plane.start("job.1", "job.2")
        plane.wait_ready("job.1", "job.2")
    # One joiner does not answer any more, without a word: those who wait for it are told to go on without it.
    kill_worker(plane, "job.2", signal.SIGSTOP)
    plane.form("job.2", "job.0", "job.1", wait=False)
    plane.wait_step(plane.step() + 3)
    plane.form("job.0", "job.1", forced=True, untold=("job.2",))
    assert plane.worker_pid("job.0") == survivor
    plane.form("job.1", wait=False, forced=True, untold=("job.2", "job.0"))
    kill_worker(plane, "job.0")
    plane.wait_switched("job.1")
    finish(plane)


def test_the_last_member_saves_before_it_leaves_and_another_one_goes_on_from_there(make_pods):
    plane = make_pods(step_s=0.1)
    plane.start_group("job.0")
    plane.wait_step(5)
    hook = plane.prestop("job.0")
    plane.wait_exit("job.0")
    assert hook.wait(30) == 0
    (checkpoint,) = plane.store.checkpoints()
    assert checkpoint.step >= 5
    assert [report.checkpoint for report in plane.of(CheckpointWritten)] == [checkpoint]
    plane.members = ()
    plane.generation += 1
    plane.store.raise_fence(plane.generation)
    plane.start_group("job.1")
    assert plane.of(Switched, "job.1", direction="resume")[0].step >= checkpoint.step
    finish(plane)


def test_all_members_are_taken_away_at_once_and_the_newest_state_is_kept(make_pods):
    plane = make_pods(step_s=0.1)
    plane.start_group("job.0", "job.1")
    plane.wait_step(5)
    hooks = [plane.prestop(name) for name in ("job.0", "job.1")]
    plane.wait_exit("job.0", "job.1")
    assert [hook.wait(30) for hook in hooks] == [0, 0]
    newest = plane.store.checkpoints()[0]
    assert newest.step == max(left.step for left in plane.of(Left))
    assert [record["step"] for record in plane.steps()] == list(range(1, newest.step + 1))


def test_a_preempted_group_commits_one_checkpoint_as_the_new_generation(make_pods):
    plane = make_pods(step_s=0.1)
    plane.start_group("job.0", "job.1")
    plane.wait_step(4)
    plane.generation += 1
    plane.order(Preempt(generation=plane.generation, grace_s=30.0), "job.0", "job.1")
    plane.wait_exit("job.0", "job.1")
    (checkpoint,) = plane.store.checkpoints()
    assert checkpoint.generation == plane.generation
    assert plane.store.head().generation == plane.generation
    plane.members = ()
    plane.start("job.2", "job.3")
    plane.wait_ready("job.2", "job.3")
    plane.form("job.2", "job.3")
    finish(plane)


def test_a_leader_that_was_stopped_until_it_was_fenced_writes_nothing(make_pods):
    plane = make_pods(step_s=0.15, checkpoint_interval_s=0.2)
    plane.start_group("job.0", "job.1")
    plane.wait_step(3)
    plane.wait(lambda: plane.of(CheckpointWritten), "a checkpoint")
    kill_worker(plane, "job.0", signal.SIGSTOP)
    old = plane.generation
    plane.form("job.1", forced=True, untold=("job.0",))
    fenced = plane.store.head()
    kill_worker(plane, "job.0", signal.SIGCONT)
    finish(plane)
    head = plane.store.head()
    assert head.generation == plane.generation
    assert [entry for entry in head.logged if entry.generation <= old] == [
        entry for entry in fenced.logged if entry.generation <= old
    ]
    assert {kept.step for kept in head.checkpoints if kept.generation <= old} <= {
        kept.step for kept in fenced.checkpoints
    }


def is_checkpoint(line):
    return line.startswith(b"PUT") and b"/checkpoints/" in line


@pytest.fixture
def slow_link(s3):
    link = SlowLink(s3.host, s3.port, is_checkpoint)
    yield link
    link.close()


def url_through(link):
    return f"s3://tests/{secrets.token_hex(6)}?endpoint={link.endpoint}&region=us-east-1"


def test_steps_go_on_while_a_checkpoint_is_on_its_way_and_a_preemption_waits_for_it(make_pods, slow_link):
    plane = make_pods(step_s=0.05, checkpoint_interval_s=0.2, num_epochs=30, store_url=url_through(slow_link))
    plane.start_group("job.0", "job.1")
    assert slow_link.held.wait(60)
    plane.wait_step(plane.step() + 20)
    assert plane.store.checkpoints() == ()
    plane.generation += 1
    plane.order(Preempt(generation=plane.generation, grace_s=30.0), "job.0", "job.1")
    plane.wait_exit("job.1")
    slow_link.gate.set()
    plane.wait_exit("job.0")
    newest = plane.store.checkpoints()[0]
    assert (newest.generation, newest.step) == (plane.generation, plane.of(Left, "job.0")[0].step)


def test_a_checkpoint_that_takes_longer_than_the_grace_is_given_up_and_never_seen(make_pods, slow_link):
    plane = make_pods(step_s=0.05, num_epochs=30, store_url=url_through(slow_link))
    plane.start_group("job.0")
    plane.wait_step(3)
    plane.generation += 1
    plane.order(Preempt(generation=plane.generation, grace_s=2.0), "job.0")
    plane.wait_exit("job.0", code=EXIT_GRACE)
    assert slow_link.held.is_set()
    assert plane.store.checkpoints() == ()


def test_a_worker_that_dies_while_the_store_is_away_leaves_its_steps_on_its_output(make_pods, tmp_path):
    objects = tmp_path / "objects"
    plane = make_pods(step_s=0.02, num_epochs=200, store_url=f"file://{objects}")
    plane.start_group("job.0")
    plane.wait(lambda: plane.steps(), "the log's first steps")
    objects.rename(tmp_path / "elsewhere")
    # Whoever opens it would make it anew.
    objects.write_text("in the way")
    away = plane.step()
    plane.wait_step(away + 30)
    kill_worker(plane, "job.0")
    plane.wait_exit("job.0", code=137)
    last = plane.step()
    objects.unlink()
    (tmp_path / "elsewhere").rename(objects)
    # What the store has ends before what was told of last; what is lacking is on the output, as people see it, too.
    logged = [record["step"] for record in plane.steps()]
    assert logged == list(range(1, len(logged) + 1))
    assert len(logged) < last
    said = [line for line in (plane.directory / "job.0.out").read_text().splitlines() if line.startswith(WORD)]
    lines = unpack_lines(said)
    assert lines[0][0] == len(logged) + 1
    assert lines[-1][0] >= last
    plane.store.log_steps(plane.generation, lambda step: lines_above(lines, step))
    check_steps(plane, lines[-1][0])


SCRIPT = """
import json, os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"]) + 1])
dist.all_reduce(total)
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE", "SPRINGTIDE_GLOBAL_BATCH_SIZE")
print("told", os.environ["RANK"], total.item(), *(os.environ[name] for name in names), flush=True)
assert json.loads(os.environ["SPRINGTIDE_PARAMS"]) == {"rate": "0.5"}
dist.destroy_process_group()
"""


def test_a_script_across_pods_finds_its_group_by_torchruns_variables(make_pods):
    plane = make_pods(SCRIPT, params={"rate": "0.5"})
    plane.job = replace(plane.job, entrypoint=replace(plane.job.entrypoint, kind="script", object_name=""))
    plane.start_group("job.0", "job.1", batch=24)
    plane.wait_finished()
    for rank in (0, 1):
        output = plane.store.read_log(ReplicaId(f"job.{rank}")).decode()
        assert f"told {rank} 3.0 0 1 {rank} 2 24" in output


IN_A_FOLDER = """
import os
from pkg import helper
with open("../data.txt") as data, open(os.path.join(os.environ["SPRINGTIDE_OUT"], "result.txt"), "w") as out:
    out.write(f"{helper.VALUE} {data.read()} {os.path.basename(os.getcwd())} {os.environ['RANK']}")
"""


def test_a_script_in_a_pod_works_in_its_copy_of_the_folder_and_leaves_its_results(make_pods, tmp_path):
    plane = make_pods(IN_A_FOLDER)
    contents = ContentDirectory(tmp_path / "contents")
    files = {"run.py": IN_A_FOLDER.encode(), "pkg/helper.py": b"VALUE = 7\n", "data.txt": b"data"}
    tree = sent_tree(contents, files, ["logs"])
    folder = folder_of_tree(tree, "run.py", "logs")
    write_archive(contents.open, tree, tmp_path / "folder.zip")
    plane.store.store.put_file(plane.store.key(folder_name(folder)), tmp_path / "folder.zip")
    plane.job = replace(
        plane.job, entrypoint=replace(plane.job.entrypoint, kind="script", object_name="", folder=folder)
    )
    plane.start_group("job.0", "job.1")
    plane.wait_finished()
    assert list(plane.store.artifacts()) == ["result.txt"], plane.logs()
    assert plane.store.read_artifact("result.txt") == b"7 data logs 0"


PACKAGED = """
import os, tiny, torch
print("has tiny", tiny.VERSION, "in", os.path.basename(os.getcwd()), "environments" in tiny.__file__)
"""


def with_packages(plane, tmp_path, *lines):
    """A script with packages of its own, in a folder with a wheel."""
    wheel = make_wheel(tmp_path, "tiny", "1.0")
    # A module of the folder is not in the way of pip.
    files = {
        "run.py": PACKAGED.encode(),
        f"wheels/{wheel.name}": wheel.read_bytes(),
        "pip.py": b"raise ValueError\n",
    }
    tree = sent_tree(ContentDirectory(tmp_path / "contents"), files, ["here"])
    folder = folder_of_tree(tree, "run.py", "here")
    write_archive(ContentDirectory(tmp_path / "contents").open, tree, tmp_path / "folder.zip")
    plane.store.store.put_file(plane.store.key(folder_name(folder)), tmp_path / "folder.zip")
    entrypoint = replace(plane.job.entrypoint, kind="script", object_name="", folder=folder)
    plane.job = replace(plane.job, entrypoint=entrypoint, packages=Packages(requirements=lines))


def test_packages_of_a_pod_come_from_its_folder(make_pods, tmp_path):
    plane = make_pods(PACKAGED)
    with_packages(plane, tmp_path, "--no-index", "--find-links ./wheels", "tiny==1.0")
    plane.start_group("job.0")
    plane.wait_finished()
    assert "has tiny 1.0 in here True" in plane.store.read_log(ReplicaId("job.0")).decode()
    assert [report.reason for report in plane.of(Preparing)] == ["making an environment: 1 package", ""]


def test_packages_that_a_pod_cannot_have_are_told_with_what_is_in_the_way(make_pods, tmp_path):
    plane = make_pods(PACKAGED, env={"PIP_RETRIES": "1", "PIP_INDEX_URL": "http://127.0.0.1:1/simple"})
    with_packages(plane, tmp_path, "tiny==1.0")
    plane.start("job.0")
    plane.wait_exit("job.0", code=1)
    (failed,) = plane.of(Failed)
    assert "its packages cannot be installed: " in failed.error
    assert "pip could not reach where packages come from: is there a network" in failed.error


BROKEN = """
import helper

def fit(ctx):
    helper.fail()
"""


def test_what_goes_wrong_in_a_pod_is_said_where_people_look(make_pods):
    plane = make_pods(BROKEN)
    plane.store.put_source("helper.py", b"def fail():\n    raise ValueError('no such luck')\n")
    plane.start("job.0")
    plane.wait_exit("job.0", code=1)
    (failed,) = plane.of(Failed)
    assert "ValueError: no such luck" in failed.error
    assert "no such luck" in plane.store.read_log(ReplicaId("job.0")).decode()
    assert "no such luck" in (plane.directory / "job.0.out").read_text()
    assert "no such luck" in (plane.directory / "job.0" / "termination").read_text()


DATASET = """
import torch
import springtide as st

def fit(ctx):
    model, optimizer = ctx.prepare(torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for batch in ctx.batches(st.dataset("points")):
        ctx.step(((model(batch.x) - batch.y) ** 2).mean())
"""


def test_a_named_dataset_is_read_from_the_store_of_the_pods(make_pods):
    plane = make_pods(DATASET, global_batch_size=8, num_epochs=1)
    points = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
    arrays = {"x": points, "y": points.sum(1, keepdims=True)}
    put_dataset(plane.store.store, "points", arrays, at_unix_s=0.0, part_id="p")
    plane.start_group("job.0")
    plane.wait_finished()
    check_steps(plane, 2)
