"""How many writes go out at once, beside servers that serve so many at a time: played on a clock of its own."""

from __future__ import annotations

import asyncio
import heapq

import pytest

from springtide.backends.kubernetes.client.write_room import MANY_WAITING, PERIOD_S, WriteRoom


class Server:
    """Serves `width` calls at a time, `service_s` each, `far_s` away; whoever comes more waits in line."""

    def __init__(self, room: WriteRoom, width: int, service_s: float, far_s: float = 0.0) -> None:
        self.room, self.service_s, self.far_s = room, service_s, far_s
        self.free_at_s = [0.0] * width
        self.now_s = 0.0
        self.under_way: list[tuple[float, float]] = []
        self.took_s: list[float] = []

    def play(self, calls: int) -> float:
        """Calls one after the other as there is room, from now on; returns how many a second were answered."""
        began_s, left, self.took_s = self.now_s, calls, []
        while left or self.under_way:
            while left and len(self.under_way) < int(self.room.allowed):
                left -= 1
                start_s = max(heapq.heappop(self.free_at_s), self.now_s)
                heapq.heappush(self.free_at_s, start_s + self.service_s)
                heapq.heappush(self.under_way, (start_s + self.service_s + self.far_s, self.now_s))
            self.now_s, sent_s = heapq.heappop(self.under_way)
            self.took_s.append(self.now_s - sent_s)
            self.room.note("POST pods", self.took_s[-1])
            self.room.note_taken()
        return calls / (self.now_s - began_s)


def server(width: int, service_s: float, far_s: float = 0.0) -> Server:
    room = WriteRoom(32)
    played = Server(room, width, service_s, far_s)
    room._clock = lambda: played.now_s
    # The first calls find a server that has nothing to do.
    room.note("POST pods", service_s + far_s)
    return played


def test_a_busy_server_is_sent_no_more_than_keeps_it_busy() -> None:
    small = server(width=2, service_s=0.005)
    rate = small.play(2000)
    # Two at a time, five milliseconds each: nothing could do more.
    assert rate == pytest.approx(400.0, rel=0.01)
    assert small.room.allowed < 2 * MANY_WAITING
    # Thirty-two at once would each have taken eighty.
    assert max(small.took_s[-100:]) < 0.035


def test_a_far_server_has_room_for_all() -> None:
    far = server(width=64, service_s=0.005, far_s=0.5)
    assert far.play(2000) == pytest.approx(32 / 0.505, rel=0.05)
    assert far.room.allowed == 32.0


def test_a_server_that_has_become_slower_is_believed_after_a_while() -> None:
    slow = server(width=64, service_s=0.005)
    slow.play(500)
    slow.service_s = 0.05
    slow.play(int(3 * PERIOD_S / 0.05 * 32))
    assert slow.room.allowed == 32.0


def test_kinds_of_calls_are_not_compared_with_each_other() -> None:
    room = WriteRoom(32, clock=lambda: 0.0)
    for _ in range(500):
        room.note("POST events", 0.002)
        room.note("PATCH status", 0.1)
        room.note_taken()
    assert room.allowed == 32.0


def test_who_came_first_goes_first_and_who_gives_up_keeps_nobody() -> None:
    async def story() -> list[str]:
        room = WriteRoom(1)
        order: list[str] = []

        async def write(name: str) -> None:
            await room.enter()
            order.append(name)
            await asyncio.sleep(0)
            room.leave()

        await room.enter()
        tasks = [asyncio.create_task(write(name)) for name in "abcd"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        room.leave()
        # Its turn has come, and it is gone before it takes it.
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await room.enter()
        return order

    assert asyncio.run(asyncio.wait_for(story(), 10)) == ["c", "d"]
