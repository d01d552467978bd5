"""Profiles of training functions: how iterations become a timeline, what follows from it, and two real workers."""

from __future__ import annotations

import math
import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from kits.simulation.sweeps import only_in_full
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.resources import Device, DeviceId, Node, NodeId
from springtide.core.workload import Entrypoint
from springtide.perf.communication.query import CommunicationSample, SampleFile
from springtide.runtime.profiling.collective_sampler import server_links
from springtide.runtime.profiling.namespaces import RackNetwork, list_namespaces, why_not_here
from springtide.runtime.profiling.step_profiling import (
    MARK,
    FunctionProfile,
    ProfiledIteration,
    platform_steps_per_s,
    predict_for_batch,
    profile_function,
    read_profile,
    source_digest,
    timeline_of,
    with_speed_curve,
)
from springtide.runtime.profiling.step_worker import operators_of, turns_of

NUM_BYTES = [4 * 16 * 16, 4 * 8 * 16]


def iteration(factor: float = 1.0, sizes: list[int] = NUM_BYTES) -> ProfiledIteration:
    return ProfiledIteration(
        forward_s=0.01 * factor,
        backward_s=0.02 * factor,
        update_s=0.001,
        total_s=0.04 * factor,
        ready_s=[0.02 * factor, 0.03 * factor],
        exchange_s=[0.004, 0.002],
        bucket_bytes=sizes,
    )


def test_of_each_iteration_the_slower_worker_counts_then_the_median():
    ours = [iteration(1.0), iteration(1.0), iteration(9.0)]
    theirs = [iteration(2.0), iteration(1.5), iteration(1.0)]
    step, exchange_s = timeline_of([ours, theirs], 8)
    # The slower ones are 2.0, 1.5 and 9.0 times as long.
    assert step.forward_s == pytest.approx(0.02)
    assert step.backward_s == pytest.approx(0.04)
    assert [bucket.ready_s for bucket in step.buckets] == pytest.approx([0.04, 0.06])
    assert [bucket.num_bytes for bucket in step.buckets] == NUM_BYTES
    assert exchange_s == pytest.approx((0.004, 0.002))
    assert step.local_batch_size == 8


def test_a_model_that_changes_its_gradients_is_refused():
    with pytest.raises(InvalidRequest, match="same gradients"):
        timeline_of([[iteration()], [iteration(sizes=[8, 8])]], 8)


def test_the_kinds_of_iteration_take_turns():
    turns = turns_of(8, 3)
    assert [turn.name for turn in turns if turn.name] == ["computation", "overlapped", "half the batch"] * 3
    assert turns[0].mode == "plain"
    assert turns[-1].mode == "operators"
    assert {turn.local_batch_size for turn in turns if turn.name == "half the batch"} == {4}
    assert all(turn.name != "half the batch" for turn in turns_of(1, 3))


@pytest.fixture
def profile() -> FunctionProfile:
    step, exchange_s = timeline_of([[iteration()]], 8)
    return FunctionProfile(
        name="fit",
        object_name="fit",
        source_sha256="0",
        params={},
        device_kind="cpu",
        backend="gloo",
        num_workers=2,
        global_batch_size=16,
        num_iterations=1,
        num_samples=100,
        step=step,
        fixed_fraction=0.2,
        exchange_s=exchange_s,
        exchange_samples=((1024, 0.0001), (1 << 20, 0.001)),
        measured_step_s=0.04,
        predicted_step_s=0.035,
        num_unused_parameters=0,
        operators=(),
        operator_totals=(),
    )


def test_the_speed_curve_follows_from_the_timeline(profile):
    curve = with_speed_curve(profile, (1, 2, 4, 32))
    assert curve.communication_model == "alpha-beta, fitted to 2 exchanges between the two workers"
    assert list(curve.steps_per_s) == [1, 2, 4], "32 workers get no sample each of a batch of 16"
    # One worker exchanges nothing, its batch is twice the profiled one.
    assert 1.0 / curve.steps_per_s[1] == pytest.approx((0.2 + 0.8 * 2) * 0.03 + 0.001)
    assert curve.steps_per_s[1] < curve.steps_per_s[2] < curve.steps_per_s[4]
    larger = predict_for_batch(curve, 64)
    assert list(larger.steps_per_s) == [1, 2, 4, 32]
    assert larger.steps_per_s[2] < curve.steps_per_s[2]
    assert larger.step == profile.step


def test_the_platform_passes_over_shards_and_exchanges_behind_them(profile):
    curve = with_speed_curve(profile, (1, 2, 4, 8))
    rates = platform_steps_per_s(curve, 16, 4)
    assert list(rates) == [1, 2, 4], "four shards keep four workers busy"
    pass_s = (0.2 + 0.8 * 4 / 8) * 0.03
    assert 1.0 / rates[1] == pytest.approx(4 * pass_s + 0.001)
    assert 1.0 / rates[2] == pytest.approx(2 * pass_s + sum(curve.predicted_exchange_s[2]) + 0.001)
    assert list(platform_steps_per_s(curve, 2, 4)) == [1, 2], "two samples fill two shards"


