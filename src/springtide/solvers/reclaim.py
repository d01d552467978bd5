"""Which servers to reclaim from jobs at the least cost: FaPES's greedy choice, an exact program, and our heuristic.

A job pays once, however many of its servers go, so the cost of a server depends on which others are taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

# Limits are counts, not times: a choice must not depend on how fast the machine is.
MAX_EXCHANGES = 200
# The bound on servers looked at in exchanges. An exchange looks at every server, so many servers allow few exchanges.
MAX_LOOKS = 8_000


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server that may be taken: how many devices it has, and how many of them each job (a number) holds there."""

    num_devices: int
    jobs: Mapping[int, int] = {}


class Victim(msgspec.Struct, frozen=True, kw_only=True):
    """What a job loses: `shrink_cost` if it gives up at most `num_spare` devices, else `stop_cost` (at least that).

    A job that cannot shrink has no spare devices. Costs are in one unit of the caller's choice, at least 0.
    """

    stop_cost: float = 1.0
    shrink_cost: float = 0.0
    num_spare: int = 0


class ReclaimChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The servers to take, ascending, and what that costs in all."""

    servers: tuple[int, ...]
    cost: float


def cost_of(servers: Sequence[Server], victims: Sequence[Victim], chosen: Iterable[int]) -> float:
    """The cost of taking these servers: every job on one of them pays once."""
    lost: dict[int, int] = {}
    for number in chosen:
        for job, count in servers[number].jobs.items():
            lost[job] = lost.get(job, 0) + count
    return sum(_price(victims[job], count) for job, count in sorted(lost.items()))


def _price(victim: Victim, num_lost: int) -> float:
    if num_lost <= 0:
        return 0.0
    return victim.shrink_cost if num_lost <= victim.num_spare else victim.stop_cost


# --- FaPES ----------------------------------------------------------------------------------------------------------


def reclaim_by_gain(servers: Sequence[Server], num_needed: int) -> tuple[int, ...]:
    """FaPES-Manager's choice (section 3.4) of servers with `num_needed` devices; all of them if they do not suffice.

    The cost of a server is the number of jobs that run on it, its gain the devices of all servers that are free once
    those jobs are suspended. Repeatedly, the server with the largest gain that does not exceed the need is taken, among
    equals the one with the least cost, and its jobs are suspended. If every gain is too large, the least cost decides.

    Our reading where the paper is ambiguous: "smaller than N_r" includes N_r itself (otherwise Figure 6 (a) would come
    out differently), N_r is the number still missing, and a server without jobs costs nothing and is taken first.
    """
    order = _Suspending(servers)
    chosen: list[int] = []
    left = num_needed
    while left > 0 and order.running:
        number = order.next(left)
        chosen.append(number)
        left -= servers[number].num_devices
        order.suspend(number)
    return tuple(sorted(chosen))


class _Suspending:
    """The servers not taken yet with the jobs that still run there; only gains that change are counted again."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers
        self.running: dict[int, set[int]] = {number: set(server.jobs) for number, server in enumerate(servers)}
        self.largest = max((server.num_devices for server in servers), default=0)
        self._on: dict[int, set[int]] = {}
        for number, jobs in self.running.items():
            for job in jobs:
                self._on.setdefault(job, set()).add(number)
        self._gain = {number: self._count(number) for number in self.running}
        self._idle = [number for number, jobs in self.running.items() if not jobs]

    def next(self, left: int) -> int:
        """The server to take while `left` devices are missing."""
        if self._idle:
            return min(self._idle)
        # Servers are taken as a whole, so the last one may have more devices than are missing.
        bound = left + self.largest - 1
        fitting = [number for number in self.running if self._gain[number] <= bound]
        if fitting:
            return min(fitting, key=lambda number: (-self._gain[number], len(self.running[number]), number))
        return min(self.running, key=lambda number: (len(self.running[number]), -self._gain[number], number))

    def suspend(self, number: int) -> None:
        """Take a server and suspend its jobs, also on all other servers."""
        jobs = self.running.pop(number)
        if number in self._idle:
            self._idle.remove(number)
        touched = {other for job in jobs for other in self._on.pop(job)} - {number}
        for other in touched:
            self.running[other] -= jobs
            if not self.running[other]:
                self._idle.append(other)
        # A gain counts the servers that share a job with it.
        changed = touched | {near for other in touched for job in self.running[other] for near in self._on[job]}
        for other in changed:
            self._gain[other] = self._count(other)

    def _count(self, number: int) -> int:
        jobs = self.running[number]
        near = {other for job in jobs for other in self._on[job]} | {number}
        return sum(self.servers[other].num_devices for other in near if self.running[other] <= jobs)


# --- ours -----------------------------------------------------------------------------------------------------------


