"""Leader election: one control plane holds a Lease and renews it; the others wait.

A lease elects, it does not exclude: the journal's term does that. What is promised here is the half that a holder can
keep by itself: it stops sending anything (`may_act`) before another process may think the lease free, also where it
slept through all of it. No wall clock counts, but how long a record has not changed on the clock of the process that
waits.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import AlreadyExists, KubeApiError, VersionConflict
from springtide.backends.kubernetes.client.kinds import LEASE, Key, Object
from springtide.core.errors import BackendError

_log = logging.getLogger(__name__)

# The fraction of the lease for which its holder acts after its last renewal; others wait for all of it.
ACTS_PART = 0.8
_RENEW_PART = 0.25
_LOOK_PART = 0.15
# Allowance for clocks of different speed, and for a call that is under way.
_RELEASED_LEASE_S = 1
Role = Literal["waiting", "leading", "over"]


def boot_s() -> float:
    """Seconds since the machine started, including those in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def identity_of_this_process() -> str:
    """A name unique to this process; another after a restart."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"


class Leadership:
    """One control plane's part in the election. `run` on the API thread; the rest from any thread.

    `on_acquired` is called once when it leads, `on_lost` once, with a sentence, when another process does; both on the
    API thread, and must not wait. After that it never leads again: a process that lost starts anew. `holder` is the
    leader as far as is known, `num_changes` how often that has changed since the Lease was made. `predecessor` is the
    identity of a process that is known to have ended: what it held is free at once.
    """

    def __init__(
        self,
        lease: Key,
        *,
        lease_s: float,
        identity: str = "",
        predecessor: str = "",
        on_acquired: Callable[[], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
        clock: Callable[[], float] = boot_s,
        labels: dict[str, str] | None = None,
        seed: int | None = None,
    ) -> None:
        assert lease_s >= 1.0, "a lease is counted in whole seconds"
        self.identity = identity or identity_of_this_process()
        self.predecessor = predecessor
        self.lease = lease
        self.lease_s = lease_s
        self.holder = ""
        self.num_changes = 0
        self.problem = ""
        self._on_acquired = on_acquired
        self._on_lost = on_lost
        self._clock = clock
        self._labels = labels or {}
        # Waiting processes must not all read at the same moment: without a seed each is seeded by its own name.
        self._rng = np.random.default_rng(zlib.crc32(self.identity.encode()) if seed is None else seed)
        self._lock = threading.Lock()
        self._role: Role = "waiting"
        self._acts_until_s = float("-inf")
        # The record of another holder when it last changed, and when that was noticed.
        self._seen: tuple[Any, ...] = ()
        self._seen_at_s = float("-inf")

    @property
    def is_leading(self) -> bool:
        return self._role == "leading"

    @property
    def is_suspended(self) -> bool:
        """Whether it was elected and may not act now, because it is not known whether the lease is still its own.

        It goes on trying to renew: where no process took the lease meanwhile, it acts again. An API server that is away
        for a while ends no control plane.
        """
        return self._role == "leading" and self._clock() >= self._acts_until_s

    def may_act(self) -> bool:
        """Whether a call sent now arrives before another process may lead. Checked before every write."""
        return self._role == "leading" and self._clock() < self._acts_until_s

    async def run(self, api: KubeApi) -> None:
        """Wait for the lease, hold it, and return when it is lost or given back."""
        while self._role == "waiting":
            if not await self._quietly(self._try_to_lead, api):
                await asyncio.sleep(self.lease_s * _LOOK_PART * float(self._rng.uniform(0.8, 1.2)))
        while self._role == "leading":
            await asyncio.sleep(self.lease_s * _RENEW_PART)
            if self._role == "leading":
                await self._quietly(self._renew, api)
            if self.is_suspended and not self.problem:
                self.problem = f"the lease could not be renewed for {ACTS_PART * self.lease_s:g} s"

    async def release(self, api: KubeApi) -> None:
        """Act no more, and let the next one lead at once. What was sent before must be over; raises nothing."""
        was_leading = self._role == "leading"
        self._role = "over"
        self._acts_until_s = float("-inf")
        if not was_leading:
            return

        async def give_back(api: KubeApi) -> bool:
            lease = await api.find(LEASE, self.lease.name, self.lease.namespace)
            if lease is not None and lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": _RELEASED_LEASE_S, "renewTime": _now()}
                await api.replace(LEASE, lease)
            return True

        await self._quietly(give_back, api)

    # --- waiting -----------------------------------------------------------------------------------------------------

    async def _try_to_lead(self, api: KubeApi) -> bool:
        lease = await api.find(LEASE, self.lease.name, self.lease.namespace)
        if lease is None:
            sent_s = self._clock()
            try:
                await api.create(LEASE, self._record(None), self.lease.namespace)
            except AlreadyExists:
                return False
            self._lead(sent_s)
            return True
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        self.holder = holder
        self.num_changes = int(spec.get("leaseTransitions") or 0)
        if holder not in ("", self.identity, self.predecessor) and not self._has_run_out(lease):
            return False
        # A write whose answer was lost may have made this process the holder: write again, and count from now.
        sent_s = self._clock()
        await api.replace(LEASE, self._record(lease))
        self._lead(sent_s)
        return True

    def _has_run_out(self, lease: Object) -> bool:
        """Whether the record has not changed, on this clock, for as long as its holder specified."""
        spec = lease["spec"]
        seen = (lease["metadata"].get("uid"), spec.get("holderIdentity"), spec.get("renewTime"))
        now_s = self._clock()
        if seen != self._seen:
            self._seen, self._seen_at_s = seen, now_s
            return False
        # The longer of this process's lease time and the duration that the holder wrote.
        return now_s - self._seen_at_s > max(self.lease_s, float(spec.get("leaseDurationSeconds") or 0))

    def _lead(self, sent_s: float) -> None:
        self._acts_until_s = sent_s + ACTS_PART * self.lease_s
        with self._lock:
            if self._role != "waiting":
                return
            self._role = "leading"
        self.holder = self.identity
        _log.info("%s leads now", self.identity)
        if self._on_acquired is not None:
            self._on_acquired()

    # --- leading -----------------------------------------------------------------------------------------------------

    async def _renew(self, api: KubeApi) -> bool:
        lease = await api.find(LEASE, self.lease.name, self.lease.namespace)
        if lease is None:
            # It was deleted: the first process that creates it holds it.
            sent_s = self._clock()
            await api.create(LEASE, self._record(None), self.lease.namespace)
        else:
            holder = (lease.get("spec") or {}).get("holderIdentity") or ""
            if holder != self.identity:
                self.holder = holder
                self._lose(f"another control plane has taken over: {holder or 'none yet'}")
                return False
            sent_s = self._clock()
            await api.replace(LEASE, self._record(lease))
        if self._role == "leading":
            self._acts_until_s = sent_s + ACTS_PART * self.lease_s
        return True

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._role != "leading":
                return
            self._role = "over"
        self._acts_until_s = float("-inf")
        _log.error("%s leads no more: %s", self.identity, reason)
        if self._on_lost is not None:
            self._on_lost(reason)

    # --- both --------------------------------------------------------------------------------------------------------

    async def _quietly(self, task: Callable[[KubeApi], Any], api: KubeApi) -> bool:
        """Run a task, for a fraction of the lease at most; False if the server does not answer or refuses for now."""
        try:
            # Not `wait_for`, which up to Python 3.11 swallows a cancellation that comes as the call ends.
            async with asyncio.timeout(self.lease_s * _RENEW_PART):
                done = bool(await task(api))
        except (VersionConflict, AlreadyExists):
            return False
        except TimeoutError:
            self.problem = f"the API server {api.server} does not answer in time"
            return False
        except (KubeApiError, BackendError) as error:
            if self.problem != str(error):
                _log.warning("the lease %s: %s", self.lease.name, error)
            self.problem = str(error)
            return False
        self.problem = ""
        return done

    def _record(self, lease: Object | None) -> Object:
        """The Lease with this process as its holder; written whole, at the version that was read."""
        now = _now()
        old = (lease or {}).get("spec") or {}
        is_ours = old.get("holderIdentity") == self.identity
        changes = int(old.get("leaseTransitions") or 0) + (not is_ours)
        self.num_changes = changes
        spec = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": int(-(-self.lease_s // 1)),
            "acquireTime": old.get("acquireTime", now) if is_ours else now,
            "renewTime": now,
            "leaseTransitions": changes,
        }
        if lease is not None:
            return {**lease, "spec": spec}
        return {
            "metadata": {"name": self.lease.name, "namespace": self.lease.namespace, "labels": self._labels},
            "spec": spec,
        }


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
