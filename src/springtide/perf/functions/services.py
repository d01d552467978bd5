"""The function services for which plans are made: sizes, CPU and bandwidth by memory, limits and prices, by provider.

Prices are list prices of one region without free tiers and discounts; replace them with `msgspec.structs.replace`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import MappingProxyType

from springtide.core.errors import InvalidRequest
from springtide.core.functions import MIB, FunctionPrices, FunctionService, MemorySize

MB_PER_S = 1e6

# vCPUs of a function by its memory in MB, as measured on AWS Lambda by users (elva-group, tip 17). Above 1,769 MB they
# are not proportional to memory, because threads share cores.
LAMBDA_VCPUS = (
    (832, 0.50),
    (1769, 1.00),
    (3008, 1.67),
    (5307, 2.39),
    (7076, 2.84),
    (8845, 4.23),
    (10240, 4.72),
)
# FuncPipe's choices (section 5.1).
LAMBDA_MEMORY_MB = (512, 1024, 2048, 3072, 4096, 6144, 8192, 10240)
# About 70 MB/s to S3 for every size (FuncPipe, section 3.3; iperf finds no difference between sizes). Below 640 MB the
# throughput is limited by the CPU, which encrypts and copies, and grows with memory.
LAMBDA_BYTES_PER_S = 70 * MB_PER_S
LAMBDA_FULL_LINK_MB = 640
# Functions outside a virtual network may get more since August 2026: 625 Mbit/s at 2 GB up to 3,000 Mbit/s at 10 GB.
LAMBDA_ENHANCED_MBIT_PER_S = ((2048, 625.0), (10240, 3000.0))

LAMBDA_PRICES = FunctionPrices(
    usd_per_gb_s=0.0000166667,
    usd_per_invocation=0.0000002,
    usd_per_put=0.000005,
    usd_per_get=0.0000004,
    usd_per_stored_gb_month=0.023,
    # A cache.r6g.large of ElastiCache for Redis, 13 GB.
    usd_per_parameter_store_hour=0.206,
)

# Yuan per dollar, because the providers' price lists are in different currencies.
_CNY_PER_USD = 7.1
ALIBABA_MEMORY_MB = (512, 1024, 2048, 3072, 4096, 8192, 16384, 32768)
# Performance instances come with half a vCPU for each GB (2 vCPUs with 4 GB up to 16 with 32 GB).
_ALIBABA_VCPUS_PER_GB = 0.5
ALIBABA_BYTES_PER_S = 50 * MB_PER_S
ALIBABA_PRICES = FunctionPrices(
    # 0.000110592 yuan, as in FuncPipe's published baselines.
    usd_per_gb_s=0.000110592 / _CNY_PER_USD,
    usd_per_invocation=0.0000002,
    usd_per_put=0.01 / 10_000 / _CNY_PER_USD,
    usd_per_get=0.01 / 10_000 / _CNY_PER_USD,
    usd_per_stored_gb_month=0.12 / _CNY_PER_USD,
    usd_per_parameter_store_hour=0.206,
)

EMULATOR_MEMORY_MB = (512, 1024, 2048, 3072, 4096)
# An emulated function is forked from a process with the frameworks loaded; their pages count as its memory.
EMULATOR_BASE_BYTES = 256 * MIB


def lambda_vcpus(memory_mb: int) -> float:
    """The vCPUs of a Lambda function with this much memory, interpolated from LAMBDA_VCPUS."""
    return interpolated(((0, 0.0), *LAMBDA_VCPUS), memory_mb)


def lambda_bytes_per_s(memory_mb: int) -> float:
    """The rate of a Lambda function's link to S3 in each direction, in bytes per second."""
    return LAMBDA_BYTES_PER_S * min(1.0, memory_mb / LAMBDA_FULL_LINK_MB)


def lambda_enhanced_bytes_per_s(memory_mb: int) -> float:
    """The same with the faster links of functions outside a virtual network."""
    if memory_mb < LAMBDA_ENHANCED_MBIT_PER_S[0][0]:
        return lambda_bytes_per_s(memory_mb)
    return interpolated(LAMBDA_ENHANCED_MBIT_PER_S, memory_mb) * 1e6 / 8


def interpolated(points: Sequence[tuple[int, float]], place: float) -> float:
    """Linear interpolation between ascending points; constant beyond the ends."""
    if place <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if place <= right:
            return low + (high - low) * (place - left) / (right - left)
    return points[-1][1]


