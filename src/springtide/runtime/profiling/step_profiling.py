"""Profiling a training function on two workers (FaPES, sections 3.2 and 4.1): orders, results and the parent process.

The parent starts the two workers and combines their iterations. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.resources import Device, DeviceId, Node, NodeId
from springtide.core.workload import Entrypoint, GradientBucket, StepProfile
from springtide.perf.communication.baselines import AlphaBeta
from springtide.perf.communication.query import CommunicationSample, Query, SampleFile
from springtide.perf.timeline import computation_scale, fixed_fraction_of, iteration_s
from springtide.runtime.process.child_processes import MeasurementProcesses
from springtide.runtime.profiling.collective_sampler import server_links
from springtide.runtime.profiling.namespaces import NamespaceNetwork, RackNetwork, ended_by_signals

# The prefix of our events in torch's profiler.
MARK = "springtide::"
NUM_WORKERS = 2
DEADLINE_S = 600.0
# Sizes of further timed exchanges, so that latency and bandwidth can be separated for a model with one bucket too.
LADDER_BYTES = (1 << 10, 1 << 16, 1 << 20)

Part = Literal["forward", "backward", "update"]


class ProfileSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one of the two workers is to do. `directory` is the measurement's folder, `name` that of the worker's files.

    The worker is reached at `address`.
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


class ProfiledIteration(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration on one worker, in seconds; for each bucket when it was ready, its exchange time and its size."""

    forward_s: float
    backward_s: float
    update_s: float
    total_s: float
    ready_s: list[float]
    exchange_s: list[float]
    bucket_bytes: list[int]


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an operator in a step; `begin_s` counts from the step's start, `num_buckets` were ready by then."""

    name: str
    part: Part
    begin_s: float
    duration_s: float
    num_buckets: int


class OperatorTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator in an iteration; `self_s` excludes the operators that it calls."""

    name: str
    num_calls: float
    self_s: float


class WorkerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one worker."""

    device_kind: str
    backend: str
    iterations: dict[str, list[ProfiledIteration]]
    operators: list[Operator]
    operator_totals: list[OperatorTotal]
    exchange_samples: list[tuple[int, float]]
    num_samples: int
    num_unused_parameters: int


class FunctionProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of one training function's step, with further measurements; the content of a profile's file.

    `step` is the computation without exchanges, `exchange_s` the time of each bucket's exchange between the two workers
    when nothing else runs. `measured_step_s` is a real step with exchanges overlapping the computation;
    `predicted_step_s` is the critical path computed from the first two. `fixed_fraction` of the computation does not
    depend on the batch (perf.timeline). `exchange_samples` are (bytes, seconds). `num_samples` is the dataset's length.
    By number of workers, `predicted_exchange_s` is `communication_model`'s prediction for each bucket, and
    `steps_per_s` the resulting speed.
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
    """A digest of the source text, by which a profile is matched to its file."""
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

    With a `network`, the workers are two of its nodes, one in the first rack and one in the last. No process is left
    running, also after an error. Raises InvalidRequest if the function or an argument is at fault, BackendError if the
    measurement fails or exceeds the deadline.
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
    return _combine(
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
                msgspec.structs.replace(spec, address=made.address(node))
                for spec, node in zip(specs, nodes, strict=True)
            ]
        processes = stack.enter_context(MeasurementProcesses(deadline_s=deadline_s, on_progress=on_progress))
        for spec, prefix in zip(specs, prefixes, strict=True):
            path = processes.directory / f"{spec.name}.spec.json"
            path.write_bytes(msgspec.json.encode(msgspec.structs.replace(spec, directory=str(processes.directory))))
            # Makes a file that submits jobs on import raise an error.
            processes.start(
                spec.name, ["profile", "--spec", str(path)], environment={"SPRINGTIDE_IMPORTING": "1"}, prefix=prefix
            )
        processes.wait()
        results = [processes.files(spec.name).result.read_bytes() for spec in specs]
    return [decode_json(result, WorkerProfile) for result in results]


