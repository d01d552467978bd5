"""A schedule walked event by event on given links: when each rank is through, and what was on the links when.

Beside the workers' own links, the store's machine has one: all transfers of a direction share what it carries.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

import msgspec

from springtide.collectives.steps import CollectiveSchedule, Get, Put, Reduce, Step
from springtide.core.errors import InvalidRequest


class StoreLink(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's two links to the store. A request takes `latency_s` beside its transfer; transfers queue in order.

    `late_fraction` is the share of a wait by which a store that is polled shows late that an object is there: half of
    (g - 1) / g for pauses that grow by g; 0 where the store wakes what waits.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float = 0.0
    late_fraction: float = 0.0


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """When one object was on a worker's link: what `walk` finds, for pictures."""

    rank: int
    is_upload: bool
    key: str
    begin_s: float
    end_s: float


class Walk(msgspec.Struct, frozen=True, kw_only=True):
    """How a schedule goes on given links: when each rank is through, and what was on the links when."""

    ends_s: tuple[float, ...]
    transfers: tuple[Transfer, ...]

    @property
    def took_s(self) -> float:
        """When the last rank is through."""
        return max(self.ends_s, default=0.0)


def walk_s(
    schedule: CollectiveSchedule,
    links: StoreLink | Sequence[StoreLink],
    in_flight: int,
    bytes_per_element: float = 4.0,
    *,
    total_bytes_per_s: float = math.inf,
) -> float:
    """Seconds until every rank is through with a schedule (`walk`)."""
    return walk(schedule, links, in_flight, bytes_per_element, total_bytes_per_s=total_bytes_per_s).took_s


def walk(
    schedule: CollectiveSchedule,
    links: StoreLink | Sequence[StoreLink],
    in_flight: int,
    bytes_per_element: float = 4.0,
    *,
    total_bytes_per_s: float = math.inf,
) -> Walk:
    """A schedule event by event, as the communicator walks it: one link for all ranks, or one for each of them.

    The store's machine carries `total_bytes_per_s` each way, of which all transfers under way have equal shares, but
    for those whose own link takes less; sums take no time. Raises InvalidRequest for too few links, and for a schedule
    that never ends.
    """
    each = [links] * len(schedule.ranks) if isinstance(links, StoreLink) else list(links)
    if len(each) != len(schedule.ranks):
        raise InvalidRequest(f"{len(each)} links do not fit {len(schedule.ranks)} ranks; give one for each")
    return _Walker(schedule, each, in_flight, bytes_per_element, total_bytes_per_s).run()


class _Card:
    """One direction: each rank's transfers follow each other on its link, and share what the store's machine carries.

    Shares are max-min fair: no rank has more than its link, and what that leaves is for the others.
    """

    def __init__(self, rates: Sequence[float], total: float) -> None:
        self._rates = rates
        self._total = total
        self._queues: dict[int, deque[tuple[tuple[int, int], float]]] = {}
        # Of each rank's first transfer: when it began, bytes left and its share; and when they are through as they go
        # now, the first of them first (a heap).
        self._began_s: dict[int, float] = {}
        self._left: dict[int, float] = {}
        self._share: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []
        self._now_s = 0.0

    @property
    def next_s(self) -> float:
        """When the next transfer is through."""
        return self._ends[0][0] if self._ends else math.inf

    def add(self, rank: int, what: tuple[int, int], num_bytes: float, now_s: float) -> None:
        """One more transfer of that rank."""
        queue = self._queues.setdefault(rank, deque())
        queue.append((what, num_bytes))
        if len(queue) == 1:
            self._pass(now_s)
            self._begin(rank, now_s)

    def take(self, now_s: float) -> tuple[int, tuple[int, int], float]:
        """The transfer that is through now: rank, what it was added as, when it began."""
        _, rank = heapq.heappop(self._ends)
        self._pass(now_s)
        what, _ = self._queues[rank].popleft()
        began_s = self._began_s.pop(rank)
        del self._left[rank]
        if self._queues[rank]:
            self._begin(rank, now_s)
        else:
            del self._queues[rank]
            self._settle()
        return rank, what, began_s

    def _begin(self, rank: int, now_s: float) -> None:
        num_bytes = self._queues[rank][0][1]
        self._began_s[rank] = now_s
        self._left[rank] = num_bytes
        heapq.heappush(self._ends, (now_s + num_bytes / self._rates[rank], rank))
        self._settle()

    def _pass(self, now_s: float) -> None:
        """Where shares change, what is left of each transfer is counted anew at each change."""
        if self._total < math.inf:
            for rank in self._left:
                self._left[rank] = max(0.0, self._left[rank] - self._share[rank] * (now_s - self._now_s))
            self._now_s = now_s

    def _settle(self) -> None:
        """Set the shares of the ranks that transfer now, and when each of them is done."""
        if self._total == math.inf:
            return
        free, num_left = self._total, len(self._left)
        for rank in sorted(self._left, key=lambda rank: (self._rates[rank], rank)):
            self._share[rank] = min(self._rates[rank], free / num_left)
            free -= self._share[rank]
            num_left -= 1
        self._ends = sorted((self._now_s + left / self._share[rank], rank) for rank, left in self._left.items())


