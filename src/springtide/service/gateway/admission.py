"""Which requests the queue of one service takes in, and what is told about those that it refuses."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from springtide.core.quantities import format_duration
from springtide.core.status.admission import AdmissionStatus
from springtide.core.workload import InferenceService
from springtide.service.gateway.metrics import GatewayMetrics
from springtide.service.gateway.requests import RequestTerms
from springtide.serving.admission import Priority, QueueState, RefusalKind, Refused, bounded_retry_s, refusal, share_of
from springtide.serving.slo_limit import SloAdmission

_LATELY_S = 60.0


class RequestAdmission:
    """Admission to one service. Every instant comes from the caller's clock."""

    def __init__(self, service: InferenceService, metrics: GatewayMetrics) -> None:
        self._service = service
        self._metrics = metrics
        self._calls = SloAdmission()
        self._high_at_s = -math.inf
        self._limit: int | None = None
        self._refused: Counter[RefusalKind] = Counter()
        self._lately: deque[tuple[float, RefusalKind, int]] = deque()

    def apply(self, service: InferenceService) -> None:
        """Follow the service as it is deployed now."""
        if service.slo_s != self._service.slo_s:
            self._limit, self._calls.is_out_of_reach = None, False
        self._service = service

    def refusal(
        self,
        state: QueueState,
        terms: RequestTerms,
        num_calls: int,
        at_work_s: Callable[[], Sequence[float]],
        now_s: float,
    ) -> Refused | None:
        """Return None if a request may come in, else why not.

        `num_calls` are the calls at work and waiting with it, `at_work_s` returns for how long the former have lasted.
        """
        if terms.priority == "high":
            self._high_at_s = now_s
        part = self._part(terms.priority, now_s)
        refused = refusal(state, terms.timeout_s, part) or self._by_slo(state, terms, num_calls, at_work_s, now_s, part)
        if refused is not None:
            self._count(refused.kind, now_s)
        return refused

    def ended(self, hold_s: float, answer_s: float, *, is_alone: bool) -> None:
        """Note a call: how long a replica worked on it, when it was answered, whether it found the replica free."""
        self._calls.ended(hold_s, answer_s, is_alone=is_alone)

    @property
    def call_s(self) -> float:
        """The mean time for which a replica works on a call; 0 if not known."""
        return self._calls.call_s or 0.0

    def tick(self) -> None:
        """Called once a second."""
        if self._service.slo_s is not None:
            self._calls.judge(self._service.slo_s)

    def status(self, now_s: float) -> AdmissionStatus:
        """What users are told about it now."""
        self._forget_before(now_s - _LATELY_S)
        lately: Counter[RefusalKind] = Counter()
        for _, kind, num in self._lately:
            lately[kind] += num
        is_lost = self._service.slo_s is not None and self._calls.is_out_of_reach
        return AdmissionStatus(
            limit=None if is_lost else self._limit,
            refused=self._refused.total(),
            refused_lately=lately.total(),
            call_p99_s=self._calls.answer_p99_s,
            slo_is_out_of_reach=is_lost,
            notes=tuple(self._sentences(lately, is_lost=is_lost)),
        )

    def _by_slo(
        self,
        state: QueueState,
        terms: RequestTerms,
        num_calls: int,
        at_work_s: Callable[[], Sequence[float]],
        now_s: float,
        part: float,
    ) -> Refused | None:
        slo_s = self._service.slo_s
        if slo_s is None or num_calls <= state.num_ready or not state.num_ready or self._calls.is_out_of_reach:
            return None
        limit = self._calls.limit(
            min(slo_s, terms.timeout_s),
            slo_s,
            num_servers=state.num_ready,
            max_calls=state.num_ready + self._service.max_queue,
            at_work_s=at_work_s,
            now_s=now_s,
        )
        if terms.timeout_s >= slo_s:
            self._limit = limit
        limit = max(state.num_ready, math.floor(part * limit))
        if num_calls <= limit:
            return None
        kind, late = self._kind_of_late(terms.timeout_s, slo_s)
        at_work = "1 call is" if num_calls == 2 else f"{num_calls - 1} calls are"
        rank = "" if part == 1.0 else f", of which {terms.priority} priority may fill {100 * part:.0f} %"
        return Refused(
            kind=kind,
            reason=f"{late}: {at_work} at work or waiting{rank}; try again later",
            retry_after_s=bounded_retry_s((num_calls - limit) * self.call_s / state.num_ready),
        )

    def _kind_of_late(self, timeout_s: float, slo_s: float) -> tuple[RefusalKind, str]:
        """Why a request beyond the limit is refused, and the same in words."""
        if self._calls.has_few:
            known = "1 call is" if self._calls.num_known == 1 else f"{self._calls.num_known or 'no'} calls are"
            kept = f"within {format_duration(min(timeout_s, slo_s))}"
            return "few_calls", f"{known} known so far, too few to be sure of an answer {kept}"
        if timeout_s < slo_s:
            return "deadline", f"it would be answered later than the {format_duration(timeout_s)} that it allows"
        return "slo", f"the SLO of {format_duration(slo_s)} would be missed"

    def _part(self, priority: Priority, now_s: float) -> float:
        return share_of(priority, has_high=now_s - self._high_at_s < _LATELY_S)

    def _count(self, kind: RefusalKind, now_s: float) -> None:
        self._refused[kind] += 1
        second_s = math.floor(now_s)
        if self._lately and self._lately[-1][:2] == (second_s, kind):
            self._lately[-1] = (second_s, kind, self._lately[-1][2] + 1)
        else:
            self._forget_before(now_s - _LATELY_S)
            self._lately.append((second_s, kind, 1))
        self._metrics.refused(self._service.name, kind)

    def _forget_before(self, at_s: float) -> None:
        while self._lately and self._lately[0][0] < at_s:
            self._lately.popleft()

    def _sentences(self, lately: Counter[RefusalKind], *, is_lost: bool) -> list[str]:
        slo_s, found = self._service.slo_s, []
        if is_lost and slo_s is not None:
            own_s = self._calls.answer_p99_s
            found.append(
                f"the SLO of {format_duration(slo_s)} lies below "
                + (f"{format_duration(own_s)}, " if own_s is not None else "")
                + "the p99 of calls that wait for no other: it cannot be kept, and no request is refused for it"
            )
        reasons: dict[RefusalKind, str] = {
            "slo": "" if slo_s is None else f"the SLO of {format_duration(slo_s)} would be missed",
            "deadline": "they would be answered later than they allow",
            "queue": f"{self._service.max_queue} were waiting",
            "few_calls": "too few calls were known to be sure of answers in time",
        }
        for kind, num in sorted(lately.items()):
            requests = "1 request" if num == 1 else f"{num} requests"
            found.append(f"refused {requests} in the last minute: {reasons[kind]}")
        return found
