"""One of the two workers of a profile: it runs the user's function for some iterations and writes the measurements."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from springtide.core.errors import InvalidRequest
from springtide.runtime.data.shards import seed_everything
from springtide.runtime.elastic.context import ElasticContext
from springtide.runtime.process.child_member import run_member
from springtide.runtime.process.child_processes import MemberFiles
from springtide.runtime.process.deferred_compiler import defer_compiler
from springtide.runtime.process.entry import as_function, load_object
from springtide.runtime.process.exits import WorkerExit
from springtide.runtime.profiling.exchange import DeviceTimer, MeasuredExchange, backend_of
from springtide.runtime.profiling.profiled_steps import MeasuredTurn, ProfiledSteps
from springtide.runtime.profiling.step_profiling import (
    LADDER_BYTES,
    MARK,
    NUM_WORKERS,
    Operator,
    OperatorTotal,
    Part,
    ProfileSpec,
    WorkerProfile,
)

_NUM_WARM_UP = 3
_NUM_OPERATOR_ITERATIONS = 3
_NUM_LADDER_REPEATS = 9
# The wrapper's forward is not an operator of the model.
_WRAPPER = "DistributedDataParallel.forward"


class _DiscardedArtifacts:
    """Saves nothing: the model of a profile is discarded."""

    def write(self, file_name: str) -> str:
        return file_name

    def path(self, file_name: str) -> str:
        return file_name


def run_profile_worker(spec: ProfileSpec) -> NoReturn:
    """Measure, write the result and end the process."""
    files = MemberFiles(Path(spec.directory), spec.name)
    run_member(files, lambda: files.finish(_measure(spec, files)), source_path=spec.entrypoint.source_path)


def turns_of(local_batch_size: int, num_iterations: int) -> list[MeasuredTurn]:
    """The iterations of a profile in order.

    The modes to be compared alternate, so that other load on the machine affects all of them alike.
    """
    full = local_batch_size
    turns = [MeasuredTurn(mode="plain", local_batch_size=full, progress="warming up")]
    turns += [MeasuredTurn(mode="apart", local_batch_size=full)] * _NUM_WARM_UP
    for index in range(num_iterations):
        progress = f"iteration {index + 1} of {num_iterations}: {full} samples a worker"
        turns.append(MeasuredTurn(name="computation", mode="apart", local_batch_size=full, progress=progress))
        turns.append(MeasuredTurn(name="overlapped", mode="overlapped", local_batch_size=full))
        if full > 1:
            turns.append(MeasuredTurn(name="half the batch", mode="apart", local_batch_size=full // 2))
    turns += [MeasuredTurn(mode="operators", local_batch_size=full)] * _NUM_OPERATOR_ITERATIONS
    return turns


def _measure(spec: ProfileSpec, files: MemberFiles) -> WorkerProfile:
    torch.set_num_threads(1)
    defer_compiler()
    device = _device_of(spec.rank)
    store = c10d.FileStore(f"{spec.directory}/store", NUM_WORKERS)
    exchange = MeasuredExchange(c10d.PrefixStore("exchange", store), spec.rank, NUM_WORKERS, device, spec.address)
    make_default_group(exchange, c10d.PrefixStore("ddp", store), spec.rank, device)
    samples = _time_ladder(exchange, device)
    turns = turns_of(spec.local_batch_size, spec.num_iterations)
    on_progress = files.report_progress if spec.rank == 0 else lambda _: None
    steps = ProfiledSteps(turns, exchange, spec.rank, device, spec.seed, on_progress)
    context = ElasticContext(steps, _DiscardedArtifacts(), Path(spec.directory), [device], spec.params)
    seed_everything(spec.seed)
    function = as_function(load_object(spec.entrypoint, "springtide_user_profiled"))
    seed_everything(spec.seed)
    with contextlib.suppress(WorkerExit):
        function(context)
    # A function that catches BaseException returns instead of being unwound; its measurement is valid.
    if steps.step == steps.num_iterations:
        return _result(steps, samples, device)
    if not context.is_prepared:
        raise InvalidRequest(
            f"{spec.entrypoint.object_name} returned without ctx.prepare(); call ctx.prepare(model, optimizer), then "
            "loop over ctx.batches(dataset)"
        )
    raise InvalidRequest(
        f"{spec.entrypoint.object_name} returned after {steps.step} iterations and a profile takes "
        f"{steps.num_iterations}; loop over all of ctx.batches(dataset), or ask for fewer with --iterations"
    )


def make_default_group(exchange: MeasuredExchange, store: c10d.Store, rank: int, device: torch.device) -> None:
    """Make the group that DistributedDataParallel uses. On CPUs it is that of the exchange, which is guarded: one of
    gloo's own would take connections from other accounts."""
    backend = backend_of(device)
    if device.type == "cpu":
        backend = "guarded"
        dist.Backend.register_backend(backend, lambda *_: exchange.group, devices=["cpu"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=exchange.num_members)


def _device_of(rank: int) -> torch.device:
    """One GPU for each worker if there are enough, else the CPU."""
    if torch.cuda.device_count() >= NUM_WORKERS and dist.is_nccl_available():
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return torch.device("cpu")


def _time_ladder(exchange: MeasuredExchange, device: torch.device) -> list[tuple[int, float]]:
    """The median time of an exchange of each of LADDER_BYTES, each started after a barrier."""
    watch = DeviceTimer(device)
    samples = []
    for num_bytes in LADDER_BYTES:
        tensor = torch.zeros(num_bytes // 4, device=device)
        times = []
        for _ in range(_NUM_LADDER_REPEATS):
            exchange.barrier()
            began = watch.now()
            exchange.all_reduce(tensor)
            times.append(watch.seconds(began, watch.now()))
        samples.append((num_bytes, statistics.median(times)))
    return samples


def _result(steps: ProfiledSteps, samples: list[tuple[int, float]], device: torch.device) -> WorkerProfile:
    events: list[Any] = [profile.events() for profile in steps.profiles]  # type: ignore[no-untyped-call]
    return WorkerProfile(
        device_kind=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        backend=backend_of(device),
        iterations=steps.iterations,
        operators=operators_of(events[-1]),
        operator_totals=_totals(events, device),
        exchange_samples=samples,
        num_samples=steps.num_samples,
        num_unused_parameters=steps.num_unused,
    )


def operators_of(events: Any) -> list[Operator]:
    """The operators that a step calls directly, in order: the events right below the marks of its parts."""
    parts = {event.name.removeprefix(MARK): event for event in events if event.name.startswith(MARK)}
    ready_us = sorted(event.time_range.start for event in events if event.name == f"{MARK}bucket")
    begin_us = parts["forward"].time_range.start
    found = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        part = _part_of(event)
        parent = event.cpu_parent
        if parent is not None and parent.name == _WRAPPER:
            parent = parent.cpu_parent
        if part is None or parent is None or parent.name != MARK + part or event.name == _WRAPPER:
            continue
        found.append(
            Operator(
                name=event.name.removeprefix("autograd::engine::evaluate_function: "),
                part=part,
                begin_s=(event.time_range.start - begin_us) / 1e6,
                duration_s=event.time_range.elapsed_us() / 1e6,
                num_buckets=sum(moment < event.time_range.start for moment in ready_us),
            )
        )
    return found


def _part_of(event: Any) -> Part | None:
    """The part of the step that an event belongs to."""
    while event is not None:
        name = event.name.removeprefix(MARK)
        if event.name.startswith(MARK) and name in ("forward", "backward", "update"):
            return cast(Part, name)
        event = event.cpu_parent
    return None


def _totals(profiles: list[Any], device: torch.device) -> list[OperatorTotal]:
    """The self time of each operator in an iteration, longest first."""
    count: dict[str, int] = defaultdict(int)
    own_us: dict[str, float] = defaultdict(float)
    for events in profiles:
        for event in events:
            if event.name.startswith(MARK) or event.name == _WRAPPER or _part_of(event) is None:
                continue
            count[event.name] += 1
            own_us[event.name] += event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
    totals = [
        OperatorTotal(name=name, num_calls=count[name] / len(profiles), self_s=own_us[name] / len(profiles) / 1e6)
        for name in count
    ]
    return sorted(totals, key=lambda total: (-total.self_s, total.name))