class _Walker:
    """The state of a walk: what each step still waits for, what each lane has under way, when each link is free."""

    def __init__(
        self,
        schedule: CollectiveSchedule,
        links: Sequence[StoreLink],
        in_flight: int,
        bytes_per_element: float,
        total_bytes_per_s: float,
    ) -> None:
        self._ranks = schedule.ranks
        self._links = links
        self._bytes = bytes_per_element
        self._events: list[tuple[float, int, str, int, int]] = []
        self._num_events = 0
        self._waits = [[len(step.after) for step in steps] for steps in schedule.ranks]
        self._followers: list[list[list[int]]] = [[[] for _ in steps] for steps in schedule.ranks]
        for rank, steps in enumerate(schedule.ranks):
            for index, step in enumerate(steps):
                for before in step.after:
                    self._followers[rank][before].append(index)
        self._lanes = [
            {kind: [index for index, step in enumerate(steps) if isinstance(step, kind)][::-1] for kind in (Put, Get)}
            for steps in schedule.ranks
        ]
        self._room = [{Put: in_flight, Get: in_flight} for _ in schedule.ranks]
        self._cards: dict[type[Step], _Card] = {
            Put: _Card([link.up_bytes_per_s for link in links], total_bytes_per_s),
            Get: _Card([link.down_bytes_per_s for link in links], total_bytes_per_s),
        }
        self._visible: set[str] = set()
        self._waiting: dict[str, list[tuple[int, int, float]]] = {}
        self._ends_s = [0.0] * len(schedule.ranks)
        self._transfers: list[tuple[int, Transfer]] = []
        self._num_carried = 0

    def run(self) -> Walk:
        num_ended = 0
        for rank, steps in enumerate(self._ranks):
            for index, step in enumerate(steps):
                if isinstance(step, Reduce) and not step.after:
                    self._at(0.0, "ended", rank, index)
            self._begin(rank, 0.0)
        ups, downs = self._cards[Put], self._cards[Get]
        while True:
            event_s = self._events[0][0] if self._events else math.inf
            through_s, kind = (ups.next_s, Put) if ups.next_s <= downs.next_s else (downs.next_s, Get)
            if through_s <= event_s:
                if through_s == math.inf:
                    break
                self._carried(kind, through_s)
                continue
            now_s, _, what, rank, index = heapq.heappop(self._events)
            if what == "arrived":
                self._carry(rank, index, now_s)
            else:
                self._end(rank, index, now_s)
                num_ended += 1
        if num_ended < sum(map(len, self._ranks)):
            raise InvalidRequest("the schedule waits for itself; `find_faults` says where")
        return Walk(
            ends_s=tuple(self._ends_s),
            transfers=tuple(transfer for _, transfer in sorted(self._transfers, key=lambda found: found[0])),
        )

    def _at(self, at_s: float, what: str, rank: int, index: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, what, rank, index))

    def _begin(self, rank: int, now_s: float) -> None:
        """Begin what the rank's lanes have room for, in their order."""
        for kind, lane in self._lanes[rank].items():
            while lane and self._room[rank][kind] and not self._waits[rank][lane[-1]]:
                index = lane.pop()
                self._room[rank][kind] -= 1
                step = self._ranks[rank][index]
                if isinstance(step, Put):
                    self._carry(rank, index, now_s)
                elif isinstance(step, Get) and step.key in self._visible:
                    self._at(now_s + self._links[rank].latency_s, "arrived", rank, index)
                elif isinstance(step, Get):
                    self._waiting.setdefault(step.key, []).append((rank, index, now_s))

    def _carry(self, rank: int, index: int, now_s: float) -> None:
        """Queue a step's bytes on its link."""
        step = self._ranks[rank][index]
        kind = Put if isinstance(step, Put) else Get
        self._num_carried += 1
        self._cards[kind].add(rank, (self._num_carried, index), (step.stop - step.start) * self._bytes, now_s)

    def _carried(self, kind: type[Step], now_s: float) -> None:
        """The next transfer of that direction is through."""
        rank, (number, index), begin_s = self._cards[kind].take(now_s)
        step = self._ranks[rank][index]
        is_upload = isinstance(step, Put)
        key = "" if isinstance(step, Reduce) else step.key
        transfer = Transfer(rank=rank, is_upload=is_upload, key=key, begin_s=begin_s, end_s=now_s)
        self._transfers.append((number, transfer))
        # An object is there once its last byte is up and the store has said so.
        self._at(now_s + (self._links[rank].latency_s if is_upload else 0.0), "ended", rank, index)

    def _end(self, rank: int, index: int, now_s: float) -> None:
        step = self._ranks[rank][index]
        self._ends_s[rank] = max(self._ends_s[rank], now_s)
        if isinstance(step, Put | Get):
            self._room[rank][type(step)] += 1
        if isinstance(step, Put):
            self._visible.add(step.key)
            for reader, waiting, since_s in self._waiting.pop(step.key, ()):
                late_s = self._links[reader].late_fraction * (now_s - since_s)
                self._at(now_s + late_s + self._links[reader].latency_s, "arrived", reader, waiting)
        for follower in self._followers[rank][index]:
            self._waits[rank][follower] -= 1
            if not self._waits[rank][follower] and isinstance(self._ranks[rank][follower], Reduce):
                self._at(now_s, "ended", rank, follower)
        self._begin(rank, now_s)
