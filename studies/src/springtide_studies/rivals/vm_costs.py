"""What the same training takes and costs on rented machines (IaaS): data-parallel workers on instances of one kind.

Prices are list prices on demand of one region. A machine is paid from its request to its return, boot and idle
included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.function_search import WorkerModel
from springtide.core.functions import MIB
from springtide.perf.functions.scale import compute_speed

Billing = Literal["second", "hour"]
SECONDS_PER_HOUR = 3600.0
# EC2 on demand is charged by the second, a minute at least.
LEAST_BILLED_S = 60.0
# A machine's image and the framework; SMLT and LambdaML count minutes for a cluster.
BOOT_S = 120.0
_LATENCY_S = 0.0005


class VmKind(msgspec.Struct, frozen=True, kw_only=True):
    """An instance type: `vcpus` are threads, as providers count them, `bytes_per_s` is its network's sustained rate."""

    name: str
    vcpus: int
    memory_mb: int
    usd_per_hour: float
    bytes_per_s: float


def _kind(name: str, vcpus: int, memory_gib: int, usd_per_hour: float, gbit_per_s: float) -> VmKind:
    return VmKind(
        name=name,
        vcpus=vcpus,
        memory_mb=memory_gib * 1024,
        usd_per_hour=usd_per_hour,
        bytes_per_s=gbit_per_s * 1e9 / 8,
    )


# Amazon EC2 C5, on demand, us-east-1; the network's baseline, not its bursts.
EC2_C5: tuple[VmKind, ...] = (
    _kind("c5.large", 2, 4, 0.085, 0.75),
    _kind("c5.xlarge", 4, 8, 0.17, 1.25),
    _kind("c5.2xlarge", 8, 16, 0.34, 2.5),
    _kind("c5.4xlarge", 16, 32, 0.68, 5.0),
    _kind("c5.9xlarge", 36, 72, 1.53, 12.0),
    _kind("c5.18xlarge", 72, 144, 3.06, 25.0),
)


class VmRun(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run on `count` machines of one kind: its step, its time with the boot, and what is charged."""

    kind: VmKind
    count: int
    step_s: float
    took_s: float
    usd: float


def vm_step_s(model: WorkerModel, kind: VmKind, count: int, global_batch_size: int, slowdown: float = 1.0) -> float:
    """Seconds of a step: each machine's share of the batch on all its threads, then a ring over the network.

    `slowdown` is how much longer a thread computes than the core on which the model was measured. Raises
    InvalidRequest for no machine, or one that cannot hold the model.
    """
    if count < 1 or global_batch_size < 1:
        raise InvalidRequest("a run has at least one machine, and a step at least one sample")
    held = model.base_bytes + model.state_factor * model.parameter_bytes + model.micro_batch_size * model.sample_bytes
    if held > kind.memory_mb * MIB:
        raise InvalidRequest(
            f"{kind.name} has {kind.memory_mb:,} MB and a worker needs {math.ceil(held / MIB):,}; take a larger one"
        )
    share = -(-global_batch_size // count)
    compute_s = (model.fixed_s + share * model.sample_s) * slowdown / compute_speed(kind.vcpus)
    ring_s = 2.0 * (count - 1) * (model.parameter_bytes / count / kind.bytes_per_s + _LATENCY_S)
    return compute_s + ring_s


def charged_usd(kind: VmKind, count: int, up_s: float, billing: Billing = "second") -> float:
    """What machines that were up for so long are charged: seconds (a minute at least), or every begun hour."""
    if billing == "hour":
        hours = float(math.ceil(up_s / SECONDS_PER_HOUR))
    else:
        hours = max(LEAST_BILLED_S, up_s) / SECONDS_PER_HOUR
    return count * kind.usd_per_hour * hours


def vm_run(
    model: WorkerModel,
    kind: VmKind,
    count: int,
    batches: Sequence[tuple[int, int]],
    *,
    slowdown: float = 1.0,
    billing: Billing = "second",
    boot_s: float = BOOT_S,
) -> VmRun:
    """A run of so many steps of each batch (`batches`: batch, number of steps). Raises InvalidRequest."""
    work_s = sum(num * vm_step_s(model, kind, count, batch, slowdown) for batch, num in batches)
    num_steps = sum(num for _, num in batches)
    took_s = boot_s + work_s
    return VmRun(
        kind=kind,
        count=count,
        step_s=work_s / max(1, num_steps),
        took_s=took_s,
        usd=charged_usd(kind, count, took_s, billing),
    )


def all_vm_runs(
    model: WorkerModel,
    batches: Sequence[tuple[int, int]],
    *,
    kinds: Sequence[VmKind] = EC2_C5,
    max_count: int = 16,
    slowdown: float = 1.0,
    billing: Billing = "second",
) -> list[VmRun]:
    """Every kind that holds the model, one to `max_count` of it, no more than a step has samples."""
    runs = []
    for kind in kinds:
        held = model.base_bytes + model.state_factor * model.parameter_bytes
        if held + model.micro_batch_size * model.sample_bytes > kind.memory_mb * MIB:
            continue
        most = min([max_count, *(batch for batch, _ in batches)])
        runs += [
            vm_run(model, kind, count, batches, slowdown=slowdown, billing=billing) for count in range(1, most + 1)
        ]
    return runs
