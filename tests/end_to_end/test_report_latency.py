"""How long a step's gradient noise takes to the control plane, and what measuring it costs: printed, not judged.

Wall time on a shared machine decides no test. Run with `-s` to read the figures.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from springtide.backends.inbox import Inbox
from springtide.backends.local.executor import LocalExecutor
from springtide.core.events import JobSubmitted, ProgressReported
from springtide.core.resources import make_node
from springtide.core.workload import AdaptiveBatch, Entrypoint, TrainingJob
from springtide.runtime.elastic.step_vector import StepVector
from springtide.runtime.elastic.training_cursor import NOISE_STRIDE, NUM_DENSE_STEPS
from springtide.runtime.models.named_tensors import TrainingState
from springtide.service.platform import Platform

pytestmark = pytest.mark.slow

# The end of a step is when its optimizer has stepped; both processes read the same monotonic clock.
HOOKED = """
import time
import torch

def fit(ctx):
    x = torch.randn(4000, 16)
    y = x.sum(1, keepdim=True)
    model, optimizer = ctx.prepare(torch.nn.Linear(16, 1), lambda p: torch.optim.SGD(p, lr=0.01))
    optimizer.register_step_post_hook(lambda *_: ctx.metrics(ended_at_s=time.monotonic()))
    for batch in ctx.batches((x, y)):
        time.sleep(0.004)
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
"""


def quantiles(values):
    low, middle, high = np.percentile(np.array(values) * 1000, [10, 50, 90])
    return f"p10 {low:.2f} ms, p50 {middle:.2f} ms, p90 {high:.2f} ms ({len(values)} reports)"


@pytest.mark.timeout(180)
def test_how_long_a_report_takes_from_the_end_of_its_step(tmp_path, monkeypatch, capsys):
    (tmp_path / "state").mkdir()
    source = tmp_path / "job.py"
    source.write_text(HOOKED)
    received, taken = [], []
    original = Inbox.progress

    def progress(inbox, event):
        if "ended_at_s" in event.metrics and event.grad_var is not None:
            received.append((event.step, time.monotonic() - event.metrics["ended_at_s"]))
        return original(inbox, event)

    monkeypatch.setattr(Inbox, "progress", progress)
    node = make_node("local", 2)
    executors = []

    def make_executor(clock):
        executors.append(LocalExecutor(tmp_path / "state", clock, nodes=[node]))
        executors[0].open()
        return executors[0]

    platform = Platform(tmp_path / "state", "elastic", [node], make_executor)

    def note(seq, step, view):
        now_s = time.monotonic()
        for event in step.events:
            if isinstance(event, ProgressReported) and event.grad_var is not None:
                taken.append((event.step, now_s - event.metrics["ended_at_s"]))

    platform.subscribe(note)
    platform.start(on_stop=lambda: None)
    job = TrainingJob(
        job_id="fit-1",
        name="fit",
        entrypoint=Entrypoint(source_path=str(source), object_name="fit"),
        num_epochs=8,
        max_workers=2,
        global_batch_size=32,
        exact=False,
        batch=AdaptiveBatch(min_size=32, max_size=256),
    )
    platform.submit(JobSubmitted(job=job))
    deadline_s = time.monotonic() + 120.0
    while not platform.view().jobs["fit-1"].state.is_terminal and time.monotonic() < deadline_s:
        time.sleep(0.05)
    record = platform.view().jobs["fit-1"]
    platform.request_shutdown(stop_workers=True)
    platform.join(30.0)
    for executor in executors:
        executor.close(stop_workers=True)
    assert record.state.value == "SUCCEEDED", record.reason
    assert record.learnt.noise is not None
    assert len(received) > 10
    # A report may wait for its turn: the journal takes one a second of each job. Those that did not wait tell the way.
    prompt = [late_s for step, late_s in taken if late_s < 0.1]
    with capsys.disabled():
        print(f"\nfrom the end of a step to its report at the platform: {quantiles([late for _, late in received])}")
        print(f"to its event journaled and decided on, where it need not wait: {quantiles(prompt or [0.0])}")


@pytest.mark.parametrize("num_millions", [1, 11])
def test_what_measuring_the_noise_costs_a_shard(num_millions, capsys):
    torch.set_num_threads(1)
    width = int((num_millions * 1e6 / 4) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4)))
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.01), torch.device("cpu"))
    samples = torch.randn(16, width)
    costs = {}
    for measures_noise in (False, True, False, True):
        payload = StepVector(state, 4, measures_noise=measures_noise)
        took = []
        for _ in range(12):
            payload.begin_step()
            payload.begin_shard()
            began_s = time.perf_counter()
            model(samples).square().mean().backward()
            computed_s = time.perf_counter()
            vector = payload.capture(0.0, 0.25, is_measured=measures_noise)
            took.append((time.perf_counter() - computed_s, computed_s - began_s))
            payload.pool.give(vector)
        costs[measures_noise] = min(costs.get(measures_noise, (1e9, 1e9)), tuple(np.median(took, axis=0)))
    extra_s = costs[True][0] - costs[False][0]
    with capsys.disabled():
        print(
            f"\n{num_millions} million parameters, 16 samples: noise adds {extra_s * 1000:.2f} ms to a shard whose "
            f"forward and backward take {costs[True][1] * 1000:.1f} ms ({100 * extra_s / costs[True][1]:.1f} %), "
            f"on one step of {NOISE_STRIDE} from the {NUM_DENSE_STEPS}th on"
        )
