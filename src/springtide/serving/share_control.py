"""How much of a shared device each tenant may use in the next few milliseconds: one pure step of the vertical scaling.

Dilu, section 3.4.1 and Algorithm 2, in units of device time, with its gaps closed; `docs/policies/share-control.md`
says how it works and where it differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from springtide.core.shares import Share
from springtide.core.status.shares import ShareState

# An iteration counts as stretched above this multiple of its reference (the paper's eta_violation, plus one), if that
# is also by more than a millisecond: what the scheduler of a host adds to an iteration of 2 ms is no contention.
STRETCHED = 1.3
MIN_STRETCH_S = 0.001
# How far a reference follows an iteration that was longer: soon when nothing more could have been done for it (the
# model or its inputs are slower for good), else hardly.
_FOLLOW_UNHINDERED = 0.2
_FOLLOW_HINDERED = 0.01
_MAX_SIZES = 64
# Requests are kept in every second of the device.
WINDOW_S = 1.0
# A tenant that may wait is held below its request only as long as it has been granted more than that before, in the
# same second, and by at most this time of its request: what any other second can lack.
_MAX_CREDIT_S = 0.1
# The ceiling of tenants that may wait falls by the stretch of the iteration in trouble and rises by this a tick.
_INCREASE = 1.3
_MIN_CEILING = 0.05
_MAX_STRETCH = 10.0
# Use below this, or below a fifth of the grant, is none; so many ticks without use, with a grant of at least half the
# request, are a pause (a collective, say).
_NO_USE = 0.02
_NO_USE_OF_GRANT = 0.2
_WORTH_USING = 0.5
_PAUSE_TICKS = 4
# A tenant that uses nearly all it has may want all it can have; else its claim falls by a tenth a tick down to its
# request: nothing holds it back, so what it does not use may go to others. Slowly, because one tick says little: an
# iteration begins on the host, and a kernel accounts for CPU time every 4 to 10 ms.
_USES_ALL = 0.9
_CLAIM_DECAY = 0.9
_TINY = 1e-12
_ALONE = "nobody else is on this device"
_IDLE = "it has no work: others may have its part"
_PAUSED = "it works but does not compute: others may have its part"
_STRETCHED = "its iteration takes too long: it gets its limit first"
_QUEUED = "more requests wait than fit its next batch: it gets its limit first"
_CONTENDED = "others have work too: its request is sure, the rest is by need"
_FREE = "the others have no work: it may have its limit"
_WAITS = "an SLO tenant is in trouble: it keeps its request over each second"
_RISING = "the trouble is over: it gets more from tick to tick"


class ShareIteration(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration that ended: a batch of so many items, in so many seconds from its start to its end."""

    batch_size: int
    duration_s: float


def reference_s(references: Mapping[int, float], batch_size: int) -> float:
    """Return how long an iteration of this batch size takes when no other tenant is in its way; 0.0: nothing is known.

    A size never seen is bounded by its neighbours: a batch takes at most as long as a larger one, and at most in
    proportion longer than a smaller one. So a larger batch is not taken for contention.
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

    `duration_s` may be the age of an iteration that still runs: it will not become shorter.
    """
    expected_s = reference_s(references, batch_size)
    if expected_s <= 0.0 or duration_s <= STRETCHED * expected_s or duration_s <= expected_s + MIN_STRETCH_S:
        return 1.0
    return duration_s / expected_s


def learn(
    references: Mapping[int, float], finished: Sequence[ShareIteration], *, is_unhindered: bool
) -> dict[int, float]:
    """Return the references with these iterations taken in.

    A shorter one is the reference at once. A longer one draws it up: by a fifth of the way if `is_unhindered` (the
    tenant had its limit and none had more than its due), so that a tenant that became slower for good is no emergency
    after some iterations, else by a hundredth. At most 64 sizes are kept, those seen last.
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
    """A workload on a shared device. `is_slo`: its latency matters (inference); others may wait (training)."""

    tenant_id: str
    share: Share
    is_slo: bool


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a tenant in the last tick.

    `used_fraction` is the device time it used, as a fraction of the tick. `iteration_s` is the age of the iteration
    that runs now (0.0: none), `batch_size` its batch; `finished` are those that ended since the last tick, in order.
    `num_queued` requests wait for a later iteration.
    """

    used_fraction: float
    iteration_s: float = 0.0
    batch_size: int = 0
    finished: tuple[ShareIteration, ...] = ()
    num_queued: int = 0


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may use in the next tick, as a fraction of the device, and why (a sentence)."""

    rate: float
    state: ShareState
    reason: str


class TenantControl(msgspec.Struct, frozen=True, kw_only=True):
    """What the control remembers of one tenant.

    `credit_s` is the device time that it was granted above its request in this second, `claim` what is kept for it,
    `stretched` by how much its last iteration took too long (1.0: not). `num_unused_ticks` counts ticks in a row in
    which it had work and used nothing. `is_wanting`: it had work; `is_hindered`: the iteration that runs was at some
    time granted less than could be. `references` are the durations of its iterations by batch size, never changed in
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
    """What the control remembers of one device. A fresh one knows nothing.

    `left_s` is what is left of the window, `ceiling` which part of their limits tenants that may wait can have while an
    SLO tenant has work.
    """

    left_s: float = 0.0
    ceiling: float = 1.0
    tenants: tuple[TenantControl, ...] = ()


