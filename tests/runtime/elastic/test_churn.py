"""Trainings under churn: random resizes and kills, crashes at chosen places, a control plane that goes away."""

from __future__ import annotations

import random
import signal
import threading

import pytest

from kits.runtime.runtime_plane import TRAIN
from kits.simulation.sweeps import STRIDE, sampled
from springtide.core.wire.workers import CheckpointWritten, Finished, GroupBrokenReport, Hello, Left, Preempt, Switched
from springtide.runtime.data.shards import SampleSchedule

EPOCHS = 12
NUM_STEPS = EPOCHS * 13


def assert_exactly_once(plane, *, num_epochs=EPOCHS):
    """Every step once, in order, with exactly the samples of the schedule."""
    schedule = SampleSchedule(num_samples=200, global_batch_size=16, num_epochs=num_epochs, seed=7)
    records = plane.steps()
    assert [record["step"] for record in records] == list(range(1, schedule.total_steps + 1))
    assert [record["ids_digest"] for record in records] == [
        schedule.batch(step).ids_digest for step in range(schedule.total_steps)
    ]


@pytest.fixture
def static_hash(make_plane):
    def run(**options):
        plane = make_plane(num_epochs=EPOCHS, **options)
        plane.start_group("s0")
        plane.wait_finished()
        return plane.result_hash()

    return run


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled([1, 2, 3]))
def test_random_resizes_and_kills_never_show(make_plane, static_hash, seed):
    chance = random.Random(seed)
    plane = make_plane(step_s=0.03, num_epochs=EPOCHS)
    plane.start_group("w0")
    number = 0
    while len(plane.steps()) < NUM_STEPS - 40:
        kind = chance.choice(["grow", "shrink", "kill", "kill in a grow"])
        members = list(plane.members)
        if kind == "grow" and len(members) < 4:
            number += 1
            plane.grow(f"w{number}")
        elif kind == "shrink" and len(members) > 1:
            gone = members.pop(chance.randrange(len(members)))
            plane.form(*members)
            plane.wait_exit(gone)
        elif kind == "kill" and len(members) > 1:
            gone = members.pop(chance.randrange(len(members)))
            plane.kill(gone)
            plane.form(*members, forced=True)
        elif kind == "kill in a grow" and len(members) in (2, 3):
            number += 1
            joiner = f"w{number}"
            plane.start(joiner)
            plane.wait_ready(joiner)
            plane.form(*members, joiner, wait=False)
            gone = chance.choice([*members, joiner])
            plane.kill(gone)
            plane.form(*(name for name in (*members, joiner) if name != gone), forced=True)
        plane.wait_step(min(NUM_STEPS, len(plane.steps()) + chance.randrange(3)))
    plane.wait_finished()
    assert_exactly_once(plane)
    assert plane.result_hash() == static_hash()


CRASHES = {
    "forward": "os.kill(os.getpid(), 9)",
    "before the exchange": "ctx._trainer._reduce = lambda _: os.kill(os.getpid(), 9)",
    "amid the exchange": """
import springtide.runtime.elastic.group
group.Group.all_gather = lambda *_, **__: os.kill(os.getpid(), 9)
""",
    "after the exchange, before the commit": "ctx._trainer._commit = lambda _: os.kill(os.getpid(), 9)",
    "after the commit, before the log": "ctx._trainer._step_log.write = lambda generation: os.kill(os.getpid(), 9)",
}


@pytest.mark.slow
@pytest.mark.parametrize("place", list(CRASHES)[:: 1 if STRIDE == 1 else 2])
def test_a_leader_that_dies_at_any_place_costs_nothing(make_plane, static_hash, place):
    crash = "\n".join("            " + line for line in CRASHES[place].strip().splitlines())
    source = TRAIN.replace(
        "        if pause_s:",
        f"        if ctx.step_number == 9 and ctx._trainer.rank == 0 and {{}} == 0:\n{crash}\n        if pause_s:",
    ).replace("{} == 0", "ctx._trainer.membership.generation == 2")
    plane = make_plane(source, num_epochs=EPOCHS)
    plane.start_group("a", "b", "c")
    plane.wait(lambda: "a" in plane.exits, "the crash")
    plane.form("b", "c", forced=True)
    plane.wait_finished()
    assert_exactly_once(plane)
    assert plane.result_hash() == static_hash()


