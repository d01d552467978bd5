"""The writes without a server: order, room, patience, and who may not act."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from springtide.backends.kubernetes.client import writes as writes_module
from springtide.backends.kubernetes.client.errors import (
    Invalid,
    KubeForbidden,
    NotAuthenticated,
    ServerFault,
    TooManyRequests,
    Unreachable,
    VersionConflict,
)
from springtide.backends.kubernetes.client.writes import Writes
from springtide.core.errors import BackendError


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(writes_module, "BACKOFF_S", (0.001, 0.01))
    monkeypatch.setattr(writes_module, "_LOOK_AGAIN_S", 0.001)


class Told:
    def __init__(self) -> None:
        self.done: list[object] = []
        self.failed: list[BackendError] = []
        self.waiting: list[str] = []

    def callbacks(self) -> dict[str, Any]:
        return {"done": self.done.append, "failed": self.failed.append, "waiting": self.waiting.append}


def effect(*outcomes: Any) -> Callable[[Any], Any]:
    """An effect that meets these in turn: errors are raised, anything else is returned; the last one from then on."""
    left = list(outcomes)

    async def run(_: Any) -> Any:
        await asyncio.sleep(0)
        outcome = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return run


def run(story: Callable[[Writes], Any], **options: Any) -> Writes:
    async def live() -> Writes:
        writes = Writes(None, **options)  # type: ignore[arg-type]
        story(writes)
        async with asyncio.timeout(10):
            await writes.drain()
        return writes

    return asyncio.run(live())


CONFLICT = VersionConflict(409, "Conflict", "changed")
AWAY = Unreachable("away")


@pytest.mark.parametrize(
    ("outcomes", "waits"),
    [
        (("ok",), []),
        ((CONFLICT, CONFLICT, "ok"), []),
        ((AWAY, ServerFault(503, "x", "not well"), "ok"), ["away", "not well"]),
        ((NotAuthenticated(401, "Unauthorized", "who are you"), "ok"), ["who are you"]),
        ((BackendError("no credentials"), "ok"), ["no credentials"]),
        ((*[CONFLICT] * 6, "ok"), ["changed"]),
    ],
)
def test_what_is_tried_again(outcomes: tuple, waits: list[str]) -> None:
    told = Told()
    writes = run(lambda writes: writes.put("a", effect(*outcomes), **told.callbacks()))
    assert told.done == ["ok"]
    assert told.waiting == waits
    assert told.failed == []
    assert (writes.num_pending, writes.problem) == (0, "")


@pytest.mark.parametrize("refusal", [KubeForbidden(403, "Forbidden", "no"), Invalid(422, "Invalid", "bad")])
def test_what_is_final(refusal: BackendError) -> None:
    told, after = Told(), Told()

    def story(writes: Writes) -> None:
        writes.put("a", effect(refusal), **told.callbacks())
        writes.put("a", effect("next"), **after.callbacks())

    run(story)
    assert told.failed == [refusal]
    assert told.done == told.waiting == []
    assert after.done == ["next"]


def test_order_is_kept_for_each_object_alone() -> None:
    seen: list[str] = []

    def story(writes: Writes) -> None:
        writes.put("a", effect(AWAY, AWAY, AWAY, "first"), done=seen.append)
        writes.put("a", effect("second"), done=seen.append)
        writes.put("b", effect("other"), done=seen.append)

    run(story)
    assert seen == ["other", "first", "second"]


def test_no_more_than_allowed_run_at_once_and_a_waiting_one_takes_no_room() -> None:
    running = most = 0

    async def count(_: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1

    done: list[object] = []

    def story(writes: Writes) -> None:
        for number in range(3):
            writes.put(("away", number), effect(*[AWAY] * 5, "late"), done=done.append)
        for number in range(20):
            writes.put(number, count)

    run(story, concurrency=3)
    assert most == 3
    assert done == ["late"] * 3


def test_too_many_requests_halve_the_room_and_successes_widen_it() -> None:
    busy = TooManyRequests(429, "TooManyRequests", "busy")
    room: list[float] = []

    def story(writes: Writes) -> None:
        def look(_: object) -> None:
            room.append(writes.room.allowed)

        def more(_: object) -> None:
            # Only now: what is done before the server is busy a second time widens nothing for after it.
            look(_)
            for number in range(200):
                writes.put(number, effect("ok"))

        writes.put("a", effect(busy, busy, "ok"), waiting=look, done=more)

    writes = run(story, concurrency=16)
    assert min(room) < 16
    assert writes.room.allowed == pytest.approx(16, abs=1.0)


def test_who_may_not_act_sends_nothing_until_it_may() -> None:
    calls = 0
    may = False
    told = Told()

    async def send(_: Any) -> str:
        nonlocal calls
        calls += 1
        return "sent"

    def waiting(reason: str) -> None:
        nonlocal may
        told.waiting.append(reason)
        assert calls == 0
        may = len(told.waiting) == 3

    run(lambda writes: writes.put("a", send, done=told.done.append, waiting=waiting), may_write=lambda: may)
    assert told.done == ["sent"]
    assert "lease" in told.waiting[0]


def test_what_stands_no_more_is_dropped_and_troubles_nobody() -> None:
    told = Told()
    stands = True

    def waiting(reason: str) -> None:
        nonlocal stands
        told.waiting.append(reason)
        stands = len(told.waiting) < 2

    writes = run(
        lambda writes: writes.put(
            "a", effect(AWAY), done=told.done.append, waiting=waiting, is_still_wanted=lambda: stands
        )
    )
    assert told.done == []
    assert len(told.waiting) == 2
    assert writes.problem == ""


def test_a_mistake_in_one_ends_that_one_alone() -> None:
    seen: list[object] = []

    def story(writes: Writes) -> None:
        writes.put("a", effect(ZeroDivisionError("a mistake")), done=seen.append)
        writes.put("a", effect("next"), done=seen.append)

    run(story)
    assert seen == ["next"]
