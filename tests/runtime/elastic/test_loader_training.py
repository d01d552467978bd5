"""Whole trainings through a DataLoader with processes of its own, in real workers: joins, departures, deaths."""

from __future__ import annotations

import os
import time

import pytest

from kits.runtime.runtime_plane import TRAIN
from springtide.core.wire.workers import Failed
from springtide.runtime.data.shards import SampleSchedule

EPOCHS = 4
NUM_STEPS = EPOCHS * 13

# Samples with random augmentations, read as a mapping by processes that a DataLoader starts.
LOADED = TRAIN.replace(
    "    for batch in ctx.batches(data):",
    """    loader = torch.utils.data.DataLoader(
        Augmented(*data), batch_size=16, shuffle=True, num_workers=int(os.environ.get("LOADERS", "2")),
        collate_fn=collate, persistent_workers=True, pin_memory=True,
    )
    for batch in ctx.batches(loader):
        assert batch["x"] is batch.x
        note(ctx, batch)""",
).replace(
    "def fit(ctx):",
    """class Augmented:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index] + 0.1 * torch.randn(8), "y": self.y[index], "pid": os.getpid()}

def collate(samples):
    return {key: torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in samples[0]}

def note(ctx, batch):
    pids = ",".join(map(str, sorted(set(batch["pid"].tolist()))))
    with open(os.path.join(os.path.dirname(__file__), f"loaded-{os.getpid()}"), "a") as file:
        file.write(f"{ctx.step_number} {ctx.is_leader} {ctx.num_workers} {pids}\\n")

def fit(ctx):""",
)
LOADED = LOADED.replace("persistent_workers=True", 'persistent_workers=os.environ.get("LOADERS", "2") != "0"')
# Nothing that depends on how a batch is cut.
PLAIN = (
    LOADED.replace("nn.BatchNorm1d(16), ", "")
    .replace("nn.Dropout(0.2), ", "")
    .replace(" + 0.01 * torch.randn_like(batch.x)", "")
)


def assert_exactly_once(plane):
    schedule = SampleSchedule(num_samples=200, global_batch_size=16, num_epochs=EPOCHS, seed=7)
    assert [record["ids_digest"] for record in plane.steps()] == [
        schedule.batch(step).ids_digest for step in range(NUM_STEPS)
    ]


def notes(plane):
    """By worker process: step, whether it led, the size of the group, and the processes that read the batch."""
    found = {}
    for path in plane.work_dir.glob("loaded-*"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.name.split("-")[1])] = [
            (int(step), leads == "True", int(size), pids.split(",")) for step, leads, size, pids in lines
        ]
    return found


@pytest.mark.slow
def test_a_resized_run_with_processes_loses_as_an_undisturbed_one_without_does(make_plane):
    still = make_plane(PLAIN, num_epochs=EPOCHS, exact=False, environment={"LOADERS": "0"})
    still.start_group("a")
    still.wait_finished()
    plane = make_plane(PLAIN, step_s=0.02, num_epochs=EPOCHS, exact=False)
    plane.start_group("a")
    plane.wait_step(4)
    plane.grow("b", "c")
    plane.wait_step(len(plane.steps()) + 4)
    plane.form("c", "b")
    plane.wait_exit("a")
    plane.wait_step(len(plane.steps()) + 4)
    plane.kill("c")
    plane.form("b", forced=True)
    plane.wait_finished()
    assert_exactly_once(plane)
    assert [record["loss"] for record in plane.steps()] == pytest.approx(
        [record["loss"] for record in still.steps()], rel=2e-6
    )
    by_worker = notes(plane)
    assert len(by_worker) == 3
    for pid, lines in by_worker.items():
        # The same two processes through all changes of the group.
        assert len({reader for *_, readers in lines for reader in readers} - {str(pid)}) == 2
    sizes = {size for lines in by_worker.values() for _, _, size, _ in lines}
    assert sizes == {1, 2, 3}
    leaders = [(step, size, pid) for pid, lines in by_worker.items() for step, leads, size, _ in lines if leads]
    # A step that was repeated after a death had two leaders, one after the other.
    assert {step for step, *_ in leaders} == set(range(NUM_STEPS))
    assert len(leaders) <= NUM_STEPS + 2
    # No process of a loader is left, not even of the worker that was killed.
    readers = {int(reader) for lines in by_worker.values() for *_, pids in lines for reader in pids}
    deadline = time.monotonic() + 30.0
    while any(os.path.exists(f"/proc/{reader}/exe") for reader in readers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_the_same_sequence_of_sizes_gives_the_same_bits_with_processes(make_plane, exact):
    """A death at a step, and the same departure again with another number of processes."""
    crash = """
        if ctx.step_number == 9 and ctx.num_workers == 2 and ctx.is_leader:
            os.kill(os.getpid(), 9)
"""
    source = LOADED.replace("        note(ctx, batch)", "        note(ctx, batch)" + crash)
    results = set()
    for loaders in ("0", "1", "3"):
        plane = make_plane(source, num_epochs=EPOCHS, exact=exact, environment={"LOADERS": loaders})
        plane.start_group("a", "b")
        plane.wait_exit("a", code=-9)
        plane.form("b", forced=True)
        plane.wait_finished()
        assert_exactly_once(plane)
        results.add(plane.result_hash())
    assert len(results) == 1


@pytest.mark.slow
def test_a_worker_whose_loader_process_is_killed_counts_as_crashed(make_plane):
    crash = """
        if ctx.step_number == 9 and ctx.num_workers == 2 and ctx.is_leader:
            os.kill(int(batch["pid"][0]), 9)
"""
    plane = make_plane(
        LOADED.replace("        note(ctx, batch)", "        note(ctx, batch)" + crash), num_epochs=EPOCHS
    )
    plane.start_group("a", "b")
    plane.wait_exit("a", code=1)
    assert not plane.of(Failed)
    assert "a process that loads samples ended (exit code -9)" in plane.logs()
    plane.form("b", forced=True)
    plane.wait_finished()
    assert_exactly_once(plane)


@pytest.mark.slow
def test_a_loader_process_holds_no_socket_of_the_group(make_plane):
    looks = LOADED.replace(
        "def note(ctx, batch):",
        """def sockets(pid):
    found = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
    return {name for name in found if name.startswith("socket:")}

def note(ctx, batch):
    # Connections to the other member, to the control plane and between threads.
    assert len(sockets(os.getpid())) > 3
    for pid in set(batch["pid"].tolist()):
        assert not sockets(pid) & sockets(os.getpid())
""",
    )
    assert looks != LOADED
    plane = make_plane(looks, num_epochs=2, exact=False)
    plane.start_group("a", "b")
    plane.wait_finished()
