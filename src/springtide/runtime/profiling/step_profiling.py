"""Profiling a training function on two workers (FaPES, sections 3.2 and 4.1): what is asked, what comes out, and the
parent that starts the two and puts their iterations together. No torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.resources import Device, DeviceId, Node, NodeId
from springtide.core.workload import Entrypoint, GradientBucket, StepProfile
from springtide.perf.communication.baselines import AlphaBeta
from springtide.perf.communication.query import CommunicationSample, Query, SampleFile
from springtide.perf.timeline import computation_scale, fixed_fraction_of, iteration_s
from springtide.runtime.process.child_processes import MeasurementProcesses
from springtide.runtime.profiling.collective_sampler import server_links
from springtide.runtime.profiling.namespaces import NamespaceNetwork, RackNetwork, ended_by_signals

# Everything that the profiler of torch is to see of ours begins so.
MARK = "springtide::"
NUM_WORKERS = 2
DEADLINE_S = 600.0
# Exchanges of these sizes are timed beside the buckets, so that a model with one bucket tells latency from bandwidth.
LADDER_BYTES = (1 << 10, 1 << 16, 1 << 20)

Part = Literal["forward", "backward", "update"]


class ProfileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the two workers is told. `directory` is the measurement's folder, `name` the worker's in it.

    `address` is where it is reached, on the network device `interface`.
    """

    entrypoint: Entrypoint
    params: dict[str, str]
    seed: int
    local_batch_size: int
    num_iterations: int
    rank: int
    name: str
    directory: str
    address: str = "127.0.0.1"
    interface: str = "lo"


