"""Schedule planning by the primal-dual method: how many devices of which servers a job gets in each round to come.

Plain numbers: servers, rounds, sizes. FaPES (SoCC 2024), section 5.3: for every completion time the cheapest schedule
by dynamic programming over rounds and work; devices are taken where they are cheapest; prices rise with the load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from springtide.core.errors import InvalidRequest

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Placed = tuple[tuple[int, int], ...]

# A job's work is planned in so many equal parts; the last round does what was lost to rounding.
NUM_PARTS = 96
# Loads are counted in this part of a server's capacity; it is a multiple of the usual capacities (1..8, 16).
_LOAD_STEPS = 1680
# Bits of a sorting key: the number of the server, its distance from the job's home, then its load.
_INDEX_BITS, _NEAR_BITS = 20, 5
_NEVER = np.int64(1) << 60


class Servers(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The servers: `capacity` devices each, and their `switches` (servers x levels), nearest first, the last shared."""

    capacity: Ints
    switches: Ints

    @property
    def num_levels(self) -> int:
        return int(self.switches.shape[1])


class RoundDemand(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A job to be planned. `rates` (sizes x shapes) is its work a second on each number of devices in `sizes`.

    Shapes: one server; then for every level of switches, nearest first, compact (the fewest servers) and scattered
    (one unit a server) below a switch of that level. `unit` devices of a server are taken at a time (FaPES: two GPUs
    under one PCIe switch); `sizes` are multiples of it. `held` are the devices that it has now (server, count); it
    keeps them unless another place is worth a move. A start or change costs `setup_s` seconds.
    """

    work: float
    sizes: Ints
    rates: Floats
    unit: int = 1
    held: Placed = ()
    setup_s: float = 0.0


class RoundStretch(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds `first` to `last`, both included, on `placed` devices of each server, at `rate` work a second."""

    first: int
    last: int
    placed: Placed
    rate: float

    @property
    def size(self) -> int:
        """The number of devices."""
        return sum(count for _, count in self.placed)


class DevicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one job: its stretches in order, when it ends (seconds from now), and its price."""

    stretches: tuple[RoundStretch, ...]
    finish_s: float
    price: float


def round_lengths(first_s: float, round_s: float, num_rounds: int) -> Floats:
    """Seconds of each round ahead: the rest of this one, then single rounds, then blocks of 2, 4, 8... rounds.

    They cover at least `num_rounds` rounds; plans far ahead are coarse.
    """
    lengths = [first_s]
    width = 1
    while len(lengths) < 4 or sum(lengths) < num_rounds * round_s:
        # Twelve single rounds: with rounds of 600 s, a job of up to two hours is planned round by round.
        lengths += [round_s * width] * (12 if width == 1 else 4)
        width *= 2
    return np.array(lengths)


def unit_prices(num_jobs: int, num_devices: int, round_s: float) -> tuple[float, float]:
    """The price of a device for a round on an idle and on a full server, in seconds of completion time.

    The paper's bounds are the completion times of every job on all devices, and on one device. Since a price is paid
    for every device and round, both are divided accordingly here. If jobs run on all devices one after the other, one
    device for one round delays every job by a part of a round, num_jobs * round_s / num_devices in sum. If each runs on
    one device, it costs the job itself a round.
    """
    low = max(1, num_jobs) * round_s / max(1, num_devices)
    return low, max(low, round_s)


class Board:
    """The load of every server in every round to come, and the price of a device there (FaPES, section 5.3).

    A device of a server costs low (high / low) ** (load / capacity) for a whole round, seconds of completion time;
    `high` and `low` bound it. `lengths_s` are the rounds' lengths in seconds, `round_s` that of a whole one.
    """

    def __init__(
        self, servers: Servers, lengths_s: Floats, round_s: float, *, low: float, high: float, loads: Ints | None = None
    ) -> None:
        if not 0.0 < low <= high or not math.isfinite(high):
            raise InvalidRequest(f"prices from {low} to {high} are none; give 0 < low <= high")
        self.servers, self.lengths_s = servers, lengths_s
        self.starts_s = np.concatenate(([0.0], np.cumsum(lengths_s)))
        self.load = np.zeros((len(lengths_s), len(servers.capacity)), dtype=np.int64) if loads is None else loads.copy()
        self._scale = lengths_s / round_s
        self._low, self._ratio = low, high / low
        self.free = np.maximum(servers.capacity - self.load, 0)
        self._capacity = np.maximum(servers.capacity, 1)
        self._key: Ints = np.empty_like(self.load)
        self._index: Ints = np.arange(len(servers.capacity), dtype=np.int64)
        for number in range(len(lengths_s)):
            self._rekey(number, self._index)

    def prices(self, number: int, chosen: Ints) -> Floats:
        """The price of a device of each of these servers for the whole of round `number`."""
        fraction = np.minimum(self.load[number, chosen] / self._capacity[chosen], 1.0)
        found: Floats = self._low * self._ratio**fraction * self._scale[number]
        return found

    def take(self, number: int, placed: Placed, sign: int = 1) -> None:
        """Add the devices of a job in one round to the load; `sign` -1 removes them again."""
        if not placed:
            return
        chosen = np.array([server for server, _ in placed], dtype=np.int64)
        self.load[number, chosen] += sign * np.array([count for _, count in placed], dtype=np.int64)
        self.free[number, chosen] = np.maximum(self.servers.capacity[chosen] - self.load[number, chosen], 0)
        self._rekey(number, chosen)

    def book(self, schedule: DevicePlan, sign: int = 1) -> None:
        for stretch in schedule.stretches:
            for number in range(stretch.first, stretch.last + 1):
                self.take(number, stretch.placed, sign)

    def cheapest(self, near: Ints, unit: int, most: int) -> tuple[Ints, Ints, Floats]:
        """The cheapest servers with room of every round, at most `most` of them: (rounds x servers) each.

        Their numbers, the devices that they have left in whole units, and what a device costs there. At equal prices
        the smaller `near` (0 to 31 for each server) comes first.
        """
        key = self._key + (near << _INDEX_BITS)
        if unit > 1:
            # Skip servers without a whole unit left, so that they do not fill the few places of the result.
            key |= np.where(self.free < unit, _NEVER, 0)
        most = min(most, key.shape[1])
        if most < key.shape[1]:
            key = np.partition(key, most - 1, axis=1)[:, :most]
        key.sort(axis=1)
        order = key & ((1 << _INDEX_BITS) - 1)
        left = np.take_along_axis(self.free, order, axis=1) // unit * unit
        fraction = np.take_along_axis(self.load, order, axis=1) / self._capacity[order]
        prices = self._low * self._ratio ** np.minimum(fraction, 1.0) * self._scale[:, None]
        return order, left, prices

    def in_order(self, number: int, near: Ints) -> Ints:
        """The servers of one round with room, the cheapest first."""
        key = self._key[number] + (near << _INDEX_BITS)
        found: Ints = np.sort(key[key < _NEVER]) & ((1 << _INDEX_BITS) - 1)
        return found

    def _rekey(self, number: int, chosen: Ints) -> None:
        fraction = self.load[number, chosen] * _LOAD_STEPS // self._capacity[chosen]
        key = fraction << (_INDEX_BITS + _NEAR_BITS) | chosen
        self._key[number, chosen] = np.where(self.free[number, chosen] > 0, key, _NEVER | chosen)


def plan_job(board: Board, demand: RoundDemand) -> DevicePlan | None:
    """The schedule with the least completion time plus price; None if nothing in `sizes` ever fits.

    The Board is unchanged: `board.book(schedule)` adds the planned load (the price update of section 5.3).
    """
    if not len(demand.sizes) or demand.work < 0.0 or demand.rates.max() <= 0.0:
        return None
    near = _nearness(board, demand)
    shapes = Shapes(board.servers, demand)
    options = _options(board, demand, shapes, near)
    choice = _choose(board, demand, *options)
    if choice is None:
        return None
    found = _lay_out(board, demand, shapes, near, choice, ())
    if demand.held:
        # It goes elsewhere only if it ends earlier by that, and the price is not above what it gains.
        stays = _lay_out(board, demand, shapes, near, choice, demand.held)
        if found is None or (stays is not None and not _is_better(found, stays)):
            found = stays
    return found


def _is_better(one: DevicePlan, other: DevicePlan) -> bool:
    return one.finish_s < other.finish_s and one.finish_s + one.price < other.finish_s + other.price


class Shapes:
    """The speed of a job on any placement, from the table of its demand."""

    def __init__(self, servers: Servers, demand: RoundDemand) -> None:
        self._switches = servers.switches
        widest = max(1, int(servers.capacity.max(initial=1)))
        sizes = demand.sizes
        self.rates = demand.rates
        self.size_index = {int(size): index for index, size in enumerate(sizes)}
        self.fewest: Ints = -(-sizes // widest)
        self.widest: Ints = np.maximum(sizes // demand.unit, self.fewest)
        spread = np.maximum(self.widest / self.fewest, 1.0 + 1e-9)
        self._log_spread: Floats = np.log(spread)

    def rate(self, index: Ints, num_servers: Ints, level: Ints) -> Floats:
        """Work a second for sizes (by index) on so many servers that share a switch of that level. Shapes broadcast."""
        share = np.log(np.maximum(num_servers / self.fewest[index], 1.0)) / self._log_spread[index]
        share = np.clip(share, 0.0, 1.0)
        compact, scattered = self.rates[index, 1 + 2 * level], self.rates[index, 2 + 2 * level]
        together: Floats = np.where(num_servers <= 1, self.rates[index, 0], compact + share * (scattered - compact))
        return together

    def rate_of(self, placed: Placed) -> float:
        """Work a second of one placement whose size is among the sizes."""
        chosen = np.array([server for server, _ in placed], dtype=np.int64)
        index = self.size_index[sum(count for _, count in placed)]
        levels = self.distance(int(chosen[0]))[chosen] - 1
        level = max(0, int(levels.max()))
        return float(self.rate(np.array(index), np.array(len(chosen)), np.array(level)))

    def cell(self, placed: Placed) -> tuple[int, int]:
        """The row and column of the table that are nearest to a placement whose size is among the sizes."""
        index = self.size_index[sum(count for _, count in placed)]
        if len(placed) <= 1:
            return index, 0
        chosen = np.array([server for server, _ in placed], dtype=np.int64)
        level = int(self.distance(int(chosen[0]))[chosen].max()) - 1
        is_scattered = math.log(len(placed) / self.fewest[index]) > self._log_spread[index] / 2.0
        return index, 1 + 2 * level + int(is_scattered)

    def distance(self, home: int) -> Ints:
        """How far every server is from `home`: 0 itself, 1 below the same nearest switch, ..."""
        apart: Ints = (self._switches != self._switches[home]).sum(axis=1) + 1
        apart[home] = 0
        return apart


def _nearness(board: Board, demand: RoundDemand) -> Ints:
    """The rank of servers at equal prices: those that the job holds, then near ones; for a new job, those below the
    switch with the most room.

    A switch with room for the whole job comes first, since the model predicts the highest speed there (section 5.3).
    """
    switches = board.servers.switches
    near = np.zeros(len(switches), dtype=np.int64)
    if demand.held:
        home = max(demand.held, key=lambda pair: (pair[1], -pair[0]))[0]
        near[:] = (switches != switches[home]).sum(axis=1) + 1
        near[[server for server, _ in demand.held]] = 0
        return near
    if switches.shape[1] < 2:
        return near
    has_room = board.free.any(axis=1)
    number = int(has_room.argmax())
    left = board.free[number] // demand.unit * demand.unit
    fraction = board.load[number] * _LOAD_STEPS // np.maximum(board.servers.capacity, 1)
    cheapest = fraction == fraction[left > 0].min(initial=_LOAD_STEPS)
    room = np.bincount(switches[:, 0], weights=np.where(cheapest, left, 0))
    home = int(np.flatnonzero(switches[:, 0] == int(room.argmax()))[0])
    near[:] = (switches != switches[home]).sum(axis=1)
    return near


def _options(board: Board, demand: RoundDemand, shapes: Shapes, near: Ints) -> tuple[Floats, Floats]:
    """For every round and size: work a second, and the price of the whole round (inf where there is no room)."""
    sizes, unit = demand.sizes, demand.unit
    order, left, prices = board.cheapest(near, unit, max(1, int(sizes.max()) // unit))
    total = np.cumsum(left, axis=1)
    spent = np.cumsum(left * prices, axis=1)
    used = np.cumsum(left > 0, axis=1)
    # The number of the server with which a size is reached: (rounds x sizes).
    at = (total[:, None, :] < sizes[None, :, None]).sum(axis=2)
    fits = at < total.shape[1]
    at = np.minimum(at, total.shape[1] - 1)
    rows = np.arange(len(total))[:, None]
    missing = sizes[None, :] - (total[rows, at] - left[rows, at])
    cost = np.where(fits, spent[rows, at] - left[rows, at] * prices[rows, at] + missing * prices[rows, at], np.inf)
    switches = board.servers.switches
    apart = (switches[order] != switches[order[:, :1]]).sum(axis=2)
    level = np.maximum.accumulate(np.where(left > 0, apart, 0), axis=1)[rows, at]
    rate = shapes.rate(np.broadcast_to(np.arange(len(sizes)), at.shape), used[rows, at], level)
    return np.where(fits, rate, 0.0), np.where(rate > 0.0, cost, np.inf)


def _choose(board: Board, demand: RoundDemand, rates: Floats, costs: Floats) -> list[int] | None:
    """The index of the size for each round up to the end, -1 for none: P(t, W) = min over w of P_t(t, w) + P(t-1, W-w).

    All completion times are enumerated in one pass, since the same table has the best prefix of each.
    """
    lengths_s, starts_s = board.lengths_s, board.starts_s
    part = max(demand.work, 1e-12) / NUM_PARTS
    parts_left = np.arange(NUM_PARTS, 0, -1) * part
    value = np.full(NUM_PARTS, np.inf)
    value[0] = 0.0
    cells = np.arange(NUM_PARTS)
    backs: list[Ints] = []
    moves: list[Ints] = []
    best, end = math.inf, (-1, -1, -1)
    for number, length_s in enumerate(lengths_s):
        if starts_s[number] >= best:
            break
        rate, cost = rates[number], costs[number]
        lost_s = _setup_s(demand) if number == 0 else np.zeros(len(rate))
        with np.errstate(divide="ignore", invalid="ignore"):
            needed_s = parts_left[None, :] / rate[:, None] + lost_s[:, None]
            share = needed_s / length_s
            total = value + cost[:, None] * share + needed_s + starts_s[number]
        is_last = number == len(lengths_s) - 1
        total[~(share <= (math.inf if is_last else 1.0 + 1e-9))] = math.inf
        total = np.where(np.isnan(total), math.inf, total)
        at = int(total.argmin())
        if total.flat[at] < best:
            best, end = float(total.flat[at]), (number, at // NUM_PARTS, at % NUM_PARTS)
        step = np.floor(rate * np.maximum(length_s - lost_s, 0.0) / part + 0.5)
        step = np.minimum(step, NUM_PARTS).astype(np.int64)
        source = cells - step[:, None]
        reached = np.where((source >= 0) & (step[:, None] > 0), value[np.maximum(source, 0)] + cost[:, None], math.inf)
        chosen = reached.argmin(axis=0)
        cheapest = reached[chosen, cells]
        backs.append(np.where(cheapest < value, chosen, -1))
        moves.append(step)
        value = np.minimum(value, cheapest)
    if not math.isfinite(best):
        return None
    number, size, cell = end
    choice = [size]
    for earlier in range(number - 1, -1, -1):
        taken = int(backs[earlier][cell])
        choice.append(taken)
        cell -= int(moves[earlier][taken]) if taken >= 0 else 0
    return choice[::-1]


def _setup_s(demand: RoundDemand) -> Floats:
    """Seconds lost in the first round, by size: none for a job that goes on as it is."""
    held = sum(count for _, count in demand.held)
    lost: Floats = np.where(demand.sizes == held, 0.0, demand.setup_s)
    return lost


def _lay_out(
    board: Board, demand: RoundDemand, shapes: Shapes, near: Ints, choice: Sequence[int], before: Placed
) -> DevicePlan | None:
    """Place the sizes round by round, each from the placement before (section 5.3), until the work is done."""
    left, price = float(demand.work), 0.0
    stretches: list[RoundStretch] = []
    wanted = int(demand.sizes[choice[0]]) if choice[0] >= 0 else 0
    for number, length_s in enumerate(board.lengths_s):
        if number < len(choice):
            wanted = int(demand.sizes[choice[number]]) if choice[number] >= 0 else 0
        placed = _next_placement(board, number, demand, shapes, near, before, wanted)
        if not placed:
            continue
        rate = shapes.rate_of(placed)
        if rate <= 0.0:
            continue
        lost_s = 0.0 if placed == (stretches[-1].placed if stretches else demand.held) else demand.setup_s
        if stretches and number > stretches[-1].last + 1:
            lost_s = demand.setup_s
        needed_s = left / rate + lost_s
        is_end = needed_s <= length_s * (1.0 + 1e-9) or number == len(board.lengths_s) - 1
        share = needed_s / length_s if is_end else 1.0
        chosen = np.array([server for server, _ in placed], dtype=np.int64)
        counts = np.array([count for _, count in placed], dtype=np.int64)
        price += float((board.prices(number, chosen) * counts).sum()) * share
        if stretches and stretches[-1].placed == placed and stretches[-1].last == number - 1:
            stretches[-1] = msgspec.structs.replace(stretches[-1], last=number)
        else:
            stretches.append(RoundStretch(first=number, last=number, placed=placed, rate=rate))
        if is_end:
            return DevicePlan(
                stretches=tuple(stretches), finish_s=float(board.starts_s[number] + needed_s), price=price
            )
        left -= rate * max(0.0, length_s - lost_s)
        before = placed
    return None


def _next_placement(
    board: Board, number: int, demand: RoundDemand, shapes: Shapes, near: Ints, before: Placed, wanted: int
) -> Placed:
    """The placement of one round: the one before, less its most expensive devices or plus the cheapest ones."""
    if not wanted:
        return ()
    free, unit = board.free[number], demand.unit
    kept = {server: min(count, int(free[server])) // unit * unit for server, count in before}
    kept = {server: count for server, count in kept.items() if count}
    surplus = sum(kept.values()) - wanted
    if surplus > 0:
        servers = np.array(list(kept), dtype=np.int64)
        prices = board.prices(number, servers)
        dearest = sorted(zip(servers.tolist(), prices.tolist(), strict=True), key=lambda p: (-p[1], kept[p[0]], -p[0]))
        for server, _ in dearest:
            taken = min(surplus, kept[server])
            kept[server] -= taken
            surplus -= taken
    elif surplus < 0:
        if kept:
            home = max(kept, key=lambda server: (kept[server], -server))
            near = shapes.distance(home)
            near[list(kept)] = 0
        for server in board.in_order(number, near):
            room = (int(free[server]) - kept.get(int(server), 0)) // unit * unit
            taken = min(-surplus, room)
            if taken > 0:
                kept[int(server)] = kept.get(int(server), 0) + taken
                surplus += taken
            if surplus == 0:
                break
    placed = tuple(sorted((server, count) for server, count in kept.items() if count))
    size = sum(count for _, count in placed)
    if size in shapes.size_index:
        return placed
    # If there is less room than was planned: the next smaller number of devices that the job runs on.
    smaller = [known for known in shapes.size_index if known < size]
    return _next_placement(board, number, demand, shapes, near, placed, max(smaller)) if smaller else ()