def test_other_samples_give_another_curve(profile):
    devices = tuple(
        Device(device_id=DeviceId(f"n{place}/0"), node_id=NodeId(f"n{place}"), index=0) for place in range(2)
    )
    slow = SampleFile(
        source="slow links",
        nodes=tuple(Node(node_id=device.node_id, devices=(device,)) for device in devices),
        links=(server_links("slow", "cpu", 1e9, 1e6, 1e6),),
        samples=tuple(
            CommunicationSample(
                device_ids=(devices[0].device_id, devices[1].device_id), num_bytes=size, duration_s=size / 1e4
            )
            for size in (1 << 8, 1 << 14)
        ),
    )
    curve = with_speed_curve(profile, (1, 2, 4), slow, "slow.json")
    assert curve.communication_model == "slow.json, as measured there"
    assert list(curve.steps_per_s) == [1, 2], "nobody measured four"
    assert curve.predicted_exchange_s[1] == (0.0, 0.0)
    assert curve.predicted_exchange_s[2] == pytest.approx((NUM_BYTES[0] / 1e4, NUM_BYTES[1] / 1e4))
    assert curve.steps_per_s[2] < curve.steps_per_s[1], "the exchange costs more than half the computation"


def test_a_profile_is_read_as_it_was_written(profile, tmp_path):
    path = tmp_path / "fit.profile.json"
    path.write_bytes(msgspec.json.encode(with_speed_curve(profile, (1, 2))))
    assert read_profile(path) == with_speed_curve(profile, (1, 2))
    path.write_text("{}")
    with pytest.raises(InvalidRequest, match="is no profile; `springtide profile FILE` writes one"):
        read_profile(path)
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read_profile(tmp_path / "none.json")


@dataclass
class Range:
    start: float
    length: float

    def elapsed_us(self) -> float:
        return self.length


@dataclass
class Event:
    name: str
    time_range: Range
    cpu_parent: Event | None = None


def test_operators_are_those_that_the_step_calls_itself():
    forward = Event(f"{MARK}forward", Range(100, 50))
    wrapper = Event("DistributedDataParallel.forward", Range(105, 40), forward)
    linear = Event("aten::linear", Range(110, 20), wrapper)
    inner = Event("aten::addmm", Range(112, 15), linear)
    loss = Event("aten::mse_loss", Range(146, 3), forward)
    backward = Event(f"{MARK}backward", Range(150, 60))
    node = Event("autograd::engine::evaluate_function: AddmmBackward0", Range(160, 20), backward)
    bucket = Event(f"{MARK}bucket", Range(175, 1), node)
    last = Event("autograd::engine::evaluate_function: ViewBackward0", Range(185, 5), backward)
    outside = Event("aten::copy_", Range(400, 5))
    found = operators_of([outside, last, bucket, node, backward, loss, inner, linear, wrapper, forward])
    assert [(operator.name, operator.part, operator.num_buckets) for operator in found] == [
        ("aten::linear", "forward", 0),
        ("aten::mse_loss", "forward", 0),
        ("AddmmBackward0", "backward", 0),
        ("ViewBackward0", "backward", 1),
    ]
    assert found[0].begin_s == pytest.approx(10e-6)
    assert found[2].duration_s == pytest.approx(20e-6)


HEAD = """
import torch
import springtide as st

def data(count=64):
    return torch.randn(count, 16), torch.randn(count, 4)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
        self.spare = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

@st.train(global_batch=16)
def fit(ctx):
    model, optimizer = ctx.prepare(Net(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""
LOOP = """
    for batch in ctx.batches(data()):
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
        ctx.metrics(steps=ctx.step_number)
    raise RuntimeError("nobody gets here: the profile ends inside the loop")
