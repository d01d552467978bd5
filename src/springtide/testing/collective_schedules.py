"""The kit for collective schedules: proves that every rank ends with the same sum of every worker's addend.

It also proves that no step waits for ever and no element is read while it is written. Values are symbols, so one check
holds for all numbers, and nothing is assumed about the ranks' speeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from springtide.collectives.steps import CollectiveSchedule, Get, Put, Reduce, Step

# The symbolic value of an element: a worker's own gradient (its rank), or a sum of such in the order of addition.
Term = int | tuple["Term", ...] | None
_Node = tuple[int, int]


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The store requests of one rank in one all-reduce, and the elements (not bytes) that it sends and receives."""

    num_puts: int
    num_gets: int
    elements_up: int
    elements_down: int


def traffic(steps: tuple[Step, ...]) -> Traffic:
    """Count the requests and elements of one rank's steps."""
    puts = [step for step in steps if isinstance(step, Put)]
    gets = [step for step in steps if isinstance(step, Get)]
    return Traffic(
        num_puts=len(puts),
        num_gets=len(gets),
        elements_up=sum(step.stop - step.start for step in puts),
        elements_down=sum(step.stop - step.start for step in gets),
    )


def find_faults(schedule: CollectiveSchedule) -> list[str]:
    """The faults of a schedule as sentences, for any speeds of the ranks and any number of requests in flight.

    An empty list means that the schedule is correct:

        assert not find_faults(my_schedule(num_workers=4, num_elements=100))
    """
    faults = [*_malformed(schedule), *_key_faults(schedule)]
    if faults:
        return faults
    order = _walk_order(schedule)
    if order is None:
        return ["some steps wait for each other in a circle"]
    for rank, steps in enumerate(schedule.ranks):
        faults += [f"rank {rank}: {fault}" for fault in _races(steps)]
    return faults or _wrong_sums(schedule, order)


def _malformed(schedule: CollectiveSchedule) -> Iterator[str]:
    for rank, steps in enumerate(schedule.ranks):
        for index, step in enumerate(steps):
            if not 0 <= step.start < step.stop <= schedule.num_elements:
                yield f"rank {rank}, step {index}: elements {step.start} to {step.stop} are not there"
            if any(not 0 <= earlier < index for earlier in step.after):
                yield f"rank {rank}, step {index} is after a step that does not come before it"


def _key_faults(schedule: CollectiveSchedule) -> Iterator[str]:
    """Faults unless every key is written once, and read by the declared number of ranks for the declared elements."""
    written: dict[str, tuple[int, Put]] = {}
    num_reads: Counter[str] = Counter()
    for rank, steps in enumerate(schedule.ranks):
        for step in steps:
            if isinstance(step, Put):
                if step.key in written:
                    yield f"{step.key} is written twice"
                written[step.key] = rank, step
    for rank, steps in enumerate(schedule.ranks):
        gets = [step for step in steps if isinstance(step, Get)]
        num_reads.update(step.key for step in gets)
        if len({step.key for step in gets}) != len(gets):
            yield f"rank {rank} reads a key twice"
        yield from (f"rank {rank} {fault}" for step in gets for fault in _misread(step, written.get(step.key)))
    for key, (_, put) in written.items():
        if num_reads[key] != put.num_readers:
            yield f"{key} is read by {num_reads[key]}, not by {put.num_readers}"


def _misread(step: Get, written: tuple[int, Put] | None) -> Iterator[str]:
    if written is None:
        yield f"reads {step.key}, which no rank writes"
        return
    writer, put = written
    if (writer, put.start, put.stop) != (step.writer, step.start, step.stop):
        yield f"takes {step.key} for something else than what rank {writer} writes"
    if step.is_only_reader != (put.num_readers == 1):
        yield f"is wrong about which other ranks read {step.key}"