def aws_lambda(
    memory_mb: Sequence[int] = LAMBDA_MEMORY_MB, *, enhanced_network: bool = False, concurrency: int = 1000
) -> FunctionService:
    """AWS Lambda with S3: 128 to 10,240 MB, 900 s an invocation. Prices of us-east-1. Raises InvalidRequest."""
    _check_sizes("AWS Lambda", memory_mb, 128, 10240)
    link = lambda_enhanced_bytes_per_s if enhanced_network else lambda_bytes_per_s
    return FunctionService(
        name="aws",
        sizes=_sizes(memory_mb, lambda_vcpus, link),
        prices=LAMBDA_PRICES,
        lifetime_s=900.0,
        concurrency=concurrency,
        latency_s=0.04,
        cold_start_s=5.0,
    )


def alibaba_function_compute(
    memory_mb: Sequence[int] = ALIBABA_MEMORY_MB, *, concurrency: int = 300
) -> FunctionService:
    """Alibaba Function Compute with OSS: up to 32 GB, a day an invocation. Raises InvalidRequest.

    50 MB/s each way and 50 ms a request, as in FuncPipe's published baselines. That all functions together get
    10 Gbit/s from OSS (FuncPipe, section 5.7) is not taken into account.
    """
    _check_sizes("Alibaba Function Compute", memory_mb, 128, 32768)
    return FunctionService(
        name="alibaba",
        sizes=_sizes(memory_mb, lambda size: size / 1024 * _ALIBABA_VCPUS_PER_GB, lambda _: ALIBABA_BYTES_PER_S),
        prices=ALIBABA_PRICES,
        lifetime_s=86_400.0,
        concurrency=concurrency,
        latency_s=0.05,
        cold_start_s=5.0,
    )


def emulator(
    memory_mb: Sequence[int] = EMULATOR_MEMORY_MB,
    *,
    lifetime_s: float = 900.0,
    bytes_per_s: float = LAMBDA_BYTES_PER_S,
    latency_s: float = 0.0,
    cold_start_s: float = 1.0,
    concurrency: int = 16,
    prices: FunctionPrices = LAMBDA_PRICES,
    max_vcpus: float = float("inf"),
    total_vcpus: float | None = None,
) -> FunctionService:
    """Functions as processes of this machine: Lambda's CPU by memory, and the rest as given.

    `max_vcpus` is the machine's limit for one function, `total_vcpus` for all of them together. Raises InvalidRequest
    for impossible sizes.
    """
    _check_sizes("the emulator", memory_mb, 128, 1 << 20)
    if min(lifetime_s, bytes_per_s) <= 0 or min(latency_s, cold_start_s) < 0 or concurrency < 1:
        raise InvalidRequest("the emulator's lifetime, bandwidth and concurrency are above 0, its delays at least 0")
    return FunctionService(
        name="emulator",
        sizes=_sizes(memory_mb, lambda size: min(lambda_vcpus(size), max_vcpus), lambda _: bytes_per_s),
        prices=prices,
        lifetime_s=lifetime_s,
        concurrency=concurrency,
        latency_s=latency_s,
        cold_start_s=cold_start_s,
        total_vcpus=total_vcpus,
        base_bytes=EMULATOR_BASE_BYTES,
    )


_SERVICES = MappingProxyType({"aws": aws_lambda, "alibaba": alibaba_function_compute, "emulator": emulator})


def function_service(name: str) -> FunctionService:
    """The service of that name with its default settings. Raises InvalidRequest."""
    if name not in _SERVICES:
        raise InvalidRequest(f"there is no function service {name!r}; there are {', '.join(sorted(_SERVICES))}")
    return _SERVICES[name]()


def size_of(service: FunctionService, memory_mb: int) -> MemorySize:
    """What comes with that much memory, whether the service lists that size or not: in a straight line between sizes.

    Raises InvalidRequest where it has none at all.
    """
    if not service.sizes:
        raise InvalidRequest(f"the function service {service.name!r} has no memory sizes")
    vcpus = [(size.memory_mb, size.vcpus) for size in service.sizes]
    links = [(size.memory_mb, size.bytes_per_s) for size in service.sizes]
    return MemorySize(
        memory_mb=memory_mb, vcpus=interpolated(vcpus, memory_mb), bytes_per_s=interpolated(links, memory_mb)
    )


def _sizes(
    memory_mb: Sequence[int], vcpus: Callable[[int], float], link: Callable[[int], float]
) -> tuple[MemorySize, ...]:
    return tuple(MemorySize(memory_mb=size, vcpus=vcpus(size), bytes_per_s=link(size)) for size in memory_mb)


def _check_sizes(service: str, memory_mb: Sequence[int], low_mb: int, high_mb: int) -> None:
    if not memory_mb or list(memory_mb) != sorted(set(memory_mb)):
        raise InvalidRequest(f"memory sizes for {service} are in ascending order, each once, and at least one")
    for size in memory_mb:
        if not low_mb <= size <= high_mb:
            raise InvalidRequest(f"{service} has functions of {low_mb} to {high_mb} MB, not of {size} MB")