"""


def run(
    tmp_path: Path,
    body: str,
    *,
    head: str = HEAD,
    deadline_s: float = 100.0,
    num_iterations: int = 3,
    network: RackNetwork | None = None,
) -> FunctionProfile:
    path = tmp_path / "train.py"
    path.write_text(head + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n", encoding="utf-8")
    return profile_function(
        Entrypoint(source_path=str(path), object_name="fit", import_root=str(tmp_path)),
        name="fit",
        params={"width": "8"},
        seed=3,
        global_batch_size=16,
        num_iterations=num_iterations,
        network=network,
        deadline_s=deadline_s,
    )


def members_of_this_process() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"SPRINGTIDE_MEASUREMENT_PARENT={os.getpid()}".encode() in (
                entry / "environ"
            ).read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_two_workers_give_a_timeline(tmp_path):
    profile = run(tmp_path, LOOP)
    assert members_of_this_process() == []
    step = profile.step
    assert sum(bucket.num_bytes for bucket in step.buckets) >= 4 * (16 * 32 + 32 + 32 * 4 + 4)
    moments = [bucket.ready_s for bucket in step.buckets]
    assert moments == sorted(moments)
    assert step.forward_s < moments[0], "no bucket is ready before the backward pass has begun"
    assert moments[-1] <= step.forward_s + step.backward_s + 1e-12
    assert step.update_s > 0
    assert step.local_batch_size == 8
    assert len(profile.exchange_s) == len(step.buckets)
    assert all(took_s > 0 for took_s in profile.exchange_s)
    assert profile.predicted_step_s >= step.forward_s + step.backward_s + step.update_s
    assert profile.measured_step_s > 0
    assert 0.0 <= profile.fixed_fraction <= 1.0
    assert profile.num_unused_parameters == 2, "weight and bias of the spare layer"
    assert profile.num_samples == 64
    assert profile.source_sha256 == source_digest(tmp_path / "train.py")
    parts = [operator.part for operator in profile.operators]
    assert parts == sorted(parts, key=["forward", "backward", "update"].index)
    assert [operator.name for operator in profile.operators].count("aten::linear") == 2
    assert any("AddmmBackward" in operator.name for operator in profile.operators if operator.part == "backward")
    begins = [operator.begin_s for operator in profile.operators]
    assert begins == sorted(begins)
    totals = {total.name: total for total in profile.operator_totals}
    assert totals["aten::addmm"].num_calls == 2
    assert all(total.self_s >= 0 and math.isfinite(total.self_s) for total in profile.operator_totals)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        # What prepare returns is not used, the model is asked twice, evaluated and saved inside the loop.
        """
        own = Net()
        ctx.prepare(own, torch.optim.Adam(own.parameters()))
        for batch in ctx.batches(data()):
            ctx.step(own(batch.x).square().mean() + own(batch.x + 1).mean())
            with torch.no_grad():
                own.eval()(batch.x)
                own.train()
            ctx.save()
        """,
        # Everything is caught, even what unwinds the function.
        """
        try:
            for batch in ctx.batches(data()):
                ctx.step(model(batch.x).mean())
        except:
            print("caught")
        """,
    ],
)
def test_functions_are_free_in_how_they_use_the_context(tmp_path, body):
    head = HEAD.replace("    model, optimizer = ctx.prepare", "    if PREPARES: model, optimizer = ctx.prepare")
    profile = run(tmp_path, body, head=f"PREPARES = {'ctx.prepare' not in body}\n{head}", num_iterations=1)
    assert profile.step.buckets
    assert profile.operators


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "error", "sentence"),
    [
        (
            "for batch in ctx.batches(data()):\n    raise ValueError('no such colour')",
            BackendError,
            r"fit could not be profiled: ValueError: no such colour \(train.py:\d+\)",
        ),
        pytest.param(
            "return", InvalidRequest, "fit returned after 0 iterations and a profile takes", marks=only_in_full
        ),
        pytest.param(
            "for batch in ctx.batches(data(12)):\n    ctx.step(model(batch.x).mean())",
            InvalidRequest,
            "the dataset has 12 samples and the batch takes 16; ask for a smaller --batch",
            marks=only_in_full,
        ),
        (
            "for batch in ctx.batches(data()):\n    ctx.step(model.first(batch.x).mean())",
            InvalidRequest,
            r"no gradient passed through the model: call the model",
        ),
        pytest.param(
            "for batch in ctx.batches(data()):\n    ctx.step(torch.ones(1, requires_grad=True).sum())",
            InvalidRequest,
            "no parameter of the model got a gradient",
            marks=only_in_full,
        ),
    ],
)
def test_what_goes_wrong_is_one_sentence(tmp_path, body, error, sentence):
    with pytest.raises(error) as raised:
        run(tmp_path, body)
    assert re.search(sentence, str(raised.value)), str(raised.value)
    assert members_of_this_process() == []


@pytest.mark.slow
def test_slow_links_stand_out_of_the_step(tmp_path):
    if reason := why_not_here():
        pytest.skip(reason)
    large = HEAD.replace("Linear(16, 32)", "Linear(16, 16384)").replace("Linear(32, 4)", "Linear(16384, 4)")
    network = RackNetwork(racks=(1, 1), nic_bytes_per_s=5e6, uplink_bytes_per_s=5e6)
    profile = run(tmp_path, LOOP, head=large, num_iterations=1, network=network)
    num_bytes = sum(bucket.num_bytes for bucket in profile.step.buckets)
    assert num_bytes > 1_300_000
    # Each of two sends and receives all of it once; what a bucket of tokens lets through at once is less than half.
    assert sum(profile.exchange_s) > 0.5 * num_bytes / 5e6
    assert profile.measured_step_s > 0.5 * num_bytes / 5e6
    assert profile.predicted_step_s > sum(profile.exchange_s)
    assert not [name for name in list_namespaces() if f"-{os.getpid()}-" in name]


@pytest.mark.slow
def test_a_function_that_hangs_is_ended_at_the_deadline(tmp_path):
    hang = "import time\nfor batch in ctx.batches(data()):\n    time.sleep(1000)"
    with pytest.raises(BackendError, match=r"could not be profiled: it was not done after 6\.0 s and was ended"):
        run(tmp_path, hang, deadline_s=6.0)
    assert members_of_this_process() == []