def _combine(
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
    profile: FunctionProfile, worker_counts: Sequence[int], measured: SampleFile | None = None, measured_name: str = ""
) -> FunctionProfile:
    """Return the profile with the speed predicted for each number of workers, with the same global batch.

    With `measured` (called `measured_name` in the result) the workers are its first devices, packed. If exchanges on
    that placement were measured, their times are interpolated linearly between sizes. For other placements, and without
    `measured`, exchanges follow a latency and bandwidth fitted to all samples, which without `measured` are those of
    the two workers. Counts beyond the devices of `measured` or beyond the batch are left out.
    """
    samples = measured or _own_samples(profile, max(worker_counts))
    measured_name = measured_name or f"{len(samples.samples)} exchanges between the two workers"
    queries, took_s = samples.queries()
    model = AlphaBeta(queries, took_s)
    fabric = samples.fabric()
    device_ids = [device.device_id for node in samples.nodes for device in node.devices]
    predicted: dict[int, tuple[float, ...]] = {}
    num_known = 0
    for count in (count for count in worker_counts if count <= len(device_ids)):
        wanted = [Query(fabric.subgraph(device_ids[:count]), bucket.num_bytes) for bucket in profile.step.buckets]
        known = [] if measured is None or not wanted else _known(queries, took_s, wanted)
        num_known += bool(known)
        predicted[count] = tuple(known or (float(value) for value in model.predict_s(wanted)))
    name = f"{model.name}, fitted to {measured_name}"
    if num_known:
        name = f"{measured_name}, as measured there" + (
            "" if num_known >= len(predicted) - (1 in predicted) else f"; else {name}"
        )
    return predict_for_batch(
        msgspec.structs.replace(profile, communication_model=name, predicted_exchange_s=predicted),
        profile.global_batch_size,
    )


def _known(queries: Sequence[Query], took_s: np.ndarray, wanted: Sequence[Query]) -> list[float]:
    """The time of each exchange, interpolated from measurements on its placement; [] if there are none."""
    points = sorted(
        (query.num_bytes, float(seconds))
        for query, seconds in zip(queries, took_s, strict=True)
        if query.subgraph == wanted[0].subgraph
    )
    if not points:
        return []
    sizes, seconds = zip(*points, strict=True)
    # Beyond the largest measured size the bandwidth is constant, below the smallest the latency.
    return [
        float(np.interp(query.num_bytes, sizes, seconds)) * max(1.0, query.num_bytes / sizes[-1]) for query in wanted
    ]


def predict_for_batch(profile: FunctionProfile, global_batch_size: int) -> FunctionProfile:
    """Return the profile with the speeds predicted for another global batch; measurements stay unchanged.

    Numbers of workers beyond the batch are left out.
    """
    counts = [count for count in profile.predicted_exchange_s if count <= global_batch_size]
    bucket_s = np.array([profile.predicted_exchange_s[count] for count in counts]).reshape(len(counts), -1)
    local = [-(-global_batch_size // count) for count in counts]
    step_s, _ = iteration_s(profile.step, local, 1, bucket_s, profile.fixed_fraction)
    rates = {count: 1.0 / float(took_s) for count, took_s in zip(counts, step_s, strict=True)}
    return msgspec.structs.replace(profile, steps_per_s=rates)


def platform_steps_per_s(
    profile: FunctionProfile, global_batch_size: int, num_virtual_shards: int | None
) -> dict[int, float]:
    """Optimizer steps per second by number of workers with this platform's own runtime.

    With virtual shards a worker runs these one after another, and gradients are exchanged when all are done, so that
    the order of additions is fixed. Without, it is data parallelism with overlap.
    """
    if num_virtual_shards is None:
        return dict(predict_for_batch(profile, global_batch_size).steps_per_s)
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
    """The two workers' exchanges as a SampleFile of a machine with at least `num_devices` devices."""
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
    """The typical step of `iterations`[worker][iteration], and each bucket's exchange time.

    Takes the slower worker of each iteration, because an exchange begins when both are ready, and then the median over
    iterations. Medians keep the order of times, so the buckets stay in order and within the backward pass.
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
    """Read a profile that `springtide profile` wrote. Raises InvalidRequest."""
    try:
        return decode_json(path.read_bytes(), FunctionProfile)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from None
    except msgspec.DecodeError:
        raise InvalidRequest(f"{path} is no profile; `springtide profile FILE` writes one") from None
