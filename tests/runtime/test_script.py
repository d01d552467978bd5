"""What a worker sends of a script's reports."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kits.runtime.training_jobs import make_job
from springtide.core.wire.workers import FormGroup
from springtide.runtime import script
from springtide.runtime.script import ScriptReporter, is_peer_lost
from springtide.runtime.script_reports import ScriptReport


class Told:
    """A link that keeps what is sent and held."""

    def __init__(self):
        self.sent, self.held, self.steps = [], [], []

    def send(self, report):
        self.sent.append(report)
        return len(self.sent)

    def hold(self, report):
        self.held.append(report)

    def update(self, *, step):
        self.steps.append(step)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(script.time, "monotonic", lambda: now.s)
    return now


def reporter_of(rank):
    spec = SimpleNamespace(workload=make_job(global_batch_size=16), replica_id=f"a.{rank}")
    return ScriptReporter(Told(), spec, FormGroup(generation=2, members=("a.0", "a.1"), rendezvous="tcp://h:1"))


def test_speed_is_that_of_the_last_steps_and_reports_are_not_sent_for_each(clock):
    reporter = reporter_of(0)
    for step in range(1, 101):
        clock.s += 0.1
        reporter.take(ScriptReport(step=step, total=200, loss=1.0 / step, metrics={"a": 1.0, "b": math.inf}))
    reporter.flush()
    told = reporter._link
    assert told.steps == list(range(1, 101))
    assert 10 <= len(told.sent) < 50 < len(told.held)
    last = told.sent[-1]
    assert (last.generation, last.step, last.total_steps, last.world_size, last.loss) == (2, 100, 200, 2, 0.01)
    assert last.metrics == {"a": 1.0}
    assert last.samples_per_s == pytest.approx(160.0)


def test_a_loss_that_is_no_number_is_sent_at_once_and_kept(clock):
    reporter = reporter_of(0)
    reporter.take(ScriptReport(step=1, loss=1.0))
    reporter.take(ScriptReport(step=2, loss=math.nan))
    assert [(report.is_diverged, report.loss, report.diverged_at_step) for report in reporter._link.sent] == [
        (False, 1.0, None),
        (True, None, 2),
    ]
    reporter.take(ScriptReport(step=3, loss=1.0))
    assert (reporter._link.held[-1].is_diverged, reporter._link.held[-1].diverged_at_step) == (False, 2)


def test_a_script_that_reports_one_step_twice_has_no_speed_from_it(clock):
    reporter = reporter_of(0)
    for step in (5, 5, 5):
        reporter.take(ScriptReport(step=step))
        clock.s += 1.0
    assert {report.samples_per_s for report in reporter._link.sent} == {None}


def test_only_rank_0_sends_progress(clock):
    reporter = reporter_of(1)
    reporter.take(ScriptReport(step=1, loss=math.nan))
    reporter.flush()
    assert (reporter._link.sent, reporter._link.held, reporter._link.steps) == ([], [], [1])


@pytest.mark.parametrize(
    ("told", "is_lost"),
    [
        ("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:26321: Connection reset by peer", True),
        ("[gloo/transport/tcp/pair.cc:604] Connection closed by peer [127.0.0.1]:26321", True),
        ("NCCL error: remote process exited or there was a network error", True),
        ("mat1 and mat2 shapes cannot be multiplied (8x3 and 4x2)", False),
    ],
)
def test_what_a_rank_raises_because_another_is_gone_is_known(told, is_lost):
    wrapped = ValueError("the epoch failed")
    wrapped.__cause__ = RuntimeError(told)
    assert is_peer_lost(wrapped) == is_lost
    # A script's own connection is no other rank's.
    assert not is_peer_lost(ConnectionResetError(104, "Connection reset by peer"))


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_finds_no_group_in_a_script_with_one_worker():
    text = (
        "import os, torch; from springtide.runtime.script import leave_accelerate_alone; leave_accelerate_alone();"
        "assert os.environ['RANK'] == '0'; import accelerate; model = torch.nn.Linear(1, 1);"
        "assert accelerate.Accelerator(cpu=True).prepare(model) is model"
    )
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    subprocess.run([sys.executable, "-c", text], env={**os.environ, **world}, check=True)