@pytest.mark.slow
def test_a_worker_that_sees_the_group_break_says_so_and_waits(make_plane):
    plane = make_plane(step_s=0.02, num_epochs=EPOCHS)
    plane.start_group("a", "b")
    plane.wait_step(3)
    plane.kill("b")
    plane.wait(lambda: plane.of(GroupBrokenReport, "a"), "GroupBroken")
    assert plane.of(GroupBrokenReport, "a")[0].generation == plane.generation
    plane.form("a", forced=True)
    plane.wait_finished()
    assert_exactly_once(plane)


@pytest.mark.slow
def test_workers_train_on_without_a_control_plane_and_repeat_what_it_missed(make_plane):
    plane = make_plane(num_epochs=EPOCHS)
    plane.acknowledges = False
    plane.start_group("a", "b")
    plane.wait(lambda: plane.of(Finished, "a") and plane.of(Finished, "b"), "Finished")
    for name in ("a", "b"):
        plane.connections[name].shutdown(2)
    plane.wait(lambda: all(len(plane.of(Finished, name)) == 2 for name in "ab"), "Finished again")
    assert [hello.generation for hello in plane.of(Hello, "a")] == [0, plane.generation]
    plane.acknowledges = True
    for name in ("a", "b"):
        plane.connections[name].shutdown(2)
    plane.wait_exit("a", "b")


@pytest.mark.slow
def test_a_worker_without_a_control_plane_commits_a_checkpoint_and_ends(make_plane):
    plane = make_plane(step_s=0.02, num_epochs=1000, lease_s=0.5)
    plane.start_group("a")
    plane.wait_step(3)
    plane.selector.unregister(plane.listener)
    plane.listener.close()
    plane.connections["a"].shutdown(2)
    plane.wait_exit("a")
    assert len(list(plane.work_dir.glob("checkpoints/*/manifest.json"))) == 1


@pytest.mark.slow
def test_sigterm_commits_a_checkpoint_of_the_present_generation(make_plane):
    plane = make_plane(step_s=0.02, num_epochs=1000)
    plane.start_group("a", "b")
    plane.wait_step(3)
    plane.signal("b", signal.SIGTERM)
    plane.wait_exit("a", "b")
    (written,) = plane.of(CheckpointWritten)
    assert written.checkpoint.generation == plane.generation
    assert plane.of(Left, "a")
    assert plane.of(Left, "b")


@pytest.mark.slow
def test_checkpoints_are_written_in_the_background_and_survive_the_loss_of_all(make_plane, static_hash):
    plane = make_plane(step_s=0.02, num_epochs=EPOCHS, checkpoint_interval_s=0.2)
    plane.start_group("a", "b")
    plane.wait(lambda: len(plane.of(CheckpointWritten)) >= 2, "two checkpoints")
    plane.kill("a", "b")
    resumed = make_plane(num_epochs=EPOCHS, work_dir=plane.work_dir)
    resumed.start_group("c")
    assert resumed.of(Switched, "c")[0].direction == "resume"
    resumed.wait_finished()
    last = {record["step"]: record for record in resumed.steps()}
    assert sorted(last) == list(range(1, NUM_STEPS + 1))
    assert resumed.result_hash() == static_hash()


@pytest.mark.slow
def test_a_preempt_amid_a_grow_wins(make_plane):
    plane = make_plane(step_s=0.05, num_epochs=1000)
    plane.start_group("a")
    plane.start("b")
    plane.wait_ready("b")
    plane.form("a", "b", wait=False)
    plane.generation += 1
    plane.order(Preempt(generation=plane.generation), "a", "b")
    plane.wait_exit("a", "b")
    assert any(report.checkpoint.generation == plane.generation for report in plane.of(CheckpointWritten))


