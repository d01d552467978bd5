"""How much of a shared device each tenant may use in the next few milliseconds: one pure step of vertical scaling.

Implements section 3.4.1 and Algorithm 2 of Dilu, in units of device time; `docs/policies/share-control.md` explains it
and lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from springtide.core.shares import Share
from springtide.core.status.shares import ShareState

# An iteration counts as stretched above this multiple of its reference (the paper's eta_violation, plus one), and only
# if it is also more than a millisecond longer: delays by the host's scheduler are not contention.
STRETCHED = 1.3
MIN_STRETCH_S = 0.001
# How far a reference moves towards a longer iteration: quickly if the tenant had all that it could get (the model or
# its inputs have become slower), else slowly.
_FOLLOW_UNHINDERED = 0.2
_FOLLOW_HINDERED = 0.01
_MAX_SIZES = 64
# The interval over which every tenant with work is granted at least its request.
WINDOW_S = 1.0
# A training tenant may be held below its request only as far as it was granted more than its request earlier in the
# same second, and by at most this time at its request. This bounds what any other interval of a second can lack.
_MAX_CREDIT_S = 0.1
# The ceiling of training tenants is divided by the stretch of the slow iteration, and multiplied by this in other
# ticks.
_INCREASE = 1.3
_MIN_CEILING = 0.05
_MAX_STRETCH = 10.0
# Use below this, or below a fifth of the grant, counts as none. This many ticks without use, at a grant of at least
# half the request, count as a pause (a collective, for example).
_NO_USE = 0.02
_NO_USE_OF_GRANT = 0.2
_WORTH_USING = 0.5
_PAUSE_TICKS = 4
# A tenant that uses nearly all of its grant claims its limit. Otherwise its claim falls by a tenth per tick down to its
# request, so that others get what it does not use. It falls slowly because one tick is a noisy measurement: an
# iteration starts with work on the host, and a kernel accounts for CPU time only every 4 to 10 ms.
_USES_ALL = 0.9
_CLAIM_DECAY = 0.9
_TINY = 1e-12
_ALONE = "no other tenant is on this device"
_IDLE = "it has no work: others may have its part"
_PAUSED = "it works but does not compute: others may have its part"
_STRETCHED = "its iteration takes too long: it gets its limit first"
_QUEUED = "more requests wait than fit its next batch: it gets its limit first"
_CONTENDED = "others have work too: its request is sure, the rest is by need"
_FREE = "the others have no work: it may have its limit"
_WAITS = "an SLO tenant is in trouble: it keeps its request over each second"
_RISING = "the trouble is over: it gets more from tick to tick"


class ShareIteration(msgspec.Struct, frozen=True, kw_only=True):
    """An iteration that has ended: the number of items in its batch, and its duration from start to end."""

    batch_size: int
    duration_s: float


def reference_s(references: Mapping[int, float], batch_size: int) -> float:
    """Return the duration of an iteration of this batch size without contention; 0.0 if nothing is known.

    For an unknown size it is bounded by the known ones: a batch takes at most as long as a larger one, and at most
    proportionally longer than a smaller one. So a larger batch is not mistaken for contention.
    """
    known_s = references.get(batch_size)
    if known_s is not None:
        return known_s
    bound_s = 0.0
    for size, duration_s in references.items():
        at_most_s = duration_s if size > batch_size else duration_s * batch_size / max(1, size)
        bound_s = at_most_s if not bound_s or at_most_s < bound_s else bound_s
    return bound_s


def stretch(references: Mapping[int, float], batch_size: int, duration_s: float) -> float:
    """Return the duration as a multiple of its reference if that counts as stretched, else 1.0 (Dilu, Algorithm 2).

    `duration_s` may also be the age of an iteration that still runs, which is a lower bound of its duration.
    """
    expected_s = reference_s(references, batch_size)
    if expected_s <= 0.0 or duration_s <= STRETCHED * expected_s or duration_s <= expected_s + MIN_STRETCH_S:
        return 1.0
    return duration_s / expected_s


def learn(
    references: Mapping[int, float], finished: Sequence[ShareIteration], *, is_unhindered: bool
) -> dict[int, float]:
    """Return the references updated by these iterations.

    A shorter iteration replaces the reference. A longer one raises it: by a fifth of the difference if `is_unhindered`
    (the tenant had its limit, and no training tenant more than its request), so that a tenant whose model became slower
    is no emergency after some iterations; else by a hundredth. The 64 sizes observed last are kept.
    """
    learnt = dict(references)
    follow = _FOLLOW_UNHINDERED if is_unhindered else _FOLLOW_HINDERED
    for iteration in finished:
        if iteration.duration_s <= 0.0:
            continue
        size = iteration.batch_size
        expected_s = reference_s(learnt, size)
        learnt.pop(size, None)
        if expected_s <= 0.0 or iteration.duration_s <= expected_s:
            learnt[size] = iteration.duration_s
        else:
            learnt[size] = expected_s + follow * (iteration.duration_s - expected_s)
        if len(learnt) > _MAX_SIZES:
            del learnt[next(iter(learnt))]
    return learnt


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A workload on a shared device. `is_slo`: it has a latency objective (inference); the others are training."""

    tenant_id: str
    share: Share
    is_slo: bool


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a tenant in the last tick.

    `used_fraction` is the device time that it used, as a fraction of the tick. `iteration_s` is the age of the running
    iteration (0.0: none), `batch_size` its batch; `finished` are the iterations that ended since the last tick, in
    order. `num_queued` requests wait for a later iteration.
    """

    used_fraction: float
    iteration_s: float = 0.0
    batch_size: int = 0
    finished: tuple[ShareIteration, ...] = ()
    num_queued: int = 0


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The fraction of the device that a tenant may use in the next tick, and the reason as a sentence."""

    rate: float
    state: ShareState
    reason: str


