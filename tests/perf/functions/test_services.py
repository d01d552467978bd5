"""Function services: CPU and bandwidth by memory, and what cannot be asked of them."""

from itertools import pairwise

import msgspec
import pytest

from springtide.core.errors import InvalidRequest
from springtide.perf.functions.services import (
    LAMBDA_VCPUS,
    alibaba_function_compute,
    aws_lambda,
    emulator,
    function_service,
    interpolated,
    lambda_bytes_per_s,
    lambda_enhanced_bytes_per_s,
    lambda_vcpus,
    size_of,
)


def test_cpu_is_as_measured_and_not_proportional_to_memory() -> None:
    for memory_mb, vcpus in LAMBDA_VCPUS:
        assert lambda_vcpus(memory_mb) == pytest.approx(vcpus)
    assert lambda_vcpus(7076) < 0.75 * 7076 / 1769
    assert lambda_vcpus(2048) == pytest.approx(1 + (2048 - 1769) / (3008 - 1769) * 0.67)
    assert lambda_vcpus(416) == pytest.approx(0.25)


def test_a_line_ends_where_its_points_end() -> None:
    points = ((1, 10.0), (3, 20.0))
    assert [interpolated(points, place) for place in (0, 1, 2, 3, 4)] == [10.0, 10.0, 15.0, 20.0, 20.0]


def test_links_are_full_from_640_mb_on() -> None:
    assert lambda_bytes_per_s(640) == lambda_bytes_per_s(10240) == 70e6
    assert lambda_bytes_per_s(320) == 35e6
    assert lambda_enhanced_bytes_per_s(1024) == 70e6
    assert lambda_enhanced_bytes_per_s(10240) == pytest.approx(375e6)
    sizes = aws_lambda(enhanced_network=True).sizes
    assert all(size.bytes_per_s <= larger.bytes_per_s for size, larger in pairwise(sizes))


def test_the_services_are_as_the_paper_used_them() -> None:
    aws, alibaba = aws_lambda(), alibaba_function_compute()
    assert aws.sizes[-1].memory_mb == 10240
    assert aws.lifetime_s == 900
    assert alibaba.sizes[-1].memory_mb == 32768
    assert {size.bytes_per_s for size in alibaba.sizes} == {50e6}
    for service in (aws, alibaba, emulator()):
        assert [size.memory_mb for size in service.sizes] == sorted(size.memory_mb for size in service.sizes)
        assert function_service(service.name) == service


def test_the_emulator_is_as_given() -> None:
    service = emulator((256, 512), lifetime_s=60.0, bytes_per_s=1e6, latency_s=0.01, max_vcpus=0.2)
    assert [size.vcpus for size in service.sizes] == pytest.approx([256 / 1664, 0.2])
    assert (service.lifetime_s, service.latency_s) == (60.0, 0.01)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: aws_lambda((512, 20480)), "128 to 10240 MB, not of 20480"),
        (lambda: aws_lambda(()), "at least one"),
        (lambda: emulator((1024, 512)), "ascending"),
        (lambda: emulator(lifetime_s=0.0), "lifetime"),
        (lambda: function_service("azure"), "alibaba, aws, emulator"),
    ],
)
def test_what_cannot_be_is_refused(build: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        build()  # type: ignore[operator]


def test_a_size_between_those_that_are_listed_comes_with_what_lies_between() -> None:
    service = aws_lambda((1024, 2048))
    low, high = service.sizes
    between = size_of(service, 1536)
    assert between.memory_mb == 1536
    assert low.vcpus < between.vcpus < high.vcpus
    assert size_of(service, 1024) == low
    assert size_of(service, 128).vcpus == low.vcpus
    with pytest.raises(InvalidRequest, match="no memory sizes"):
        size_of(msgspec.structs.replace(service, sizes=()), 128)
