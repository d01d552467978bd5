"""A job that moves from machines to functions on a real platform: same samples, and the losses of one that stays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import torch
from safetensors.torch import load_file

from kits.end_to_end.live_platform import LivePlatform, ended_after, wait_for
from springtide.backends.functions.emulator.launch import stop_emulator
from springtide.backends.functions.shell.notes import NOTES_FILE, Notes
from springtide.core.workload import Entrypoint
from springtide.runtime.data.shards import SampleSchedule, seed_everything
from springtide.runtime.process.entry import load_object
from springtide.service.assembly.function_settings import FunctionSettings, write_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("functions")]

# A step takes its time, so that there is something left to move; with Adam there is a state to carry over.
TASK = """
import time

import torch
from torch import nn

import springtide as st


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.004 * len(x))
        return x


def model():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Slow(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def dataset():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(200, 6, generator=generator)
    return x, (x @ torch.randn(6, 3, generator=generator)).argmax(dim=1)


task = st.Task(
    model=model,
    dataset=dataset,
    loss=nn.functional.cross_entropy,
    optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
)
"""
NUM_LAYERS, BATCH, NUM_EPOCHS = 6, 32, 32
TOTAL = 7 * NUM_EPOCHS


def layers() -> dict[str, Any]:
    """A profile of the task's layers, as a measurement on one core would have it."""
    layer = {
        "parameter_bytes": 2048,
        "activation_bytes": 1024,
        "output_bytes": 512,
        "gradient_bytes": 512,
        "forward_s": [0.002],
        "backward_s": [0.002],
    }
    return {
        "model": "task",
        "micro_batch_size": 8,
        "memory_mb": [2048],
        "bytes_per_s": [70e6],
        "layers": [{"name": str(index), **layer} for index in range(NUM_LAYERS)],
    }


class MovedJob:
    """A job of that task on a platform with two slots and emulated functions."""

    def __init__(self, live: LivePlatform, settings: Path) -> None:
        self.live = live
        self.settings = settings
        self.job_id = ""

    def start(self, crash_at: str = "") -> None:
        self.live.start(crash_at, policy="fifo", options=("--functions", str(self.settings)))

    def submit(self) -> None:
        body = {
            "name": "moved",
            "source": {"filename": "task.py", "text": TASK, "object_name": "task", "kind": "function"},
            "options": {
                "on": "auto",
                "layer_profile": layers(),
                "global_batch_size": BATCH,
                "num_epochs": NUM_EPOCHS,
                "max_workers": 2,
            },
        }
        self.job_id = self.live.request("POST", "/v1/jobs", body)["job_id"]

    def wait_step(self, step: int) -> None:
        wait_for(lambda: self.status()["step"] >= step, 60.0, lambda: f"step {step}: {self.status()}")

    def status(self) -> dict[str, Any]:
        return self.live.job(self.job_id)

    def move(self) -> None:
        self.live.request("POST", f"/v1/jobs/{self.job_id}/move", {"to": "functions"})

    @property
    def work_dir(self) -> Path:
        return self.live.workload(self.job_id)

    def check_result(self, done: dict[str, Any]) -> int:
        """It ended well, on functions, and trained what one process trains; the step after which it moved."""
        assert (done["state"], done["on"], done["step"]) == ("SUCCEEDED", "emulator", TOTAL), done
        told = [json.loads(line) for line in (self.work_dir / "losses.jsonl").read_text().splitlines()]
        losses, model, digest = one_process(self.work_dir)
        assert [step for step, _, _ in told] == list(range(1, TOTAL + 1)), "each step is there, and once"
        assert [count for _, _, count in told] == ([BATCH] * 6 + [8]) * NUM_EPOCHS
        assert [loss for _, loss, _ in told] == pytest.approx(losses, rel=1e-4)
        notes = msgspec.json.decode((self.work_dir / NOTES_FILE).read_bytes(), type=Notes)
        assert notes.ids_digest == digest, "the same samples in the same order"
        saved = load_file(done["artifact_path"])
        assert all(torch.allclose(saved[name], tensor, rtol=1e-3, atol=1e-5) for name, tensor in model.items())
        moved_at = int(done["place_reason"].partition("after step ")[2].partition(":")[0])
        assert 0 < moved_at < TOTAL
        trained = [json.loads(line)["step"] for line in (self.work_dir / "steps.jsonl").read_text().splitlines()]
        assert max(trained) == moved_at, "machines have trained up to there and no further"
        return moved_at


def one_process(folder: Path) -> tuple[list[float], dict[str, torch.Tensor], str]:
    """Losses, model and chain of sample ids of the job, without a platform."""
    path = folder / "reference.py"
    path.write_text(TASK.replace("time.sleep(0.004 * len(x))", "pass"))
    task = load_object(Entrypoint(source_path=str(path), object_name="task"), f"moved_{folder.name.replace('-', '_')}")
    seed_everything(0)
    model = task.model()
    x, y = task.dataset()
    optimizer = task.optimizer(model.parameters())
    schedule = SampleSchedule(num_samples=len(x), global_batch_size=BATCH, num_epochs=NUM_EPOCHS, seed=0)
    losses, digest = [], ""
    for step in range(TOTAL):
        batch = schedule.batch(step)
        optimizer.zero_grad()
        loss = task.loss(model(x[batch.ids]), y[batch.ids])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        digest = hashlib.sha256((digest + batch.ids_digest).encode()).hexdigest()[:16]
    return losses, model.state_dict(), digest


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MovedJob]:
    state_dir = tmp_path / "state"
    write_settings(state_dir, FunctionSettings(provider="emulator", lifetime_s=120.0, concurrency=8))
    with ended_after(LivePlatform(state_dir, slots=2)) as live:
        yield MovedJob(live, state_dir / "functions.json")
    stop_emulator(state_dir / "functions")


