"""Scripts of DistributedDataParallel that call `springtide.adopt`: alone, and in real workers whose group changes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kits.runtime.library_plane import UndisturbedRuns, assert_as, churn, go_on, of_library
from kits.runtime.runtime_plane import artifact_hash
from kits.simulation.sweeps import only_in_full
from springtide.core.errors import InvalidRequest
from springtide.core.wire.workers import CheckpointWritten, Failed, GroupBrokenReport, Preempt, Progress, Ready
from springtide.runtime import adoption
from springtide.runtime.adoption import adopt

# 83 samples in batches of 16: six steps an epoch, the last one of three samples, which one worker has alone.
PROGRAM = """
import json, os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import springtide

folder = os.path.dirname(os.path.abspath(__file__))
lines = open(os.path.join(folder, f"lines-{os.getpid()}"), "a", buffering=1)

def note(**line):
    lines.write(json.dumps(line) + "\\n")

if "RANK" in os.environ:
    dist.init_process_group("gloo")
world_size = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.0), nn.Linear(32, 1))
model = DistributedDataParallel(net) if "RANK" in os.environ else net
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
of_steps = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36)
of_epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
x = torch.randn(83, 16, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(data) if "RANK" in os.environ else None
loader = DataLoader(data, 16 // world_size, shuffle=sampler is None, sampler=sampler, num_workers=LOADERS,
                    persistent_workers=LOADERS > 0)
seen = {"steps": 0}
job = springtide.adopt(model, optimizer, of_steps, of_epochs, seen)
assert model is net or not model.require_backward_grad_sync

def score(batch):
    return {"val": nn.functional.mse_loss(model(batch.x), batch.y)}

for epoch in job.epochs(6):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in job.batches(loader):
        while os.path.exists(os.path.join(folder, "hold")):
            time.sleep(0.01)
        time.sleep(float(os.environ.get("STEP_S", "0")))
        #place
        path = os.path.join(folder, "kill-leader" if job.is_leader else "kill-follower")
        if os.path.exists(path):
            os.unlink(path)
            net[0].weight.register_hook(lambda gradient: os.kill(os.getpid(), 9))
        step, rate = job.step_number + 1, optimizer.param_groups[0]["lr"]
        if job.step(nn.functional.mse_loss(model(x), y), clip_grad_norm=1.0):
            note(step=step, rate=rate)
            of_steps.step()
            seen["steps"] += 1
            assert seen["steps"] == job.step_number
            if job.is_leader:
                print(f"step {job.step_number} loss {job.loss:.9f}", flush=True)
    of_epochs.step()
    note(after=job.step_number, val=job.evaluate(DataLoader(data, 32), score)["val"])
if job.is_leader:
    job.save()
    print("epochs", epoch + 1, flush=True)
if "RANK" in os.environ:
    dist.destroy_process_group()
""".replace("LOADERS", "0")
NUM_STEPS = 36
# For the place in the program: the second member fails once the others have the step.
FAILS_AFTER_THE_EXCHANGE = """
        from springtide.core.errors import PeerLost
        ours = job._trainer
        if ours.step == STEP and ours.rank == 1 and ours.membership.generation == 2:
            reduce = ours._reduce
            def fail(pending):
                del ours._reduce
                reduce(pending)
                raise PeerLost("as if a member had died after the exchange")
            ours._reduce = fail"""


@pytest.fixture
def make_program(make_plane):
    def make(source=PROGRAM, **options):
        return of_library(make_plane(source, **options), "springtide")

    return make


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    return UndisturbedRuns(zygote, lambda: tmp_path_factory.mktemp("undisturbed"), "springtide")


@pytest.mark.slow
@pytest.mark.parametrize("num_loaders", [pytest.param("0", marks=only_in_full), "2"])
def test_no_rate_loss_or_sample_changes_whatever_happens_to_the_group(make_program, undisturbed, num_loaders):
    source = PROGRAM.replace("num_workers=0", f"num_workers={num_loaders}").replace("0 > 0", f"{num_loaders} > 0")
    plane = make_program(source, step_s=0.05)
    churn(plane)
    assert_as(plane, undisturbed.of(PROGRAM, {}))


@pytest.mark.slow
# The last step of an epoch, after which a scheduler of epochs steps, and one in its midst.
@pytest.mark.parametrize("step", [11, pytest.param(14, marks=only_in_full)])
def test_a_member_that_missed_a_step_steps_nothing_twice(make_program, undisturbed, step):
    source = PROGRAM.replace("        #place", FAILS_AFTER_THE_EXCHANGE.replace("STEP", str(step)))
    assert source != PROGRAM
    plane = make_program(source, step_s=0.02)
    plane.start_group("a", "b")
    plane.wait(lambda: plane.of(GroupBrokenReport), "GroupBroken")
    plane.form("a", "b", forced=True)
    plane.wait_finished()
    assert_as(plane, undisturbed.of(PROGRAM, {}))


@pytest.mark.slow
def test_a_restart_goes_on_from_the_checkpoint(make_program, undisturbed):
    plane = make_program(step_s=0.05, checkpoint_interval_s=0.3)
    plane.start_group("a", "b")
    plane.wait(lambda: len(plane.of(CheckpointWritten)) >= 2, "two checkpoints")
    plane.kill("a", "b")
    second = make_program(step_s=0.05, work_dir=plane.work_dir)
    second.start_group("c")
    go_on(second, 3)
    second.generation += 1
    second.order(Preempt(generation=second.generation), "c")
    second.wait_exit("c")
    assert second.of(CheckpointWritten)
    third = make_program(work_dir=plane.work_dir)
    third.start_group("d", "e")
    third.wait_finished()
    assert_as(third, undisturbed.of(PROGRAM, {}))


@pytest.mark.slow
def test_its_batch_is_its_own_whatever_the_platform_says_of_the_jobs(make_program):
    plane = make_program(step_s=0.05, global_batch_size=64)
    plane.start_group("a", batch=64)
    plane.wait_step(2)
    (plane.work_dir / "hold").touch()
    plane.start("b")
    plane.wait_ready("b")
    (plane.work_dir / "hold").unlink()
    plane.form("a", "b", batch=64)
    plane.wait_finished()
    assert [record["num_samples"] for record in plane.steps()] == [16, 16, 16, 16, 16, 3] * 6
    last = plane.of(Progress)[-1]
    assert (last.step, last.total_steps, last.epoch, last.global_batch_size) == (NUM_STEPS, NUM_STEPS, 5, 64)


def run_alone(tmp_path, *command, source=PROGRAM):
    (tmp_path / "alone.py").write_text(source)
    done = subprocess.run(
        [sys.executable, *command, "alone.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "epochs 6" in done.stdout
    return [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]


@pytest.mark.slow
def test_alone_it_has_the_bits_of_one_worker(tmp_path, make_program):
    losses = run_alone(tmp_path)
    # A script alone has the seed that jobs have where none is given.
    plane = make_program(seed=0)
    plane.start_group("a")
    plane.wait_finished()
    assert losses == pytest.approx([record["loss"] for record in plane.steps()], abs=1e-9)
    (tmp_path / "artifacts").symlink_to(tmp_path / "springtide-out" / "alone")
    assert artifact_hash(tmp_path) == artifact_hash(plane.work_dir)


@pytest.mark.slow
def test_under_torchrun_the_ranks_divide_the_same_batches(tmp_path):
    # AdamW and clipping would hide gradients of another size.
    source = PROGRAM.replace("AdamW(model.parameters(), 1e-2)", "SGD(model.parameters(), 1e-2)").replace(
        ", clip_grad_norm=1.0", ""
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = run_alone(tmp_path, *torchrun, source=source)
    assert losses == pytest.approx(run_alone(tmp_path, source=source), rel=1e-5, abs=1e-7)
    assert len(losses) == NUM_STEPS


FAILURES = {
    "a second call": (
        PROGRAM.replace("def score", "springtide.adopt(model, optimizer)\ndef score"),
        "called a second time",
    ),
    "no epochs": (PROGRAM.replace("in job.epochs(6)", "in range(6)"), "for epoch in job.epochs(3)"),
    "no adopt": ("import springtide\nif False:\n    springtide.adopt(1, 2)", "without springtide.adopt()"),
    "no step": (PROGRAM.partition("for epoch")[0], "before its first step was complete"),
    "an exit code": ("import sys\nsys.exit(3)", "exit code 3"),
    "its own error": ("raise KeyError('rate')", "KeyError: 'rate' (user_code.py:1)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_a_script_that_does_not_train_ends_with_a_sentence(make_program, name):
    source, told = FAILURES[name]
    plane = make_program(source)
    plane.start("a")
    plane.wait(lambda: plane.of(Failed, "a") or plane.of(Ready, "a"), "Ready or Failed")
    if not plane.of(Failed, "a"):
        plane.form("a", wait=False)
    plane.wait(lambda: plane.of(Failed, "a"), "Failed")
    assert told in plane.of(Failed, "a")[0].error


def make_parts():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_what_cannot_be_adopted_is_refused():
    model, optimizer = make_parts()
    with pytest.raises(InvalidRequest, match=r"takes the model first.*got a SGD"):
        adopt(optimizer, model)
    with pytest.raises(InvalidRequest, match="got no optimizer"):
        adopt(model, torch.nn.Linear(1, 1))
    adoption._check([model, optimizer, {"best": 1.0}])
    with pytest.raises(InvalidRequest, match="no functions that make them"):
        adopt(model, optimizer, lambda optimizer: None)
    sharded = type("FullyShardedDataParallel", (torch.nn.Linear,), {})(2, 1)
    with pytest.raises(InvalidRequest, match="sharded over devices"):
        adopt(sharded, optimizer)


def test_errors_of_the_context_name_the_calls_of_a_script(monkeypatch):
    def run_file(entrypoint):
        raise InvalidRequest("after ctx.backward(loss) call ctx.update(); call ctx.prepare(model, optimizer) before it")

    monkeypatch.setattr(adoption, "run_file", run_file)
    monkeypatch.setattr(os, "environ", {})
    told = r"after job\.backward\(loss\) call job\.update\(\); call springtide\.adopt\(model, optimizer\) before it"
    with pytest.raises(InvalidRequest, match=told):
        adoption.run_adopted(SimpleNamespace(device=torch.device("cpu")), None, None)