def _walk_order(schedule: CollectiveSchedule) -> list[_Node] | None:
    """All steps in an order in which none comes before a step that it waits for; None if there is a deadlock.

    Assumes one request in flight on each lane: more requests only remove waits, so the result holds for any number.
    """
    writers = {
        step.key: (rank, index)
        for rank, steps in enumerate(schedule.ranks)
        for index, step in enumerate(steps)
        if isinstance(step, Put)
    }
    waits: dict[_Node, int] = {}
    followers: dict[_Node, list[_Node]] = {}
    for rank, steps in enumerate(schedule.ranks):
        last: dict[type[Step], int] = {}
        for index, step in enumerate(steps):
            before = {(rank, earlier) for earlier in step.after}
            if not isinstance(step, Reduce) and type(step) in last:
                before.add((rank, last[type(step)]))
            if isinstance(step, Get):
                before.add(writers[step.key])
            last[type(step)] = index
            waits[rank, index] = len(before)
            for node in before:
                followers.setdefault(node, []).append((rank, index))
    ready = [node for node, count in waits.items() if count == 0]
    order: list[_Node] = []
    while ready:
        node = ready.pop()
        order.append(node)
        for follower in followers.get(node, ()):
            waits[follower] -= 1
            if waits[follower] == 0:
                ready.append(follower)
    return order if len(order) == len(waits) else None


def _races(steps: tuple[Step, ...]) -> Iterator[str]:
    """Faults for steps on the same elements, at least one of them writing, that `after` does not order."""
    earlier_than: list[int] = []
    # Steps by elementary interval of elements, which avoids comparing all pairs.
    edges = sorted({edge for step in steps for edge in (step.start, step.stop)})
    place = {edge: number for number, edge in enumerate(edges)}
    touching: list[list[int]] = [[] for _ in edges]
    found: set[tuple[int, int]] = set()
    for index, step in enumerate(steps):
        reach = 0
        for before in step.after:
            reach |= earlier_than[before] | (1 << before)
        earlier_than.append(reach)
        if isinstance(step, Get) and not step.is_final:
            continue
        if isinstance(step, Reduce):
            feeding = [other for other, get in enumerate(steps) if _feeds(get, step)]
            early = [other for other in feeding if not (other < index and reach >> other & 1)]
            yield from (f"step {index} adds up what step {other} may not have got yet" for other in early)
            parts = [o for o in feeding if (steps[o].start, steps[o].stop) != (step.start, step.stop)]
            yield from (f"step {index} adds up a part of what step {other} gets" for other in parts)
        for interval in range(place[step.start], place[step.stop]):
            for other in touching[interval]:
                writes = not isinstance(step, Put) or not isinstance(steps[other], Put)
                if writes and not reach >> other & 1:
                    found.add((other, index))
            touching[interval].append(index)
    for other, index in sorted(found):
        yield f"steps {other} and {index} touch the same elements in no order"


def _feeds(step: Step, total: Reduce) -> bool:
    """Whether a step receives an addend of the sum."""
    return (
        isinstance(step, Get)
        and not step.is_final
        and step.writer in total.addends
        and step.start < total.stop
        and total.start < step.stop
    )


def _wrong_sums(schedule: CollectiveSchedule, order: list[_Node]) -> list[str]:
    edges = sorted({0, schedule.num_elements, *_edges(schedule)})
    place = {edge: number for number, edge in enumerate(edges)}
    n = schedule.num_workers
    values: list[list[Term]] = [[rank if rank < n else None] * (len(edges) - 1) for rank in range(len(schedule.ranks))]
    held: dict[tuple[int, int, int], Term] = {}
    store: dict[str, list[Term]] = {}
    faults: list[str] = []
    for rank, index in order:
        step = schedule.ranks[rank][index]
        inside = range(place[step.start], place[step.stop])
        if isinstance(step, Put):
            store[step.key] = [values[rank][interval] for interval in inside]
        elif isinstance(step, Get):
            for interval, term in zip(inside, store[step.key], strict=True):
                if step.is_final:
                    values[rank][interval] = term
                else:
                    held[rank, step.writer, interval] = term
        else:
            for interval in inside:
                own = values[rank][interval]
                terms = [held.get((rank, r, interval), own if r == rank else None) for r in step.addends]
                if None in terms:
                    faults.append(f"rank {rank} adds up elements from {step.start} that it has not got")
                values[rank][interval] = tuple(terms) if len(terms) > 1 else terms[0]
    expected: Term = tuple(range(n)) if n > 1 else 0
    for rank, terms in enumerate(values):
        for (start, _), term in zip(pairwise(edges), terms, strict=True):
            if term != expected:
                faults.append(f"rank {rank} ends with {term} from element {start}, not {expected}")
                break
    return faults


def _edges(schedule: CollectiveSchedule) -> Iterator[int]:
    for steps in schedule.ranks:
        for step in steps:
            yield step.start
            yield step.stop
