"""The history stays bounded and in order, and the logs stay readable."""

from __future__ import annotations

import os
import threading

import pytest
from msgspec.structs import replace

from springtide.core.actions import EndJob, PreemptJob, ResizeJob, StartReplica
from springtide.core.errors import InvalidRequest, NotFound
from springtide.core.events import (
    JobResized,
    JobStalled,
    JobSubmitted,
    NodeLost,
    ProgressReported,
    ReplicaStopped,
    ScaleRequested,
    StartHeldUp,
)
from springtide.core.ports import Step
from springtide.core.reasons import GroupChange
from springtide.core.workload import AdaptiveBatch, Entrypoint, JobState, TrainingJob
from springtide.service.history.history import MAX_ENTRIES, HistoryIndex
from springtide.service.logs import reading as logs


def job(job_id="fit-1"):
    return TrainingJob(job_id=job_id, name="fit", entrypoint=Entrypoint(source_path="/fit.py", object_name="fit"))


def start(number, generation=1):
    return StartReplica(
        workload=job(), replica_id=f"fit-1.{number}", device_id=f"local/{number}", generation=generation
    )


def resized(generation, world_size=1, direction="grow", pause_s=0.02):
    return JobResized(
        job_id="fit-1", generation=generation, world_size=world_size, step=5, pause_s=pause_s, direction=direction
    )


def resize(generation, change=None, global_batch_size=32):
    return ResizeJob(
        job_id="fit-1",
        generation=generation,
        replica_ids=("fit-1.0",),
        global_batch_size=global_batch_size,
        reason="" if change is None else change.text(),
        change=change,
    )


def index_of(*steps):
    index = HistoryIndex()
    for seq, (now_s, *news) in enumerate(steps, start=1):
        events = tuple(item for item in news if type(item).__module__.endswith("events"))
        actions = tuple(item for item in news if type(item).__module__.endswith("actions"))
        index.add(seq, Step(now_s=now_s, events=events, actions=actions))
    return index


def test_a_repeated_step_changes_nothing():
    index = index_of((0.0, JobSubmitted(job=job()), start(0)))
    before = index.entries("fit-1")
    index.add(1, Step(now_s=9.0, events=(ScaleRequested(workload_id="fit-1", minimum=1, maximum=2),)))
    assert index.entries("fit-1") == before


@pytest.mark.parametrize(
    ("kind", "epochs", "line"),
    [
        ("function", 1, "submitted: 1 worker, global batch 32, 1 epoch"),
        ("function", 3, "submitted: 1 worker, global batch 32, 3 epochs"),
        ("script", 1, "submitted: 1 worker"),
    ],
)
def test_a_script_says_its_batch_and_its_epochs_itself(kind, epochs, line):
    asked = replace(job(), entrypoint=replace(job().entrypoint, kind=kind), num_epochs=epochs)
    (entry,) = index_of((0.0, JobSubmitted(job=asked))).entries("fit-1")
    assert entry.text == line


def test_the_lines_of_a_workload_are_bounded():
    scale = ScaleRequested(workload_id="fit-1", minimum=1, maximum=2)
    index = index_of((0.0, JobSubmitted(job=job())), *((float(n), scale) for n in range(1, 400)))
    entries = index.entries("fit-1")
    assert len(entries) == MAX_ENTRIES
    assert entries[-1].at_s == 399.0
    assert entries[-1].text == "its owner set new bounds: 1..2"
    limit = ScaleRequested(workload_id="fit-1", minimum=1, maximum=2, reason="no quota", is_limit=True)
    told = index_of((0.0, JobSubmitted(job=job())), (1.0, limit)).entries("fit-1")[-1].text
    assert told == "the platform set new bounds: 1..2: no quota"
    assert [entry.seq for entry in entries] == sorted(entry.seq for entry in entries)


def test_a_resize_counts_once_and_only_for_its_generation():
    index = index_of(
        (0.0, JobSubmitted(job=job()), start(0)),
        (1.0, resize(2)),
        (2.0, resized(1), resized(2), resized(2)),
    )
    totals = index.totals()
    assert totals.num_resizes == {"grow": 1}
    ((direction, pauses),) = totals.pauses.items()
    assert (direction, pauses.count, pauses.sum_s) == ("grow", 1, 0.02)
    assert pauses.up_to[0] == 0
    assert pauses.up_to[1:] == (1,) * (len(pauses.up_to) - 1)