class ProfiledIteration(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration on one worker, in seconds; bucket by bucket when it was ready and how long its exchange took."""

    forward_s: float
    backward_s: float
    update_s: float
    total_s: float
    ready_s: list[float]
    exchange_s: list[float]
    bucket_bytes: list[int]


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One call in the order of a step, from the step's begin; `num_buckets` were ready before it began."""

    name: str
    part: Part
    begin_s: float
    duration_s: float
    num_buckets: int


class OperatorTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator in an iteration: their own time, without that of the operators they call."""

    name: str
    num_calls: float
    self_s: float


class WorkerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker measured."""

    device_kind: str
    backend: str
    iterations: dict[str, list[ProfiledIteration]]
    operators: list[Operator]
    operator_totals: list[OperatorTotal]
    exchange_samples: list[tuple[int, float]]
    num_samples: int
    num_unused_parameters: int


class FunctionProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one training function's step, and what was measured beside it.

    `step` is the computation without exchanges in its way, `exchange_s` how long each bucket's exchange takes between
    the two workers when nothing else runs. `measured_step_s` is a step as it really is, exchanges and computation
    overlapping; `predicted_step_s` is the critical path of the first two. `fixed_fraction` of the computation does not
    depend on the batch (perf.timeline). `exchange_samples` pairs bytes with seconds. `num_samples` are those of the
    dataset. By number of workers, `predicted_exchange_s` is what `communication_model` says of each bucket, and
    `steps_per_s` the speed that follows.
    """

    format: Literal["springtide-profile-1"] = "springtide-profile-1"
    name: str
    object_name: str
    source_sha256: str
    params: dict[str, str]
    device_kind: str
    backend: str
    num_workers: int
    global_batch_size: int
    num_iterations: int
    num_samples: int
    step: StepProfile
    fixed_fraction: float
    exchange_s: tuple[float, ...]
    exchange_samples: tuple[tuple[int, float], ...]
    measured_step_s: float
    predicted_step_s: float
    num_unused_parameters: int
    operators: tuple[Operator, ...]
    operator_totals: tuple[OperatorTotal, ...]
    communication_model: str = ""
    predicted_exchange_s: dict[int, tuple[float, ...]] = {}
    steps_per_s: dict[int, float] = {}


def source_digest(source_path: str | Path) -> str:
    """What tells whether a profile is of this text."""
    return hashlib.sha256(Path(source_path).read_bytes()).hexdigest()


def profile_function(
    entrypoint: Entrypoint,
    *,
    name: str,
    params: Mapping[str, str],
    seed: int,
    global_batch_size: int,
    num_iterations: int,
    network: RackNetwork | None = None,
    deadline_s: float = DEADLINE_S,
    on_progress: Callable[[str], None] = lambda _: None,
) -> FunctionProfile:
    """Run the function on two workers of this machine for some iterations and return the timeline of its step.

    With a `network` each of the two is a node of its own in it, one in the first rack and one in the last. Nothing is
    left running, whatever happens. Raises InvalidRequest for what the function does or is asked wrongly, BackendError
    where it fails or is not done by the deadline.
    """
    if global_batch_size < NUM_WORKERS:
        raise InvalidRequest(f"a batch of {global_batch_size} cannot be split between two workers; give --batch 2")
    digest = source_digest(entrypoint.source_path)
    specs = [
        ProfileSpec(
            entrypoint=entrypoint,
            params=dict(params),
            seed=seed,
            local_batch_size=global_batch_size // NUM_WORKERS,
            num_iterations=num_iterations,
            rank=rank,
            name=f"worker-{rank}",
            directory="",
        )
        for rank in range(NUM_WORKERS)
    ]
    try:
        workers = _run_workers(specs, network, deadline_s, on_progress)
    except BackendError as error:
        raise BackendError(f"{name} could not be profiled: {error}") from None
    return _put_together(
        workers,
        name=name,
        object_name=entrypoint.object_name,
        source_sha256=digest,
        params=dict(params),
        global_batch_size=global_batch_size,
        num_iterations=num_iterations,
    )


def _run_workers(
    specs: Sequence[ProfileSpec], network: RackNetwork | None, deadline_s: float, on_progress: Callable[[str], None]
) -> list[WorkerProfile]:
    with contextlib.ExitStack() as stack:
        prefixes: list[list[str]] = [[] for _ in specs]
        if network is not None:
            stack.enter_context(ended_by_signals())
            made = stack.enter_context(NamespaceNetwork(network))
            nodes = (0, network.num_nodes - 1)
            prefixes = [made.prefix(node) for node in nodes]
            specs = [
                msgspec.structs.replace(spec, address=made.address(node), interface=made.INTERFACE)
                for spec, node in zip(specs, nodes, strict=True)
            ]
        processes = stack.enter_context(MeasurementProcesses(deadline_s=deadline_s, on_progress=on_progress))
        for spec, prefix in zip(specs, prefixes, strict=True):
            path = processes.directory / f"{spec.name}.spec.json"
            path.write_bytes(msgspec.json.encode(msgspec.structs.replace(spec, directory=str(processes.directory))))
            # A function that submits jobs while its file is imported must not do so here.
            processes.start(
                spec.name, ["profile", "--spec", str(path)], environment={"SPRINGTIDE_IMPORTING": "1"}, prefix=prefix
            )
        processes.wait()
        results = [processes.files(spec.name).result.read_bytes() for spec in specs]
    return [msgspec.json.decode(result, type=WorkerProfile) for result in results]


def _put_together(
    workers: Sequence[WorkerProfile],
    *,
    name: str,
    object_name: str,
    source_sha256: str,
    params: dict[str, str],
    global_batch_size: int,
    num_iterations: int,
) -> FunctionProfile:
    local = global_batch_size // len(workers)
    step, exchange_s = timeline_of([worker.iterations["computation"] for worker in workers], local)
    fixed_fraction = 0.0
    if local > 1:
        half, _ = timeline_of([worker.iterations["half the batch"] for worker in workers], local // 2)
        fixed_fraction = fixed_fraction_of(step, half)
    overlapped = np.array([[turn.total_s for turn in worker.iterations["overlapped"]] for worker in workers])
    measured_s = float(np.median(overlapped.max(axis=0)))
    predicted_s, _ = iteration_s(step, local, 1, exchange_s)
    first = workers[0]
    ladder = np.mean([[took_s for _, took_s in worker.exchange_samples] for worker in workers], axis=0)
    samples = [(sizes[0], float(took_s)) for sizes, took_s in zip(first.exchange_samples, ladder, strict=True)]
    samples += [(bucket.num_bytes, took_s) for bucket, took_s in zip(step.buckets, exchange_s, strict=True)]
    return FunctionProfile(
        name=name,
        object_name=object_name,
        source_sha256=source_sha256,
        params=params,
        device_kind=first.device_kind,
        backend=first.backend,
        num_workers=len(workers),
        global_batch_size=global_batch_size,
        num_iterations=num_iterations,
        num_samples=first.num_samples,
        step=step,
        fixed_fraction=fixed_fraction,
        exchange_s=tuple(exchange_s),
        exchange_samples=tuple(samples),
        measured_step_s=measured_s,
        predicted_step_s=float(predicted_s),
        num_unused_parameters=first.num_unused_parameters,
        operators=tuple(first.operators),
        operator_totals=tuple(first.operator_totals),
    )


def with_speed_curve(
    profile: FunctionProfile, worker_counts: Sequence[int], measured: SampleFile | None = None, said: str = ""
) -> FunctionProfile:
    """Return the profile with the speed predicted on each number of workers, its global batch held.

    On `measured` (of which `said` is the name) the workers are its first devices, packed: where that placement was
    measured, exchanges cost what they took there, straight lines between sizes. For other placements, and without
    `measured`, they cost what a latency and a bandwidth say that are fitted to all samples, which without `measured`
    are those between the two workers. Counts beyond the devices of `measured` or beyond the batch are left out.
    """
    samples = measured or _own_samples(profile, max(worker_counts))
    said = said or f"{len(samples.samples)} exchanges between the two workers"
    queries, took_s = samples.queries()
    model = AlphaBeta(queries, took_s)
    fabric = samples.fabric()
    device_ids = [device.device_id for node in samples.nodes for device in node.devices]
    predicted: dict[int, tuple[float, ...]] = {}
    num_known = 0
    for count in (count for count in worker_counts if count <= len(device_ids)):
        asked = [Query(fabric.subgraph(device_ids[:count]), bucket.num_bytes) for bucket in profile.step.buckets]
        known = [] if measured is None or not asked else _known(queries, took_s, asked)
        num_known += bool(known)
        predicted[count] = tuple(known or (float(value) for value in model.predict_s(asked)))
    name = f"{model.name}, fitted to {said}"
    if num_known:
        name = f"{said}, as measured there" + (
            "" if num_known >= len(predicted) - (1 in predicted) else f"; else {name}"
        )
    return predict_for_batch(
        msgspec.structs.replace(profile, communication_model=name, predicted_exchange_s=predicted),
        profile.global_batch_size,
    )


def _known(queries: Sequence[Query], took_s: np.ndarray, asked: Sequence[Query]) -> list[float]:
    """The time of each exchange on a placement that was measured; [] for one that was not."""
    points = sorted(
        (query.num_bytes, float(seconds))
        for query, seconds in zip(queries, took_s, strict=True)
        if query.subgraph == asked[0].subgraph
    )
    if not points:
        return []
    sizes, seconds = zip(*points, strict=True)
    # Beyond the largest size the bandwidth stays; below the smallest, the latency.
    return [
        float(np.interp(query.num_bytes, sizes, seconds)) * max(1.0, query.num_bytes / sizes[-1]) for query in asked
    ]


def predict_for_batch(profile: FunctionProfile, global_batch_size: int) -> FunctionProfile:
    """Return the profile with the speeds predicted for that global batch, which does not change what was measured.

    Workers that would not get a sample are left out.
    """
    counts = [count for count in profile.predicted_exchange_s if count <= global_batch_size]
    bucket_s = np.array([profile.predicted_exchange_s[count] for count in counts]).reshape(len(counts), -1)
    local = [-(-global_batch_size // count) for count in counts]
    step_s, _ = iteration_s(profile.step, local, 1, bucket_s, profile.fixed_fraction)
    rates = {count: 1.0 / float(took_s) for count, took_s in zip(counts, step_s, strict=True)}
    return msgspec.structs.replace(profile, steps_per_s=rates)


def platform_steps_per_s(profile: FunctionProfile, global_batch_size: int, num_virtual_shards: int) -> dict[int, float]:
    """Optimizer steps a second by number of workers as this platform's own runtime trains.

    It differs from data parallelism with overlap, of which `steps_per_s` tells: a worker passes once over each of its
    virtual shards, and gradients are exchanged when all of them are done, so that the order of additions is fixed.
    """
    rates = {}
    shard_size = max(1.0, global_batch_size / num_virtual_shards)
    num_filled = min(num_virtual_shards, global_batch_size)
    pass_s = float(computation_scale(profile.step, shard_size, profile.fixed_fraction)) * (
        profile.step.forward_s + profile.step.backward_s
    )
    for count, exchange_s in profile.predicted_exchange_s.items():
        if count <= num_filled:
            rates[count] = 1.0 / (-(-num_filled // count) * pass_s + sum(exchange_s) + profile.step.update_s)
    return rates


def _own_samples(profile: FunctionProfile, num_devices: int) -> SampleFile:
    """What the two workers measured, as if on a machine that has room for more of them."""
    node_id = NodeId("here")
    devices = tuple(
        Device(device_id=DeviceId(f"here/{index}"), node_id=node_id, index=index)
        for index in range(max(NUM_WORKERS, num_devices))
    )
    pair = (devices[0].device_id, devices[1].device_id)
    rate = max(size / took_s for size, took_s in profile.exchange_samples)
    return SampleFile(
        source="a profile's two workers",
        nodes=(Node(node_id=node_id, devices=devices),),
        links=(server_links("here", profile.device_kind, rate, rate, rate),),
        samples=tuple(
            CommunicationSample(device_ids=pair, num_bytes=size, duration_s=took_s)
            for size, took_s in profile.exchange_samples
        ),
    )


def timeline_of(
    iterations: Sequence[Sequence[ProfiledIteration]], local_batch_size: int
) -> tuple[StepProfile, tuple[float, ...]]:
    """The step that the workers' iterations [workers][iterations] have in common, and each bucket's exchange time.

    Of each iteration the slower worker counts, because an exchange begins when both have come to it; then the median of
    all iterations. Medians keep the order of moments, so a bucket is never ready before the one that precedes it, nor
    after the backward pass.
    """
    counts = {tuple(iteration.bucket_bytes) for worker in iterations for iteration in worker}
    if len(counts) != 1:
        raise InvalidRequest(
            "its iterations do not exchange the same gradients; a function whose model changes cannot be profiled"
        )

    def middle(values: Callable[[ProfiledIteration], list[float]]) -> np.ndarray:
        by_worker = np.array([[values(iteration) for iteration in worker] for worker in iterations])
        return np.asarray(np.median(by_worker.max(axis=0), axis=0))

    forward_s, computed_s, update_s = middle(lambda i: [i.forward_s, i.forward_s + i.backward_s, i.update_s])
    ready_s = middle(lambda i: i.ready_s)
    exchange_s = middle(lambda i: i.exchange_s)
    buckets = tuple(
        GradientBucket(ready_s=float(moment), num_bytes=size)
        for moment, size in zip(ready_s, next(iter(counts)), strict=True)
    )
    profile = StepProfile(
        local_batch_size=local_batch_size,
        forward_s=float(forward_s),
        backward_s=float(computed_s - forward_s),
        update_s=float(update_s),
        buckets=buckets,
    )
    return profile, tuple(float(took_s) for took_s in exchange_s)


def read_profile(path: Path) -> FunctionProfile:
    """Read what `springtide profile` wrote. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FunctionProfile)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from None
    except msgspec.DecodeError:
        raise InvalidRequest(f"{path} is no profile; `springtide profile FILE` writes one") from None