class _Row(msgspec.Struct):
    """One tenant in the making of a tick."""

    tenant_id: str
    is_slo: bool
    request: float
    limit: float
    before: TenantControl
    references: dict[int, float]
    is_wanting: bool = False
    is_queued: bool = False
    is_finished: bool = False
    is_held: bool = False
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
    """Return what every tenant may use in the next tick, and what to remember for the one after it.

    To be called every `tick_s` (5 ms; the time since the last call, where that varies) for each device on its own. A
    tenant without an observation is idle. Every rate lies in [0, limit]; those of tenants that use what they are
    granted sum to at most 1 (if their requests do); the rate of an idle tenant, or of an SLO tenant that leaves some
    of its grant, is what it may have at once. In every second of the device each tenant that always has work is
    granted at least its request.
    """
    left_s = device.left_s - tick_s
    is_new = left_s < 0.5 * tick_s
    left_s = WINDOW_S if is_new else left_s
    known = {control.tenant_id: control for control in device.tenants}
    rows = [
        _look(tenant, known.get(tenant.tenant_id), observations.get(tenant.tenant_id), tick_s, is_new)
        for tenant in tenants
    ]
    ceiling = _ceiling(device.ceiling, rows)
    _divide(rows, tick_s, ceiling)
    grants: dict[str, Grant] = {}
    controls = []
    is_pressed = any(row.is_slo and row.is_wanting and row.stretched > 1.0 for row in rows)
    is_full = _is_all_done(rows)
    for row in rows:
        state = _state(row, rows, is_pressed, ceiling)
        grants[row.tenant_id] = Grant(rate=row.rate, state=state, reason=row.reason)
        controls.append(_remember(row, is_full))
    return DeviceControl(left_s=left_s, ceiling=ceiling, tenants=tuple(controls)), grants


def limits_of(tenants: Sequence[Tenant]) -> dict[str, Grant]:
    """Return what every tenant may use where the control is turned off: its limit, at all times."""
    reason = "the control is off: everybody has its limit"
    return {tenant.tenant_id: Grant(rate=tenant.share.limit, state="NONE", reason=reason) for tenant in tenants}


def _look(tenant: Tenant, before: TenantControl | None, seen: Observation | None, tick_s: float, is_new: bool) -> _Row:
    """Take in what a tenant did in the last tick and what it was granted for it."""
    request, limit = tenant.share.request, tenant.share.limit
    if before is None:
        before = TenantControl(tenant_id=tenant.tenant_id, request=request, rate=request)
    row = _Row(tenant.tenant_id, tenant.is_slo, request, limit, before, before.references)
    is_working = False
    if seen is not None:
        row.is_finished = bool(seen.finished)
        is_used = seen.used_fraction > min(_NO_USE, _NO_USE_OF_GRANT * before.rate)
        # A tenant that was granted next to nothing cannot show by its use that it still has work.
        can_show = before.rate >= _WORTH_USING * request
        is_working = seen.iteration_s > 0.0 or row.is_finished or seen.num_queued > 0 or is_used
        is_working = is_working or (before.is_wanting and not can_show)
    if seen is not None and is_working:
        if can_show and not is_used and not row.is_finished:
            row.num_unused_ticks = before.num_unused_ticks + 1
        if row.is_slo:
            # More than the next batch can take, as far as its largest one is known.
            row.is_queued = seen.num_queued > 0 and seen.num_queued >= max((seen.batch_size, *before.references))
            _judge_iterations(row, seen)
    row.is_wanting = is_working and row.num_unused_ticks < _PAUSE_TICKS
    row.claim = before.claim
    if seen is not None and row.is_wanting:
        row.is_held = seen.used_fraction >= _USES_ALL * before.rate
        row.claim = _claim(row)
    if row.is_wanting:
        # What it was granted counts against the request that was in force then. What a late tick cost it is earned back
        # first, in the next second too.
        credit_s = before.credit_s + (before.rate - before.request) * tick_s
        row.credit_s = min(0.0 if is_new else _MAX_CREDIT_S * request, credit_s)
    return row


