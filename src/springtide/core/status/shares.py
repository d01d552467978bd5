"""Status of shared devices as users see it: which workload is granted how much, and what enforces it."""

from __future__ import annotations

from typing import Literal

import msgspec

# Where the control of a tenant stands (Dilu, Algorithm 2).
ShareState = Literal["NONE", "RECOVERY", "CONTENTION", "EMERGENCY"]


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica or worker on a shared device. All rates are fractions of the device.

    `granted` is what it may use at this moment, `used` what it has used over the last second. `throttled_s` is how
    long it was held back since it started. `reason` is a sentence.

    On a GPU, since it started: `num_launches` of kernels and graphs, `num_open` of them let through because its
    limit was not known, and `num_denied` allocations refused because of its memory limit; `memory_used_mb` is
    what it has allocated now.
    """

    workload_id: str
    replica_id: str
    device_id: str
    request: float
    limit: float
    memory_mb: int = 0
    granted: float = 0.0
    used: float = 0.0
    state: ShareState = "NONE"
    throttled_s: float = 0.0
    reason: str = ""
    num_launches: int = 0
    num_open: int = 0
    num_denied: int = 0
    memory_used_mb: int = 0


class SharingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How this platform shares devices now.

    `mechanism` names what enforces shares (`cgroup-v2`, `cgroup-v1`, `signals`, `cuda-preload`, `mps`, `pod-limits`,
    `none`), `enforced` says in one sentence what that enforces and what it does not. `device_cpus` is how many CPU
    cores make one device. A turn of the control is due every `tick_s`; `late_p99_s` is how late recent turns were,
    `reaction_p99_s` how long a new grant took from its decision until it was in force.
    """

    mechanism: str = "none"
    enforced: str = "no device is shared"
    device_cpus: float = 0.0
    tick_s: float = 0.0
    late_p99_s: float = 0.0
    reaction_p99_s: float = 0.0
    tenants: tuple[TenantStatus, ...] = ()