def test_a_moved_job_ends_with_the_samples_and_the_losses_of_one_that_stayed(job: MovedJob) -> None:
    job.start()
    job.submit()
    job.wait_step(5)
    assert job.status()["on"] == ""
    quote = job.live.request("POST", f"/v1/jobs/{job.job_id}/move/quote", {})
    assert quote["verdict"] == "accepted"
    job.move()
    done = job.live.wait_job(job.job_id, 240.0)
    moved_at = job.check_result(done)
    bill = done["functions"]["bill"]
    assert bill["machines_usd"] > 0.0
    assert bill["function_usd"] > 0.0
    assert done["cost_usd"] == pytest.approx(sum(bill.values()))
    assert done["num_restarts"] == 0
    print(json.dumps({"moved_at": moved_at, "usd": done["cost_usd"], "machines_usd": bill["machines_usd"]}))


def converting(job: MovedJob) -> bool:
    return (job.work_dir / "conversion.json").exists()


def preempting(job: MovedJob) -> bool:
    return (job.work_dir / "checkpoints").is_dir()


@pytest.mark.parametrize("moment", [preempting, converting])
def test_a_control_plane_that_is_killed_on_the_way_loses_nothing(
    job: MovedJob, moment: Callable[[MovedJob], bool]
) -> None:
    job.start()
    job.submit()
    job.wait_step(5)
    job.move()
    wait_for(lambda: moment(job), 60.0, "the moment to kill the control plane")
    job.live.kill()
    job.start()
    job.check_result(job.live.wait_job(job.job_id, 240.0))


@pytest.mark.parametrize(
    "point", ["loop.start.PreemptJob.before:1", "loop.start.StartReplica.before:3", "loop.start.StartReplica.after:3"]
)
def test_one_that_dies_between_two_effects_of_the_move_carries_it_out_later(job: MovedJob, point: str) -> None:
    job.start(crash_at=point)
    job.submit()
    job.wait_step(5)
    try:
        job.move()
    except httpx2.HTTPError as error:
        print(f"the answer was cut off: {error}")
    wait_for(lambda: not job.live.is_alive, 60.0, "the control plane to die")
    job.start()
    job.check_result(job.live.wait_job(job.job_id, 240.0))


def test_a_checkpoint_that_functions_cannot_take_over_leaves_the_job_on_machines(job: MovedJob) -> None:
    job.start()
    job.submit()
    job.wait_step(5)
    wrong = layers()
    wrong["layers"] = wrong["layers"][:-1]
    job.live.request("POST", f"/v1/jobs/{job.job_id}/move", {"layer_profile": wrong})
    done = job.live.wait_job(job.job_id, 240.0)
    assert (done["state"], done["on"], done["step"]) == ("SUCCEEDED", "", TOTAL), done
    assert "it stays on machines, for it could not move to functions: " in done["place_reason"]
    assert "5 layers, but the model has 6" in done["place_reason"]
    assert done["num_restarts"] == 0