class TenantControl(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's state of one tenant between ticks.

    `credit_s` is the device time that was granted above its request in this second, `claim` the rate that it claims,
    `stretched` the stretch of its last iteration (1.0: none). `num_unused_ticks` counts consecutive ticks in which it
    had work and used nothing. `is_wanting`: it had work; `is_hindered`: during the running iteration it was at some
    time granted less than possible. `references` are the durations of its iterations by batch size, never modified in
    place.
    """

    tenant_id: str
    request: float
    rate: float
    credit_s: float = 0.0
    claim: float = 1.0
    stretched: float = 1.0
    num_unused_ticks: int = 0
    is_wanting: bool = False
    is_hindered: bool = True
    references: dict[int, float] = {}


class DeviceControl(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's state of one device between ticks; the default is the initial state.

    `left_s` is the rest of the present second, `ceiling` the fraction of their limits that training tenants may have
    while an SLO tenant has work.
    """

    left_s: float = 0.0
    ceiling: float = 1.0
    tenants: tuple[TenantControl, ...] = ()


class _Row(msgspec.Struct):
    """The working values of one tenant during a tick."""

    tenant_id: str
    is_slo: bool
    request: float
    limit: float
    before: TenantControl
    references: dict[int, float]
    is_wanting: bool = False
    is_queued: bool = False
    is_finished: bool = False
    uses_whole_grant: bool = False
    stretched: float = 1.0
    num_unused_ticks: int = 0
    claim: float = 0.0
    credit_s: float = 0.0
    rate: float = 0.0
    due: float = 0.0
    reason: str = ""


def control_tick(
    device: DeviceControl, tenants: Sequence[Tenant], observations: Mapping[str, Observation], tick_s: float
) -> tuple[DeviceControl, dict[str, Grant]]:
    """Return the controller's next state, and what every tenant may use in the next tick.

    To be called for each device every `tick_s` (5 ms; if that varies, the time since the last call). A tenant without
    an observation is idle. Every rate lies in [0, limit]. The rates of tenants that use their whole grant sum to at
    most 1 (if their requests do); the rate of an idle tenant, or of an SLO tenant that does not use its whole grant, is
    what it may take at once. In every second each tenant that always has work is granted at least its request.
    """
    left_s = device.left_s - tick_s
    is_new = left_s < 0.5 * tick_s
    left_s = WINDOW_S if is_new else left_s
    known = {control.tenant_id: control for control in device.tenants}
    rows = [
        _row_of(tenant, known.get(tenant.tenant_id), observations.get(tenant.tenant_id), tick_s, is_new)
        for tenant in tenants
    ]
    ceiling = _ceiling(device.ceiling, rows)
    _divide(rows, tick_s, ceiling)
    grants: dict[str, Grant] = {}
    controls = []
    is_slo_stretched = any(row.is_slo and row.is_wanting and row.stretched > 1.0 for row in rows)
    is_training_at_requests = _is_training_at_requests(rows)
    for row in rows:
        state = _state(row, rows, is_slo_stretched, ceiling)
        grants[row.tenant_id] = Grant(rate=row.rate, state=state, reason=row.reason)
        controls.append(_next_control(row, is_training_at_requests))
    return DeviceControl(left_s=left_s, ceiling=ceiling, tenants=tuple(controls)), grants


def limits_of(tenants: Sequence[Tenant]) -> dict[str, Grant]:
    """Return what every tenant may use if the control is turned off: its limit."""
    reason = "the control is off: every tenant has its limit"
    return {tenant.tenant_id: Grant(rate=tenant.share.limit, state="NONE", reason=reason) for tenant in tenants}


def _row_of(
    tenant: Tenant, before: TenantControl | None, observed: Observation | None, tick_s: float, is_new: bool
) -> _Row:
    """Derive a tenant's working values from its observation and its previous grant."""
    request, limit = tenant.share.request, tenant.share.limit
    if before is None:
        before = TenantControl(tenant_id=tenant.tenant_id, request=request, rate=request)
    row = _Row(tenant.tenant_id, tenant.is_slo, request, limit, before, before.references)
    is_working = False
    if observed is not None:
        row.is_finished = bool(observed.finished)
        is_used = observed.used_fraction > min(_NO_USE, _NO_USE_OF_GRANT * before.rate)
        # With almost no grant, a tenant's use does not show whether it still has work.
        use_is_conclusive = before.rate >= _WORTH_USING * request
        is_working = observed.iteration_s > 0.0 or row.is_finished or observed.num_queued > 0 or is_used
        is_working = is_working or (before.is_wanting and not use_is_conclusive)
    if observed is not None and is_working:
        if use_is_conclusive and not is_used and not row.is_finished:
            row.num_unused_ticks = before.num_unused_ticks + 1
        if row.is_slo:
            # More requests than fit the next batch; the largest batch so far stands for its maximum.
            row.is_queued = observed.num_queued > 0 and observed.num_queued >= max(
                (observed.batch_size, *before.references)
            )
            _update_stretch(row, observed)
    row.is_wanting = is_working and row.num_unused_ticks < _PAUSE_TICKS
    row.claim = before.claim
    if observed is not None and row.is_wanting:
        row.uses_whole_grant = observed.used_fraction >= _USES_ALL * before.rate
        row.claim = _claim(row)
    if row.is_wanting:
        # The credit is relative to the request that was in force. A debt from a late tick is carried over to the next
        # second; a credit is not.
        credit_s = before.credit_s + (before.rate - before.request) * tick_s
        row.credit_s = min(0.0 if is_new else _MAX_CREDIT_S * request, credit_s)
    return row


def _update_stretch(row: _Row, observed: Observation) -> None:
    """Compute the stretch of a tenant's last or running iteration, and update its references."""
    before = row.before
    row.stretched = before.stretched
    if observed.finished:
        last = observed.finished[-1]
        row.stretched = stretch(before.references, last.batch_size, last.duration_s)
        row.references = learn(before.references, observed.finished, is_unhindered=not before.is_hindered)
    if observed.iteration_s > 0.0:
        row.stretched = max(row.stretched, stretch(row.references, observed.batch_size, observed.iteration_s))
    row.stretched = min(row.stretched, _MAX_STRETCH)


def _claim(row: _Row) -> float:
    """Return the rate that a tenant with work claims: its limit, falling to its request while it leaves some unused."""
    before = row.before
    if row.uses_whole_grant or row.is_queued or row.stretched > 1.0:
        return row.limit
    return min(row.limit, max(row.request, _CLAIM_DECAY * before.claim))


def _ceiling(before: float, rows: Sequence[_Row]) -> float:
    """Return the fraction of their limits that training tenants may have while an SLO tenant has work.

    It falls only if an SLO tenant has its limit and is slow nevertheless, or does not use it while requests wait: then
    the others disturb it by more than their rates. The divisor is the stretch, which is above 1; the paper's relative
    change can be below 1, and then raises the fraction instead.
    """
    worst = 1.0
    for row in rows:
        if row.is_slo and row.is_wanting and row.before.rate >= row.limit - _TINY:
            worst = max(worst, row.stretched, _INCREASE if row.is_queued and not row.uses_whole_grant else 1.0)
    return max(_MIN_CEILING, before / worst) if worst > 1.0 else min(1.0, before * _INCREASE)


def _divide(rows: Sequence[_Row], tick_s: float, ceiling: float) -> None:
    """Set every tenant's rate: requests first, then SLO tenants by need, then training tenants."""
    wanting = [row for row in rows if row.is_wanting]
    is_slo_wanting = any(row.is_slo for row in wanting)
    for row in rows:
        if not row.is_wanting:
            row.rate = row.limit if row.is_slo or not is_slo_wanting else row.request
    if len(wanting) == 1 and len(rows) == 1:
        wanting[0].rate = wanting[0].limit
        return
    for row in wanting:
        withheld = 0.0
        if is_slo_wanting and not row.is_slo:
            withheld = max(0.0, min(row.request, row.credit_s / tick_s))
        row.due = row.request - withheld
    spare = _raise_rates([(row, row.due) for row in wanting], 1.0)
    spare = _raise_rates(
        [(row, row.limit) for row in wanting if row.is_slo and (row.stretched > 1.0 or row.is_queued)], spare
    )
    spare = _raise_rates([(row, row.claim) for row in wanting if row.is_slo], spare)
    part = ceiling if is_slo_wanting else 1.0
    spare = _raise_rates([(row, min(row.claim, part * row.limit)) for row in wanting if not row.is_slo], spare)
    # What no tenant claims is granted too, in case it is used. An SLO tenant that does not use its whole grant may have
    # its limit on top of the others' rates: once it uses it, they are cut in the next tick.
    _raise_rates([(row, part * row.limit) for row in wanting if not row.is_slo], spare)
    for row in wanting:
        if row.is_slo and row.claim < row.limit:
            row.rate = row.limit


def _raise_rates(wanted: Sequence[tuple[_Row, float]], spare: float) -> float:
    """Raise rates to the wanted ones, each by the same fraction if `spare` is too small. Return what is left of it."""
    lacking = 0.0
    for row, rate in wanted:
        if rate > row.rate:
            lacking += rate - row.rate
    if lacking <= _TINY or spare <= _TINY:
        return spare
    part = min(1.0, spare / lacking)
    for row, rate in wanted:
        if rate > row.rate:
            row.rate = rate if part == 1.0 else row.rate + part * (rate - row.rate)
    return max(0.0, spare - lacking)


def _is_training_at_requests(rows: Sequence[_Row]) -> bool:
    """Whether no training tenant has more than its request, so that an SLO tenant at its limit cannot get more."""
    return all(row.is_slo or not row.is_wanting or row.rate <= row.request + _TINY for row in rows)


def _state(row: _Row, rows: Sequence[_Row], is_slo_stretched: bool, ceiling: float) -> ShareState:
    """Return the state of a tenant's control (Dilu, Algorithm 2) and set `row.reason`."""
    if len(rows) == 1:
        row.reason = _ALONE
        return "NONE"
    if not row.is_wanting:
        row.reason = _PAUSED if row.num_unused_ticks else _IDLE
        return "RECOVERY"
    if row.is_slo and (row.stretched > 1.0 or row.is_queued):
        row.reason = _STRETCHED if row.stretched > 1.0 else _QUEUED
        return "EMERGENCY"
    if not row.is_slo and is_slo_stretched:
        row.reason = _WAITS
        return "EMERGENCY"
    if not any(other.is_wanting for other in rows if other is not row):
        row.reason = _FREE
        return "RECOVERY"
    if not row.is_slo and ceiling < 1.0:
        row.reason = _RISING
        return "RECOVERY"
    row.reason = _CONTENDED
    return "CONTENTION"


def _next_control(row: _Row, is_training_at_requests: bool) -> TenantControl:
    is_hindered = row.is_slo and not (is_training_at_requests and row.rate >= row.limit - _TINY)
    return TenantControl(
        tenant_id=row.tenant_id,
        request=row.request,
        rate=row.rate,
        credit_s=row.credit_s,
        claim=row.claim,
        stretched=row.stretched,
        num_unused_ticks=row.num_unused_ticks,
        is_wanting=row.is_wanting,
        is_hindered=is_hindered or (row.before.is_hindered and not row.is_finished),
        references=row.references,
    )