def reclaim_by_cost(servers: Sequence[Server], victims: Sequence[Victim], num_needed: int) -> ReclaimChoice:
    """A choice of servers with `num_needed` devices at little cost; all of them if they do not suffice.

    Greedy: repeatedly take the server, together with those that cost nothing more then, with the least cost for each
    device still missing. Then exchanges while they help: without one job's servers, without one or two servers, or with
    one more; then filled up, and surplus servers dropped. Effort is bounded by counts: a thousand servers are feasible.
    """
    if num_needed <= 0:
        return ReclaimChoice(servers=(), cost=0.0)
    taking = _Taking(servers, victims, num_needed)
    best = taking.fill(())
    num_left = min(MAX_EXCHANGES, max(1, MAX_LOOKS // max(1, len(servers))))
    is_better = True
    while is_better and num_left > 0:
        is_better = False
        for start, avoided in taking.neighbours(best.servers):
            if num_left <= 0:
                break
            num_left -= 1
            found = taking.fill(start, avoided)
            if taking.is_enough(found) and (found.cost, len(found.servers)) < (best.cost - 1e-9, len(best.servers)):
                best, is_better = found, True
                break
    return best


class _Taking:
    """Sets of servers that are enough, and their costs."""

    def __init__(self, servers: Sequence[Server], victims: Sequence[Victim], num_needed: int) -> None:
        self.servers = servers
        self.victims = victims
        self.num_needed = num_needed
        self.on: dict[int, list[int]] = {}
        for number, server in enumerate(servers):
            for job in server.jobs:
                self.on.setdefault(job, []).append(number)
        self.near = [
            sorted({other for job in server.jobs for other in self.on[job]} - {number})
            for number, server in enumerate(servers)
        ]

    def is_enough(self, choice: ReclaimChoice) -> bool:
        return sum(self.servers[number].num_devices for number in choice.servers) >= self.num_needed

    def neighbours(self, chosen: Sequence[int]) -> Iterable[tuple[tuple[int, ...], frozenset[int]]]:
        """Starting points for other choices, and the servers to leave out of each."""
        touched = sorted({job for number in chosen for job in self.servers[number].jobs})
        for job in touched:
            avoided = frozenset(self.on[job])
            yield tuple(number for number in chosen if number not in avoided), avoided
        members = set(chosen)
        for size in (1, 2):
            for dropped in itertools.combinations(chosen, size):
                yield tuple(number for number in chosen if number not in dropped), frozenset(dropped)
        for number in range(len(self.servers)):
            if number not in members:
                yield (*chosen, number), frozenset()
                yield (number,), frozenset()

    def fill(self, start: Sequence[int], avoided: frozenset[int] = frozenset()) -> ReclaimChoice:
        """Start from some servers, take the cheapest groups until they are enough, and drop surplus servers."""
        lost: dict[int, int] = {}
        chosen: set[int] = set()
        left = self.num_needed
        for number in start:
            self._add(number, chosen, lost)
            left -= self.servers[number].num_devices
        moves: dict[int, tuple[float, list[int], int]] = {}
        while left > 0:
            open_ = [n for n in range(len(self.servers)) if n not in chosen and n not in avoided]
            if not open_:
                break
            for number in open_:
                if number not in moves:
                    moves[number] = self._group(number, chosen, lost, avoided)
            group = min((self._rank(moves[number], left, number), moves[number][1]) for number in open_)[1]
            for number in group:
                if left > 0:
                    self._add(number, chosen, lost)
                    left -= self.servers[number].num_devices
            stale = {other for number in group for near in (number, *self.near[number]) for other in self.near[near]}
            for number in (*stale, *group):
                moves.pop(number, None)
        self._drop_surplus(chosen, lost, -left)
        members = tuple(sorted(chosen))
        return ReclaimChoice(servers=members, cost=cost_of(self.servers, self.victims, members))

    def _group(
        self, number: int, chosen: set[int], lost: dict[int, int], avoided: frozenset[int]
    ) -> tuple[float, list[int], int]:
        """The cost of one more server, the servers that then cost nothing more, and the devices of all of them."""
        more = dict(self.servers[number].jobs)
        cost = sum(self._step(job, lost.get(job, 0), count) for job, count in more.items())
        group = [number]
        for other in self.near[number]:
            if other in chosen or other in avoided:
                continue
            jobs = self.servers[other].jobs
            if all(self._step(job, lost.get(job, 0) + more.get(job, 0), count) <= 0 for job, count in jobs.items()):
                group.append(other)
                for job, count in jobs.items():
                    more[job] = more.get(job, 0) + count
        return cost, group, sum(self.servers[member].num_devices for member in group)

    @staticmethod
    def _rank(move: tuple[float, list[int], int], left: int, number: int) -> tuple[float, int, int]:
        """The key of a move: its cost for each device still missing; among equals, more devices first."""
        useful = min(move[2], left)
        return move[0] / useful, -useful, number

    def _step(self, job: int, before: int, count: int) -> float:
        return _price(self.victims[job], before + count) - _price(self.victims[job], before)

    def _add(self, number: int, chosen: set[int], lost: dict[int, int]) -> None:
        chosen.add(number)
        for job, count in self.servers[number].jobs.items():
            lost[job] = lost.get(job, 0) + count

    def _drop_surplus(self, chosen: set[int], lost: dict[int, int], surplus: int) -> None:
        """Drop servers that are not needed, the one that saves most first."""
        while True:
            spare = [number for number in sorted(chosen) if self.servers[number].num_devices <= surplus]
            if not spare:
                return
            saved = {
                number: -sum(self._step(job, lost[job], -count) for job, count in self.servers[number].jobs.items())
                for number in spare
            }
            number = max(spare, key=lambda n: (saved[n], n))
            chosen.remove(number)
            surplus -= self.servers[number].num_devices
            for job, count in self.servers[number].jobs.items():
                lost[job] -= count
