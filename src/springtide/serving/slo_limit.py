"""How many calls a service may have at a time so that the p99 of its answers stays within its SLO.

No constants to tune: the service's newest calls are drawn again at random, at as many servers as it has (the calls that
its ready replicas work on at a time), until a call that arrives as the n-th is answered too late too often.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

# Half of what a p99 allows may be late in what is drawn: the rest is for what that does not show.
_LATE_FRACTION = 0.005
_NUM_RUNS = 1000
_MAX_SERVERS = 16
_MAX_CALLS = 512
# With fewer calls than this, rare long ones may not have been seen.
_FEW_CALLS = 64
_UNSEEN_CALLS = 10
# Log-likelihood ratios of "40 % of calls are beyond a bound that 10 % of the window exceed": a cumulative sum above the
# threshold is a service that has changed, and one that has not comes there once in e^12 calls.
_BEYOND, _WITHIN, _CHANGED = math.log(4.0), math.log(2 / 3), 12.0
_REFRESH_S = 1.0
# Out of reach is an SLO that the calls themselves miss: over 1 % of a hundred, or 10 % of twenty.
_REACH_RULES = ((100, 0.01), (20, 0.1))
_Seconds = npt.NDArray[np.float64]


class CallLimit(msgspec.Struct, frozen=True):
    """How many calls may be at work and waiting: `num_calls`, whose fraction is the chance of one more.

    `answers_s` are the 99.5th percentiles of the answer to the call after all servers, the one after that, and so on;
    `step` calls lie between two of them.
    """

    num_calls: float
    answers_s: tuple[float, ...] = ()
    step: int = 1


def limit_of_calls(
    hold_s: Sequence[float],
    answer_s: Sequence[float],
    *,
    num_servers: int,
    bound_s: float,
    max_calls: int,
    rng: np.random.Generator,
) -> CallLimit:
    """Return the limit by which the p99 of answers is within `bound_s`, at least `num_servers`, at most `max_calls`.

    `hold_s` are seconds for which calls held a server, `answer_s` after how many of these each was answered. A call is
    admitted when another one has just ended, so one server has begun anew and the others are in the midst of a call.
    """
    holds, answers = np.asarray(hold_s), np.asarray(answer_s)
    late = float((answers > bound_s).mean())
    if late > _LATE_FRACTION:
        return CallLimit(float(num_servers))
    # Of many servers, groups stand for one: their waiting is estimated a little too long.
    step = math.ceil(num_servers / _MAX_SERVERS)
    runs = np.arange(_NUM_RUNS)
    free_s = _rests_s(holds, rng, math.ceil(num_servers / step))
    found: list[float] = []
    while num_servers + (len(found) + 1) * step <= max_calls:
        chosen = free_s.argmin(axis=1)
        start_s = free_s[runs, chosen]
        answered_s = start_s + answers[rng.integers(len(answers), size=_NUM_RUNS)]
        next_late = float((answered_s > bound_s).mean())
        if next_late > _LATE_FRACTION:
            more = (_LATE_FRACTION - late) / (next_late - late)
            return CallLimit(num_servers + (len(found) + more) * step, tuple(found), step)
        late = max(late, next_late)
        rank = int((1 - _LATE_FRACTION) * _NUM_RUNS)
        found.append(max(float(np.partition(answered_s, rank)[rank]), found[-1] if found else 0.0))
        free_s[runs, chosen] = start_s + holds[rng.integers(len(holds), size=_NUM_RUNS)]
    return CallLimit(float(max(num_servers, max_calls)), tuple(found), step)


def _rests_s(holds: _Seconds, rng: np.random.Generator, num_servers: int) -> _Seconds:
    """When each server comes free, for each run: long calls are more often met in their midst than short ones."""
    ends = np.cumsum(holds)
    drawn = np.searchsorted(ends, rng.random((_NUM_RUNS, num_servers)) * ends[-1])
    rests: _Seconds = holds[np.minimum(drawn, len(holds) - 1)] * rng.random((_NUM_RUNS, num_servers))
    rests[:, 0] = holds[rng.integers(len(holds), size=_NUM_RUNS)]
    return rests


class _Change:
    """Finds out that calls are more often `below_s`, or `above_s`, than they were; `num_calls` have been since then."""

    def __init__(self) -> None:
        self.below_s, self.above_s = 0.0, math.inf
        self.num_calls = 0
        self._sum = 0.0

    def add(self, hold_s: float) -> bool:
        """Note one more call, and return whether it is certain now."""
        self._sum += _BEYOND if hold_s < self.below_s or hold_s > self.above_s else _WITHIN
        self.num_calls += 1
        if self._sum <= 0.0:
            self._sum, self.num_calls = 0.0, 0
        return self._sum > _CHANGED


class SloAdmission:
    """The newest calls of one service, and how many it may have at a time. Instants are of the caller's clock."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._holds_s: deque[float] = deque(maxlen=_MAX_CALLS)
        self._answers_s: deque[float] = deque(maxlen=_MAX_CALLS)
        self._alone_s: deque[float] = deque(maxlen=_MAX_CALLS)
        self._total_s = 0.0
        self._limit: CallLimit | None = None
        self._asked: tuple[float, int, int] = (0.0, 0, 0)
        self._refreshed_at_s = -math.inf
        self._num_new = 0
        self._is_one_more = False
        self._shorter, self._longer = _Change(), _Change()
        # Whether the SLO is shorter than the service's own p99: then no limit keeps it.
        self.is_out_of_reach = False

    @property
    def call_s(self) -> float | None:
        """The mean time for which a call holds a server; None if no call is known."""
        return self._total_s / len(self._holds_s) if self._holds_s else None

    @property
    def num_known(self) -> int:
        """The number of calls that the limit rests on."""
        return len(self._holds_s)

    @property
    def has_few(self) -> bool:
        """Whether these are so few that rare long ones may not be among them, so that the limit is a careful one."""
        return len(self._holds_s) < _FEW_CALLS

    @property
    def answer_p99_s(self) -> float | None:
        """The p99 of the answers of calls that waited for no other; None where no twenty calls are known.

        Under a load that leaves no server free, it is that of all calls, from when a replica began with each.
        """
        least = _REACH_RULES[-1][0]
        answers_s = self._alone_s if len(self._alone_s) >= least else self._answers_s
        if len(answers_s) < least:
            return None
        return float(np.quantile(np.asarray(answers_s), 0.99, method="higher"))

    def ended(self, hold_s: float, answer_s: float, *, is_alone: bool) -> None:
        """Note a call: how long it held a server, when it was answered, and whether it found one that was free."""
        if len(self._holds_s) == _MAX_CALLS:
            self._total_s -= self._holds_s[0]
        self._holds_s.append(hold_s)
        self._total_s += hold_s
        self._answers_s.append(answer_s)
        if is_alone:
            self._alone_s.append(answer_s)
        self._num_new += 1
        for change in (self._shorter, self._longer):
            if change.add(hold_s):
                self._forget_all_but(change.num_calls)
        if self._limit is not None:
            self._is_one_more = self._rng.random() < self._limit.num_calls % 1

    def judge(self, slo_s: float) -> None:
        """Decide whether the SLO is out of reach. One that was is in reach again if calls clearly keep it."""
        if self.is_out_of_reach:
            late = [answer_s > slo_s for answer_s in self._answers_s]
            self.is_out_of_reach = not late or sum(late) > _LATE_FRACTION * len(late)
            return
        num, num_late = len(self._alone_s), sum(answer_s > slo_s for answer_s in self._alone_s)
        self.is_out_of_reach = any(num >= least and num_late > part * num for least, part in _REACH_RULES)

    def limit(
        self,
        bound_s: float,
        slo_s: float,
        *,
        num_servers: int,
        max_calls: int,
        at_work_s: Callable[[], Sequence[float]],
        now_s: float,
    ) -> int:
        """Return how many calls there may be with one that is to be answered within `bound_s`, at most `slo_s`.

        At least `num_servers`: what finds a server free is always let in. `at_work_s` returns for how many
        seconds the calls at work have lasted.
        """
        if self.has_few:
            return max(num_servers, min(max_calls, self._limit_by_few(bound_s, num_servers, at_work_s())))
        asked = (slo_s, num_servers, max_calls)
        is_filling = len(self._holds_s) < _MAX_CALLS and self._num_new >= _FEW_CALLS
        is_due = is_filling or (self._num_new >= _FEW_CALLS // 8 and now_s - self._refreshed_at_s >= _REFRESH_S)
        if self._limit is None or asked != self._asked or is_due:
            self._refresh(slo_s, num_servers, max_calls)
            self._asked, self._refreshed_at_s = asked, now_s
        assert self._limit is not None
        if bound_s < slo_s:
            return num_servers + bisect_right(self._limit.answers_s, bound_s) * self._limit.step
        return int(self._limit.num_calls) + self._is_one_more

    def _limit_by_few(self, bound_s: float, num_servers: int, at_work_s: Sequence[float]) -> int:
        """A careful limit: two calls as long as the longest, all others of the mean, as if one had been ten of them."""
        longest_s, num = max([*self._holds_s, *at_work_s], default=0.0), len(self._holds_s)
        mean_s = (sum(self._holds_s) + sum(at_work_s)) / max(1, num) * (1 + _UNSEEN_CALLS / (num + 1))
        most = num_servers * (bound_s - 2 * longest_s)
        return 1 << 30 if most >= mean_s * (1 << 30) else math.floor(most / mean_s)

    def _refresh(self, slo_s: float, num_servers: int, max_calls: int) -> None:
        self._limit = limit_of_calls(
            self._holds_s,
            self._answers_s,
            num_servers=num_servers,
            bound_s=slo_s,
            max_calls=max_calls,
            rng=self._rng,
        )
        self._num_new = 0
        low_s, high_s = np.quantile(np.asarray(self._holds_s), (0.1, 0.9))
        self._shorter.below_s, self._longer.above_s = float(low_s), float(high_s)

    def _forget_all_but(self, num: int) -> None:
        """The service has changed: only its newest calls say how it is now."""
        for window in (self._holds_s, self._answers_s, self._alone_s):
            while len(window) > num:
                window.popleft()
        self._total_s = sum(self._holds_s)
        self._limit, self._shorter, self._longer = None, _Change(), _Change()