def test_a_batch_that_changes_is_a_line_of_its_own_with_its_noise():
    bounds = AdaptiveBatch(min_size=32, max_size=128, learning_rate="sqrt")
    noise = ProgressReported(
        job_id="fit-1", generation=1, step=9, total_steps=20, world_size=1, grad_sqr=1.0, grad_var=4.0
    )
    index = index_of(
        (0.0, JobSubmitted(job=replace(job(), batch=bounds)), start(0)),
        (1.0, resize(1), resized(1, direction="start")),
        (
            2.0,
            noise,
            resize(2, GroupChange(code="batch", before=32, after=128, why="goodput +30 %"), global_batch_size=128),
        ),
        (3.0, resized(2, direction="replace")),
        (4.0, resize(3, GroupChange(code="resize", before=1, after=2, why="a free device"), global_batch_size=64)),
        (5.0, resized(3, world_size=2)),
    )
    told = [entry.text for entry in index.entries("fit-1") if entry.kind in ("batch", "replace", "grow")]
    assert told == [
        "batch 32 -> 128: noise scale 128, learning rate x2 (sqrt) (goodput +30 %)",
        "batch 128 -> 64: noise scale 128, learning rate x1.41 (sqrt)",
        "resized 1 -> 2 workers, pause 20 ms, step 5 continued (a free device)",
    ]
    assert index.totals().num_resizes == {"replace": 1, "grow": 1}
    assert "batch" in [mark.kind for mark in index.timeline(6.0).marks]


def test_lines_on_a_group_that_has_formed_say_how_many_workers_it_has():
    index = index_of(
        (0.0, JobSubmitted(job=job()), start(0)),
        (1.0, resize(1)),
        (2.0, resized(1, direction="start")),
        (3.0, resize(2)),
        (4.0, resized(2, world_size=3)),
    )
    formed = {entry.kind: entry.num_workers for entry in index.entries("fit-1") if entry.num_workers is not None}
    assert formed == {"start": 1, "grow": 3}


def test_intervals_end_when_the_replica_or_its_node_does():
    index = index_of(
        (1.0, JobSubmitted(job=job()), start(0), start(1), start(2)),
        (2.0, ReplicaStopped(workload_id="fit-1", replica_id="fit-1.1")),
        (3.0, NodeLost(node_id="local")),
        (4.0, ReplicaStopped(workload_id="fit-1", replica_id="fit-1.0")),
    )
    ends = {interval.replica_id: interval.end_s for interval in index.timeline(9.0).intervals}
    assert ends == {"fit-1.0": 3.0, "fit-1.1": 2.0, "fit-1.2": 3.0}
    assert index.totals().num_lost_replicas == 2


def test_each_device_of_a_worker_has_a_bar():
    index = index_of(
        (1.0, JobSubmitted(job=job()), replace(start(0), more_devices=("local/1",)), start(2)),
        (2.0, ReplicaStopped(workload_id="fit-1", replica_id="fit-1.0")),
    )
    bars = {bar.device_id: (bar.replica_id, bar.end_s, bar.more_devices) for bar in index.timeline(9.0).intervals}
    assert bars == {
        "local/0": ("fit-1.0", 2.0, ()),
        "local/1": ("fit-1.0", 2.0, ()),
        "local/2": ("fit-1.2", None, ()),
    }
    assert "on local/0, local/1" in " ".join(entry.text for entry in index.entries("fit-1"))


def test_a_stall_and_its_end_are_lines_and_count():
    stalled = JobStalled(job_id="fit-1", generation=1, since_s=10.0, timeout_s=60.0)
    said = [ProgressReported(job_id="fit-1", generation=1, step=n, total_steps=9, world_size=1) for n in (4, 4, 5, 6)]
    index = index_of((0.0, JobSubmitted(job=job())), (10.0, said[0]), (70.0, stalled), (71.0, said[1]), (72.0, said[2]))
    index.add(6, Step(now_s=73.0, events=(said[3],)))
    lines = [(entry.kind, entry.text) for entry in index.entries("fit-1")]
    assert lines[1:] == [
        ("stalled", "no step for 1m00, the last was 4"),
        ("steps-again", "step 5 has come: it was slow, or hung for a while"),
    ]
    assert index.totals().num_stalls == 1


def test_a_start_that_is_held_up_is_a_line_and_so_is_its_beginning():
    held = {"workload_id": "fit-1", "replica_id": "fit-1.0"}
    index = index_of(
        (0.0, JobSubmitted(job=job())),
        (5.0, StartHeldUp(**held, reason="pulls its image x since 16:52:05 UTC")),
        (60.0, StartHeldUp(**held)),
    )
    assert [(entry.kind, entry.text) for entry in index.entries("fit-1")][1:] == [
        ("held-up", "fit-1.0 cannot begin yet: pulls its image x since 16:52:05 UTC"),
        ("begun", "fit-1.0 has begun"),
    ]