@pytest.mark.slow
def test_a_death_at_the_very_end_does_not_lose_the_result(make_plane, static_hash):
    plane = make_plane(num_epochs=EPOCHS)
    plane.acknowledges = False
    killed = threading.Event()
    plane.start_group("a", "b", "c")
    plane.wait(lambda: plane.of(Finished), "the first Finished")
    plane.kill("a")
    killed.set()
    plane.form("b", "c", forced=True, wait=False)
    plane.wait(
        lambda: all(plane.of(Finished, name, generation=plane.generation) for name in ("b", "c")), "Finished anew"
    )
    plane.acknowledges = True
    for name in ("b", "c"):
        plane.connections[name].shutdown(2)
    plane.wait_exit("b", "c")
    assert_exactly_once(plane)
    assert plane.result_hash() == static_hash()


SCRIPT = """
import os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
assert __name__ == "__main__"
print(" ".join(os.environ[name] for name in names), *sys.argv[1:])
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", int(total))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_script_runs_under_the_variables_of_torchrun(make_plane):
    import socket

    from springtide.core.wire.workers import FormGroup
    from springtide.core.workload import Entrypoint, ReplicaId

    plane = make_plane(SCRIPT)
    path = plane.job.entrypoint.source_path
    plane.job = __import__("msgspec").structs.replace(
        plane.job, entrypoint=Entrypoint(source_path=path, kind="script", args=("--x", "1"))
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plane.start("a", "b")
    plane.wait_ready("a", "b")
    plane.members = ("a", "b")
    order = FormGroup(
        generation=1, members=(ReplicaId("a"), ReplicaId("b")), rendezvous=f"tcp://127.0.0.1:{port}", previous=0
    )
    plane.order(order, "a", "b")
    plane.wait_finished()
    assert f"1 1 2 2 0 127.0.0.1 {port} job 0 3 --x 1" in plane.logs()
    assert plane.logs().count("total 2") == 2


@pytest.mark.slow
@pytest.mark.parametrize("catchup", ["0", "1"])
def test_a_group_that_breaks_without_a_death_goes_on_in_the_group_already_ordered(make_plane, static_hash, catchup):
    source = TRAIN.replace(
        "        if pause_s:",
        "        if ctx.step_number == 9 and ctx._trainer.rank == 0 and ctx._trainer.membership.generation == 2:\n"
        "            while ctx._trainer.membership.pending is None:\n                time.sleep(0.01)\n"
        "            ctx._trainer._group.abort()\n        if pause_s:",
    )
    plane = make_plane(source, num_epochs=EPOCHS, environment={"SPRINGTIDE_CATCHUP": catchup})
    plane.start_group("a", "b")
    plane.wait_step(9)
    plane.grow("c")
    plane.wait_finished()
    assert plane.of(GroupBrokenReport, "a")[0].generation == 2
    assert_exactly_once(plane)
    assert plane.result_hash() == static_hash()


@pytest.mark.slow
def test_one_parameter_group_per_rate_a_frozen_layer_and_an_unused_one_survive_a_resize(make_plane):
    source = TRAIN.replace(
        "    model, optimizer = ctx.prepare(make_net(), make_optimizer)",
        "    net = make_net()\n    net.register_buffer('mask', torch.tensor([0.1, float('-inf'), 0.3]))\n"
        "    net.unused = nn.Linear(2, 2)\n    net[0].weight.requires_grad_(False)\n"
        "    rates = [{'params': net[0].parameters()}, {'params': net[4].parameters(), 'lr': 0.01},\n"
        "             {'params': net.unused.parameters()}]\n"
        "    model, optimizer = ctx.prepare(net, torch.optim.AdamW(rates, lr=0.02))\n"
        "    torch.nn.Sequential.forward = lambda self, x: self[4](self[3](self[2](self[1](self[0](x)))))",
    )
    static = make_plane(source, num_epochs=EPOCHS)
    static.start_group("a")
    static.wait_finished()
    plane = make_plane(source, num_epochs=EPOCHS, step_s=0.02)
    plane.start_group("a")
    plane.wait_step(3)
    plane.grow("b", "c")
    plane.form("c", "b")
    plane.wait_finished()
    assert_exactly_once(plane)
    assert plane.result_hash() == static.result_hash()
