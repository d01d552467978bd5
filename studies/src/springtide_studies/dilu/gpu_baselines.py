"""Ways to share a modelled GPU: none, time slices, MPS, TGS, FaST-GS, Dilu's daemon as published, and ours.

They are models of mechanisms after their papers, not the systems themselves; what each leaves out is said beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from springtide.serving.share_control import DeviceControl, Grant, Tenant, control_tick
from springtide_studies.dilu.gpu_execution import TICK_S, KernelObservation, SharingArm
from springtide_studies.dilu.gpu_execution_work import ModelledTenant


class NoControl:
    """All tenants launch what they like and kernels run side by side: MPS without bounds."""

    name = "none"
    tick_s = 0.0
    counts_blocks = False
    kernel_factor = 1.0

    def __init__(self, tenants: Sequence[ModelledTenant]) -> None:
        self.tenants = tenants

    def cap(self, tenant: ModelledTenant) -> float:
        """Return 1: no bound."""
        return 1.0

    def tick(self, seen: Mapping[str, KernelObservation], tick_s: float) -> Mapping[str, float]:
        """No tenant is held back."""
        return dict.fromkeys(seen, math.inf)


class TimeSlices(NoControl):
    """What a GPU does without MPS: only one process at a time, turn by turn in slices of two milliseconds."""

    name = "time-slices"
    tick_s = 0.002

    def __init__(self, tenants: Sequence[ModelledTenant]) -> None:
        super().__init__(tenants)
        self._last = -1

    def tick(self, seen: Mapping[str, KernelObservation], tick_s: float) -> Mapping[str, float]:
        """Give the whole slice to the next tenant in turn that has work."""
        num_tenants = len(self.tenants)
        budgets = dict.fromkeys(seen, 0.0)
        for offset in range(1, num_tenants + 1):
            place = (self._last + offset) % num_tenants
            tenant_id = self.tenants[place].tenant_id
            observation = seen[tenant_id].observation
            if observation.iteration_s > 0.0 or observation.num_queued > 0:
                self._last = place
                budgets[tenant_id] = self.tick_s
                return budgets
        return dict.fromkeys(seen, self.tick_s)


class Mps(NoControl):
    """MPS with a fixed fraction of the SMs for each process: its limit (MPS-l) or its request (MPS-r)."""

    def __init__(self, tenants: Sequence[ModelledTenant], by: Literal["limit", "request"]) -> None:
        super().__init__(tenants)
        self.by = by
        self.name = "mps-l" if by == "limit" else "mps-r"

    def cap(self, tenant: ModelledTenant) -> float:
        """Return the fixed fraction."""
        return tenant.share.limit if self.by == "limit" else tenant.share.request


class Tgs(NoControl):
    """TGS: one productive tenant launches freely, the others at a rate that is raised until it gets slower.

    After the paper (NSDI 2023, section 4.2), with our constants: every 100 ms the rate of the others grows by a
    hundredth of the device if the productive tenant's launches are within 5 % of their best lately, else it halves.
    The best fades by 1 % each time. The productive tenant is the first SLO tenant, or the first of all.
    """

    name = "tgs"
    tick_s = TICK_S
    _EVERY_TICKS = 20
    _STEP = 0.01
    _LEAST = 0.002

    def __init__(self, tenants: Sequence[ModelledTenant]) -> None:
        super().__init__(tenants)
        self._productive = next((tenant for tenant in tenants if tenant.is_slo), tenants[0]).tenant_id
        self._rate = self._STEP
        self._best = self._launched = 0.0
        self._num_ticks = 0

    def tick(self, seen: Mapping[str, KernelObservation], tick_s: float) -> Mapping[str, float]:
        """Return no bound for the productive tenant and the same rate for each of the others."""
        self._launched += seen[self._productive].num_blocks
        self._num_ticks += 1
        if self._num_ticks % self._EVERY_TICKS == 0:
            self._best = max(0.99 * self._best, self._launched)
            if self._launched >= 0.95 * self._best:
                self._rate = min(1.0, self._rate + self._STEP)
            else:
                self._rate = max(self._LEAST, 0.5 * self._rate)
            self._launched = 0.0
        return {
            tenant_id: math.inf if tenant_id == self._productive else self._rate * self.tick_s for tenant_id in seen
        }


class FastGsArm(Mps):
    """FaST-GS: MPS at limits, and turns in time for those whose fractions do not fit side by side.

    After FaST-GShare (ICPP 2023): in each window of 100 ms the tenant furthest behind its request goes first; events
    that time every kernel cost a twentieth of it (both constants are ours).
    """

    kernel_factor = 1.05
    tick_s = TICK_S
    _WINDOW_TICKS = 20

    def __init__(self, tenants: Sequence[ModelledTenant]) -> None:
        super().__init__(tenants, "limit")
        self.name = "fast-gs"
        self._behind_s = dict.fromkeys((tenant.tenant_id for tenant in tenants), 0.0)
        self._num_ticks = 0

    def tick(self, seen: Mapping[str, KernelObservation], tick_s: float) -> Mapping[str, float]:
        """Let those launch whose fractions fit, the one furthest behind first."""
        wanting = []
        self._num_ticks += 1
        if self._num_ticks % self._WINDOW_TICKS == 0:
            self._behind_s = dict.fromkeys(self._behind_s, 0.0)
        for tenant in self.tenants:
            observation = seen[tenant.tenant_id].observation
            behind_s = self._behind_s[tenant.tenant_id]
            behind_s += (tenant.share.request - observation.used_fraction) * tick_s
            # A tenant without work accumulates no claim.
            is_wanting = observation.iteration_s > 0.0 or observation.num_queued > 0
            self._behind_s[tenant.tenant_id] = behind_s if is_wanting else min(0.0, behind_s)
            if is_wanting:
                wanting.append(tenant)
        budgets = dict.fromkeys(seen, math.inf)
        left = 1.0
        for tenant in sorted(wanting, key=lambda tenant: -self._behind_s[tenant.tenant_id]):
            if tenant.share.limit <= left + 1e-9:
                left -= tenant.share.limit
            else:
                budgets[tenant.tenant_id] = 0.0
        return budgets


class _KernelRuns:
    """What Dilu's daemon knows of one SLO task: for how many ticks in a row it launched, and the shortest such run."""

    def __init__(self) -> None:
        self.num_zeros = 0
        self.was_active = False
        self.current = 0
        self.shortest = self.longest = 0
        self.num_runs = 0