def test_preemptions_and_ends_are_marks():
    index = index_of(
        (1.0, JobSubmitted(job=job()), start(0)),
        (2.0, PreemptJob(job_id="fit-1", generation=2, replica_ids=("fit-1.0",), reason="a deadline is nearer")),
        (3.0, EndJob(job_id="fit-1", state=JobState.FAILED, reason="its code raised")),
    )
    marks = [(mark.kind, mark.text) for mark in index.timeline(9.0).marks]
    assert marks == [("preempt", "a deadline is nearer"), ("failed", "FAILED: its code raised")]
    assert index.totals().num_ended == {"FAILED": 1}


def test_reading_while_it_grows_never_fails():
    index = HistoryIndex()
    failures = []
    done = threading.Event()

    def read():
        while not done.is_set():
            try:
                index.entries("fit-1")
                index.timeline(0.0)
                index.totals()
            except RuntimeError as error:
                failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    index.add(1, Step(now_s=0.0, events=(JobSubmitted(job=job()),)))
    for seq in range(2, 600):
        index.add(seq, Step(now_s=float(seq), actions=(start(seq),)))
    done.set()
    thread.join()
    assert failures == []


# --- logs -----------------------------------------------------------------------------------------------------------


def write(folder, replica, data, at_s=0):
    path = folder / f"{replica}.log"
    path.write_bytes(data)
    os.utime(path, (at_s, at_s))
    return path


def test_the_tail_is_shared_out_among_the_replicas(tmp_path):
    write(tmp_path, "fit.0", b"".join(b"a%d\n" % n for n in range(100)), 2)
    write(tmp_path, "fit.1", b"b0\nb1\n", 1)
    lines, _ = logs.read_tail(tmp_path, 10)
    assert lines == ["[fit.1] b0", "[fit.1] b1", *(f"[fit.0] a{n}" for n in range(92, 100))]
    assert logs.read_tail(tmp_path, 3, "fit.1")[0] == ["[fit.1] b0", "[fit.1] b1"]
    assert logs.read_tail(tmp_path, 0)[0] == []


@pytest.mark.parametrize("total", [0, 1, 5, 7, 100])
def test_shares_never_exceed_what_there_is(total):
    wanted = {"a": 3, "b": 50, "c": 0, "d": 2}
    shares = logs.share_out(total, wanted)
    assert sum(shares.values()) == min(total, sum(wanted.values()))
    assert all(shares[key] <= wanted[key] for key in wanted)


def test_new_lines_come_once_and_whole(tmp_path):
    path = write(tmp_path, "fit.0", b"one\ntw")
    lines, ends = logs.read_tail(tmp_path, 10)
    assert lines == ["[fit.0] one"]
    assert logs.read_new(tmp_path, ends) == []
    with path.open("ab") as file:
        file.write(b"o\nthree")
    write(tmp_path, "fit.1", b"new\n")
    assert sorted(logs.read_new(tmp_path, ends)) == ["[fit.0] two", "[fit.1] new"]
    assert logs.read_new(tmp_path, ends) == []
    assert logs.read_new(tmp_path, ends, is_final=True) == ["[fit.0] three"]
    assert logs.read_new(tmp_path, ends, is_final=True) == []


def test_any_bytes_are_readable_and_harmless(tmp_path):
    write(tmp_path, "fit.0", bytes(range(256)) + b"\n10%\r50%\r100%\r\n" + b"x" * 100_000 + b"\n")
    lines, _ = logs.read_tail(tmp_path, 100)
    text = logs.as_text(lines).decode()
    assert not any(ord(char) < 32 and char not in "\n\t" for char in text)
    assert "[fit.0] 100%" in lines
    assert max(len(line) for line in lines) < 20_000


def test_a_huge_log_is_read_from_its_end(tmp_path):
    write(tmp_path, "fit.0", b"0123456789\n" * 300_000 + b"last\n")
    lines, _ = logs.read_tail(tmp_path, 5)
    assert lines[-1] == "[fit.0] last"
    assert lines[0] == "[fit.0] 0123456789"


def test_links_and_pipes_are_not_logs(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "fit.0.log").symlink_to(secret)
    os.mkfifo(folder / "fit.1.log")
    assert logs.read_tail(folder, 10)[0] == []
    with pytest.raises(NotFound):
        logs.list_logs(folder, "fit.0")
    with pytest.raises(InvalidRequest):
        logs.list_logs(folder, "../secret")
    assert logs.list_logs(tmp_path / "missing") == []