def _judge_iterations(row: _Row, seen: Observation) -> None:
    """Say by how much a tenant's iteration takes too long, running or ended, and learn from the ended."""
    before = row.before
    row.stretched = before.stretched
    if seen.finished:
        last = seen.finished[-1]
        row.stretched = stretch(before.references, last.batch_size, last.duration_s)
        row.references = learn(before.references, seen.finished, is_unhindered=not before.is_hindered)
    if seen.iteration_s > 0.0:
        row.stretched = max(row.stretched, stretch(row.references, seen.batch_size, seen.iteration_s))
    row.stretched = min(row.stretched, _MAX_STRETCH)


def _claim(row: _Row) -> float:
    """Return what a tenant with work claims: its limit, or less and less of it while it leaves some of its grant."""
    before = row.before
    if row.is_held or row.is_queued or row.stretched > 1.0:
        return row.limit
    return min(row.limit, max(row.request, _CLAIM_DECAY * before.claim))


def _ceiling(before: float, rows: Sequence[_Row]) -> float:
    """Return which part of their limits tenants that may wait can have while an SLO tenant has work.

    It falls only for a tenant that has its limit and is slow all the same, or cannot use it while requests wait:
    others disturb it beyond their rates. The divisor is how long the iteration takes over how long it should, which is
    above 1: the paper's relative change can be below 1, and then raises what it should cut.
    """
    worst = 1.0
    for row in rows:
        if row.is_slo and row.is_wanting and row.before.rate >= row.limit - _TINY:
            worst = max(worst, row.stretched, _INCREASE if row.is_queued and not row.is_held else 1.0)
    return max(_MIN_CEILING, before / worst) if worst > 1.0 else min(1.0, before * _INCREASE)


def _divide(rows: Sequence[_Row], tick_s: float, ceiling: float) -> None:
    """Give every tenant its rate: requests first, then SLO tenants by need, then tenants that may wait."""
    wanting = [row for row in rows if row.is_wanting]
    is_slo_wanting = any(row.is_slo for row in wanting)
    for row in rows:
        if not row.is_wanting:
            row.rate = row.limit if row.is_slo or not is_slo_wanting else row.request
    if len(wanting) == 1 and len(rows) == 1:
        wanting[0].rate = wanting[0].limit
        return
    for row in wanting:
        lent = 0.0
        if is_slo_wanting and not row.is_slo:
            lent = max(0.0, min(row.request, row.credit_s / tick_s))
        row.due = row.request - lent
    spare = _raise([(row, row.due) for row in wanting], 1.0)
    spare = _raise(
        [(row, row.limit) for row in wanting if row.is_slo and (row.stretched > 1.0 or row.is_queued)], spare
    )
    spare = _raise([(row, row.claim) for row in wanting if row.is_slo], spare)
    part = ceiling if is_slo_wanting else 1.0
    spare = _raise([(row, min(row.claim, part * row.limit)) for row in wanting if not row.is_slo], spare)
    # What no tenant claims is there for one that turns out to want it, and an SLO tenant that leaves some of its grant
    # may have its limit beside the others: when it comes to use it, they are cut in the next tick.
    _raise([(row, part * row.limit) for row in wanting if not row.is_slo], spare)
    for row in wanting:
        if row.is_slo and row.claim < row.limit:
            row.rate = row.limit


def _raise(wanted: Sequence[tuple[_Row, float]], spare: float) -> float:
    """Raise rates towards what is wanted, in proportion to what each lacks if there is too little for all."""
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


def _is_all_done(rows: Sequence[_Row]) -> bool:
    """Whether no tenant that may wait has more than its request: no more can be done for an SLO tenant at its limit."""
    return all(row.is_slo or not row.is_wanting or row.rate <= row.request + _TINY for row in rows)


def _state(row: _Row, rows: Sequence[_Row], is_pressed: bool, ceiling: float) -> ShareState:
    """Name where a tenant's control stands (Dilu, Algorithm 2) and say why in `row.reason`."""
    if len(rows) == 1:
        row.reason = _ALONE
        return "NONE"
    if not row.is_wanting:
        row.reason = _PAUSED if row.num_unused_ticks else _IDLE
        return "RECOVERY"
    if row.is_slo and (row.stretched > 1.0 or row.is_queued):
        row.reason = _STRETCHED if row.stretched > 1.0 else _QUEUED
        return "EMERGENCY"
    if not row.is_slo and is_pressed:
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


def _remember(row: _Row, is_all_done: bool) -> TenantControl:
    is_hindered = row.is_slo and not (is_all_done and row.rate >= row.limit - _TINY)
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
