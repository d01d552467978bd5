"""The process that is profiled for its share: orders over pipes, iterations as they say, requests made up of types."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.workload import Entrypoint
from springtide.runtime.profiling.share_profiler import JsonLines, RunAnswer, RunOrder, ShareSpec, send
from springtide.runtime.profiling.share_profiler_worker import ProfilerOrders, one_call
from springtide.serving.schema import derive_schema


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, int, int]]:
    """(orders out, orders in, answers out, answers in)."""
    ends = (*os.pipe(), *os.pipe())
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def spec(orders_fd: int, answers_fd: int) -> ShareSpec:
    return ShareSpec(
        entrypoint=Entrypoint(source_path="a.py"),
        kind="inference",
        params={},
        directory="",
        name="",
        orders_fd=orders_fd,
        answers_fd=answers_fd,
    )


def test_iterations_are_timed_as_ordered(pipes: tuple[int, int, int, int]) -> None:
    orders_out, orders_in, answers_out, answers_in = pipes
    clock = Clock()
    send(orders_in, RunOrder(batch_size=4, warm_s=1.0, measure_s=2.0))
    send(orders_in, RunOrder(batch_size=8, warm_s=0.0, measure_s=0.0))
    os.close(orders_in)
    sizes = []
    for order in ProfilerOrders(spec(orders_out, answers_in), clock).iterations(0, is_batchable=True):
        sizes.append(order.batch_size)
        clock.now_s += 0.5
    # A second to warm up, two that count; then one and one, for an order that gives no time at all.
    assert sizes == [4] * 2 + [4] * 4 + [8, 8]
    answers = JsonLines(answers_out)
    ready, first, second = (answers.read(RunAnswer) for _ in range(3))
    assert ready is not None
    assert ready.durations_s == []
    assert first is not None
    assert second is not None
    assert (first.durations_s, first.num_samples) == ([0.5] * 4, 4)
    assert (second.durations_s, second.num_samples) == ([0.5], 8)
    assert first.peak_mb > 0


def test_a_service_without_time_to_run_is_as_ordered_by_its_own_batch(pipes: tuple[int, int, int, int]) -> None:
    orders_out, orders_in, answers_out, answers_in = pipes
    send(orders_in, RunOrder())
    os.close(orders_in)
    clock = Clock()
    for _ in ProfilerOrders(spec(orders_out, answers_in), clock).iterations(64, is_batchable=False):
        clock.now_s += 1.0
    answers = JsonLines(answers_out)
    ready, told = answers.read(RunAnswer), answers.read(RunAnswer)
    assert ready is not None
    assert told is not None
    assert (ready.is_batchable, ready.durations_s) == (False, [])
    assert told.num_samples == 64


def test_lines_come_whole_however_they_were_cut(pipes: tuple[int, int, int, int]) -> None:
    orders_out, orders_in, *_ = pipes
    data = msgspec.json.encode(RunOrder(batch_size=3)) + b"\n" + msgspec.json.encode(RunOrder(batch_size=5)) + b"\n"
    os.write(orders_in, data[:10])
    os.write(orders_in, data[10:])
    os.close(orders_in)
    lines = JsonLines(orders_out)
    assert [lines.read(RunOrder), lines.read(RunOrder), lines.read(RunOrder)] == [
        RunOrder(batch_size=3),
        RunOrder(batch_size=5),
        None,
    ]


class Texts:
    def predict(self, texts: list[str], scale: float, loud: bool = False) -> list[str]:
        return texts


class Images:
    def predict(self, images: list[list[float]]) -> list[int]:
        return [0 for _ in images]


def test_a_request_is_made_up_where_types_say_enough() -> None:
    assert msgspec.json.decode(one_call(derive_schema(Texts), "")) == {"texts": ["example"], "scale": 0.5}
    with pytest.raises(InvalidRequest, match=r"what 'images' holds cannot be guessed.*--input"):
        one_call(derive_schema(Images), "")


def test_a_request_that_is_given_is_checked_and_has_one_item() -> None:
    assert msgspec.json.decode(one_call(derive_schema(Images), '{"images": [[1, 2]]}')) == {"images": [[1, 2]]}
    with pytest.raises(InvalidRequest, match="holds 2 items"):
        one_call(derive_schema(Images), '{"images": [[1], [2]]}')
    with pytest.raises(InvalidRequest, match="no parameter"):
        one_call(derive_schema(Images), '{"pictures": []}')
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        one_call(derive_schema(Images), "{")
