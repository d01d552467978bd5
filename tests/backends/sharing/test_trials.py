"""Trials in a real process that is held to real shares of the CPU: answers, errors, and nothing left behind."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from springtide.backends.sharing.trials import ShareTrials
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.workload import Entrypoint, TrainingJob, WorkloadId
from springtide.runtime.profiling.share_profiler import ShareSpec

pytestmark = pytest.mark.slow

SERVICE = """
import time

class Spin:
    def predict(self, xs: list[float]) -> list[float]:
        # So much work for each item, whatever else the machine does.
        began_s = time.process_time()
        while time.process_time() - began_s < 0.004 * len(xs):
            pass
        if len(xs) == 5:
            raise ValueError("five")
        if len(xs) > 5:
            raise MemoryError("no room")
        return xs

class Alone:
    def predict(self, x: float) -> float:
        return x

class Broken:
    def load(self) -> None:
        raise RuntimeError("the weights are gone")

    def predict(self, xs: list[float]) -> list[float]:
        return xs

class Slow:
    def load(self) -> None:
        time.sleep(600)

    def predict(self, xs: list[float]) -> list[float]:
        return xs
"""
TRAIN = """
import torch

def fit(ctx):
    model, optimizer = ctx.prepare(torch.nn.Linear(8, 1), lambda p: torch.optim.SGD(p, lr=0.01))
    x = torch.ones(64, 8)
    for batch in ctx.batches(torch.utils.data.TensorDataset(x, x[:, :1])):
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
    ctx.save()

def short(ctx):
    return None
"""


def spec(folder: Path, name: str, *, call: str = "") -> ShareSpec:
    path = folder / "served.py"
    path.write_text(SERVICE, encoding="utf-8")
    return ShareSpec(
        entrypoint=Entrypoint(source_path=str(path), object_name=name, kind="class"),
        kind="inference",
        params={},
        call=call,
        directory="",
        name="",
        orders_fd=-1,
        answers_fd=-1,
    )


def training(folder: Path, name: str) -> ShareSpec:
    path = folder / "train.py"
    path.write_text(TRAIN, encoding="utf-8")
    entrypoint = Entrypoint(source_path=str(path), object_name=name)
    return ShareSpec(
        entrypoint=entrypoint,
        kind="training",
        params={},
        job=TrainingJob(
            job_id=WorkloadId("fit"), name="fit", entrypoint=entrypoint, global_batch_size=32, num_epochs=1
        ),
        directory="",
        name="",
        orders_fd=-1,
        answers_fd=-1,
    )


def enter(trials: ShareTrials) -> ShareTrials:
    try:
        return trials.__enter__()
    except BackendError as error:
        if "nothing here holds a process" in str(error):
            pytest.skip("this machine lets nobody hold processes back")
        raise


def test_less_of_a_device_takes_longer_and_a_larger_batch_too(tmp_path: Path) -> None:
    told: list[str] = []
    trials = enter(ShareTrials(spec(tmp_path, "Spin"), tell=told.append))
    try:
        assert trials.is_batchable
        assert trials.peak_mb > 0
        small_s, large_s = trials.latency_s(1, 0.5), trials.latency_s(4, 0.5)
        tight_s = trials.latency_s(4, 0.1)
        # The work is CPU time: nothing can make it faster than its share of a core.
        assert 0.004 / 0.5 * 0.9 <= small_s < large_s < tight_s
        assert tight_s >= 0.016 / 0.1 * 0.9
        assert told[0] == "trial 1: batches of 1 on 50% of a core"
        assert trials.latency_s(8, 1.0) == math.inf
        with pytest.raises(InvalidRequest, match="a batch of 5: ValueError: five; give a request that it answers"):
            trials.latency_s(5, 1.0)
        pid = trials._process.pid
    finally:
        trials.__exit__(None, None, None)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_training_function_trains_at_its_share(tmp_path: Path) -> None:
    trials = enter(ShareTrials(training(tmp_path, "fit")))
    try:
        whole, part = trials.throughput_per_s(1.0), trials.throughput_per_s(0.05)
        assert 0.0 < part < whole
        assert trials.num_runs == 2
    finally:
        trials.__exit__(None, None, None)
    assert not (tmp_path / "springtide-out").exists()


def test_what_the_function_does_wrong_is_its_own_sentence(tmp_path: Path) -> None:
    alone = enter(ShareTrials(spec(tmp_path, "Alone")))
    assert not alone.is_batchable
    alone.__exit__(None, None, None)
    with pytest.raises(BackendError, match="RuntimeError: the weights are gone"):
        enter(ShareTrials(spec(tmp_path, "Broken")))
    with pytest.raises(InvalidRequest, match="no parameter"):
        enter(ShareTrials(spec(tmp_path, "Spin", call='{"y": [1]}')))
    with pytest.raises(InvalidRequest, match=r"ctx\.prepare"):
        enter(ShareTrials(training(tmp_path, "short")))


def test_what_is_never_ready_is_ended(tmp_path: Path) -> None:
    trials = ShareTrials(spec(tmp_path, "Slow"), deadline_s=3.0)
    with pytest.raises(BackendError, match=r"was not done after 3\.0 s and was ended.*--limit"):
        enter(trials)
    assert trials._process.returncode is not None