class PublishedDaemon(NoControl):
    """Dilu's RCKM as published: block counts, runs of ticks in place of launch cycles, one state for all devices.

    Its behaviour after reading and measuring the artifact (one commit): a run counts only when it ends in a tick
    without launches, becomes a reference only above 6 ticks, and trouble is a run of 1.6 to 4 times the reference. A
    token is a block, with 10,000,000 of them a tick to be shared out. A tenant that is no LLM.
    """

    name = "rckm"
    tick_s = TICK_S
    counts_blocks = True
    _UPPER = 10_000_000.0
    _FLOOR = 0.01
    _HISTORY = 20

    def __init__(self, tenants: Sequence[ModelledTenant]) -> None:
        super().__init__(tenants)
        self._runs = {tenant.tenant_id: _KernelRuns() for tenant in tenants if tenant.is_slo}
        waiting = [tenant.share for tenant in tenants if not tenant.is_slo]
        self._requests = sum(share.request for share in waiting)
        self._limits = sum(share.limit for share in waiting)
        self._conservative = 1_000_000.0
        self._for_waiting = self._UPPER
        self._last_waiting = 0.0

    def tick(self, seen: Mapping[str, KernelObservation], tick_s: float) -> Mapping[str, float]:
        """Return tokens in blocks."""
        budgets = {}
        for tenant in self.tenants:
            if tenant.is_slo:
                budgets[tenant.tenant_id] = self._tick_slo(tenant, seen[tenant.tenant_id].num_blocks)
            else:
                self._last_waiting = seen[tenant.tenant_id].num_blocks + 1.0
                budgets[tenant.tenant_id] = self._for_waiting * tenant.share.request / self._requests
        return budgets

    def _tick_slo(self, tenant: ModelledTenant, num_blocks: float) -> float:
        runs = self._runs[tenant.tenant_id]
        if num_blocks > 0:
            runs.num_zeros = runs.num_zeros if runs.was_active else 0
            runs.current += 1
        else:
            if runs.was_active:
                self._run_ended(runs)
            runs.num_zeros += 1
        runs.was_active = num_blocks > 0
        is_any_active, are_all_idle = False, True
        for other in self._runs.values():
            if other.num_zeros <= 10:
                is_any_active = True
            elif other.num_zeros <= 120:
                are_all_idle = False
                break
        if runs.num_zeros <= 100:
            self._for_waiting = self._conservative * self._requests
        elif are_all_idle:
            self._conservative = self._UPPER
            self._for_waiting = self._UPPER * self._limits
        is_held = self._last_waiting > 1.0 or is_any_active
        return self._UPPER * (tenant.share.request if is_held else tenant.share.limit)

    def _run_ended(self, runs: _KernelRuns) -> None:
        if runs.current > runs.longest:
            runs.longest = runs.current
            if not runs.shortest and runs.current > 6:
                runs.shortest = runs.current
        if runs.shortest > runs.current > 6:
            runs.shortest = runs.current
        runs.num_runs = (runs.num_runs + 1) % self._HISTORY
        ratio = runs.current / runs.shortest if runs.shortest else 0.0
        if 1.6 <= ratio < 4.0:
            floor = self._UPPER * self._requests * self._FLOOR
            self._conservative = max(floor, float(int(self._conservative / ratio)))
        elif ratio < 1.2 and runs.num_runs % 5 == 0:
            self._conservative = min(self._UPPER, float(int(1.3 * self._conservative)))
        runs.current = 0


class Controlled(NoControl):
    """Our control: the function that the daemon on real machines calls too."""

    name = "springtide"
    tick_s = TICK_S

    def __init__(self, tenants: Sequence[ModelledTenant]) -> None:
        super().__init__(tenants)
        self._tenants = [
            Tenant(tenant_id=tenant.tenant_id, share=tenant.share, is_slo=tenant.is_slo) for tenant in tenants
        ]
        self._device = DeviceControl()
        self.grants: Mapping[str, Grant] = {}

    def tick(self, seen: Mapping[str, KernelObservation], tick_s: float) -> Mapping[str, float]:
        """Return device time by the grants of the control."""
        observations = {tenant_id: each.observation for tenant_id, each in seen.items()}
        self._device, self.grants = control_tick(self._device, self._tenants, observations, tick_s)
        return {tenant_id: grant.rate * self.tick_s for tenant_id, grant in self.grants.items()}


def arms_for(tenants: Sequence[ModelledTenant]) -> tuple[SharingArm, ...]:
    """Return a fresh arm of every kind that shares one device (Exclusive is each tenant alone under NoControl)."""
    return (
        NoControl(tenants),
        TimeSlices(tenants),
        Mps(tenants, "limit"),
        Mps(tenants, "request"),
        Tgs(tenants),
        FastGsArm(tenants),
        PublishedDaemon(tenants),
        Controlled(tenants),
    )
