"""Replicas as pods: addresses, storage fences, and how the end of a pod becomes an event."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from springtide.backends.control_channel.members import Job, MemberPhase, Replica, Source
from springtide.backends.control_channel.reactor import FramedConnection, Reactor
from springtide.backends.control_channel.replica_table import ReplicaTable
from springtide.backends.control_channel.reports import hash_token
from springtide.backends.inbox import Inbox
from springtide.backends.kubernetes.pods.reading import Reading
from springtide.backends.kubernetes.pods.spec import NUM_RENDEZVOUS_PORTS, RENDEZVOUS_PORT
from springtide.backends.kubernetes.pods.state import PodState
from springtide.backends.kubernetes.pods.table import PodTable
from springtide.core.actions import ResizeJob, StartReplica
from springtide.core.errors import BackendError, SpringtideError
from springtide.core.resources import NodeId
from springtide.core.tokens import group_key, replica_token, workload_key
from springtide.core.wire.workers import Hello, Report
from springtide.core.workload import WorkloadId

_log = logging.getLogger(__name__)

CRASH_POINTS = tuple(
    f"executor.{effect}.{moment}"
    for effect in ("create", "order", "fence", "kill", "acknowledge")
    for moment in ("before", "after")
)
_FENCE_RETRY_S = 1.0
_NOWHERE = NodeId("")
_KILL_GRACE_S = 1.0


@dataclass(eq=False)
class PodHandle:
    """A replica's pod, None before it is ordered. `external_end`: why it was ended from outside, else empty.

    `was_refused`: it ended before its container was started. `told_hold` is the reason of the last StartHeldUp that was
    posted of it, at `told_at_s` (empty: it is not held up; None: not known, an earlier control plane may have posted).
    """

    pod: PodState | None = None
    node_id: NodeId = _NOWHERE
    external_end: str = ""
    end: str = ""
    # None before its worker's first Hello.
    proves_keys: bool | None = None
    was_refused: bool = False
    told_hold: str | None = ""
    told_at_s: float = 0.0

    @property
    def exists(self) -> bool:
        """Whether its pod was ordered and is not over."""
        return self.pod is not None and not self.pod.is_over


PodReplica = Replica[PodHandle]


class PodDriver:
    """The driver of KubernetesExecutor, with its table. Runs on the I/O thread, except `raise_fence`.

    `raise_fence` raises the storage fence of a job; it blocks, so it runs on `pool`.
    """

    # The pod holds the device, not the replica, so the loss is reported at once and the other members continue.
    death_s = 0.0

    def __init__(
        self,
        state_dir: Path,
        reactor: Reactor,
        inbox: Inbox[Source],
        crash_point: Callable[[str], None],
        *,
        pods: PodTable,
        master_key: bytes,
        raise_fence: Callable[[WorkloadId, int], None],
        pool: ThreadPoolExecutor,
    ) -> None:
        self.table: ReplicaTable[PodHandle] = ReplicaTable(state_dir, reactor, inbox, crash_point, self)
        self.pods = pods
        self.on_room: Callable[[PodState], None] = lambda pod: None
        self.on_early: Callable[[PodReplica], None] = lambda replica: None
        self.on_running: Callable[[PodState], None] = lambda pod: None
        self.on_job_gone: Callable[[WorkloadId], None] = lambda workload_id: None
        self._master_key = master_key
        self._raise_fence = raise_fence
        self._pool = pool
        self._fencing: dict[WorkloadId, int] = {}
        pods.on_change = self._on_change
        pods.on_over = self._on_over

    def make_replica(self, action: StartReplica) -> PodReplica:
        """Add a replica to the table."""
        key = workload_key(self._master_key, action.workload_id)
        return self.table.enter(
            Replica(
                handle=PodHandle(),
                replica_id=action.replica_id,
                workload_id=action.workload_id,
                generation=action.generation,
                action=action,
                work_dir=self.table.work_dir(action.workload_id),
                log_path=self.table.log_path(action.workload_id, action.replica_id),
                token_sha256=hash_token(replica_token(key, action.replica_id)),
                born_at_s=time.monotonic(),
                ordered_at_s=time.monotonic(),
            )
        )

    def fresh_job(self, workload_id: WorkloadId, generation: int) -> Job:
        """Replace the state of a job that starts again, as `generation`."""
        job = self.table.jobs[workload_id] = Job(workload_id, self.table.work_dir(workload_id), generation=generation)
        return job

    def is_fencing(self, workload_id: WorkloadId) -> bool:
        """Whether the storage fence of a job is being raised."""
        return workload_id in self._fencing

    # --- the port ReplicaDriver --------------------------------------------------------------------------------------

    def is_own(self, replica: PodReplica, hello: Hello, connection: FramedConnection[Report]) -> bool:
        """Always: the token is proof enough."""
        return True

    def take_hello(self, replica: PodReplica, hello: Hello, connection: FramedConnection[Report]) -> None:
        """Record the pod's address. If the replica is still queued, an earlier control plane created the pod."""
        replica.host = connection.peer_host or replica.host
        replica.handle.proves_keys = hello.proves_keys
        if replica.phase is MemberPhase.QUEUED:
            self.on_early(replica)

    def own_address(self, replica: PodReplica, address: str) -> str:
        """The address if it is its own pod's: a replica must not choose where the gateway connects to."""
        host = urlsplit(address).hostname or ""
        known = (replica.host, replica.handle.pod.address if replica.handle.pod is not None else "")
        if host and host in known:
            return address
        self.table.counts["strange_addresses"] += bool(address)
        return ""

    def owns_path(self, replica: PodReplica, path: str) -> bool:
        """Whether a key of the object store belongs to the replica's workload."""
        return path.startswith(f"workloads/{replica.workload_id}/") and ".." not in path.split("/")

    def rendezvous(self, job: Job, action: ResizeJob, *, is_script: bool) -> str:
        """A port of the pod of rank 0, which hosts the rendezvous. Raises BackendError while its address is unknown."""
        first = self.table.replicas.get(action.replica_ids[0])
        host = "" if first is None else (first.handle.pod.address if first.handle.pod is not None else "") or first.host
        if not host:
            raise BackendError(f"the address of {action.replica_ids[0]}'s pod is not known yet")
        port = RENDEZVOUS_PORT + action.generation % NUM_RENDEZVOUS_PORTS
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def group_key(self, job: Job, action: ResizeJob) -> str:
        """A key of this generation alone; none if a member's worker is of an earlier version, which knows no keys.

        Raises BackendError while a member has not connected: after a restart the same key must be found again.
        """
        members = [self.table.replicas[name] for name in action.replica_ids if name in self.table.replicas]
        for member in members:
            if member.handle.proves_keys is None:
                raise BackendError(f"{member.replica_id} has not connected yet")
        if not all(member.handle.proves_keys for member in members):
            return ""
        return group_key(workload_key(self._master_key, job.job_id), action.generation)

    def fence_storage(self, job: Job, generation: int, then: Callable[[], None]) -> bool:
        """Raise the fence in the object store, on another thread."""
        if job.fenced >= generation:
            return True
        if self._fencing.get(job.job_id, -1) >= generation:
            # It is being raised already.
            return False
        self._fencing[job.job_id] = generation
        self.table.crash_point("executor.fence.before")
        self._pool.submit(self._fence, job, generation, then)
        return False

    def knows_exit_codes(self, replica: PodReplica) -> bool:
        """Never: the exit code of a pod is known together with its end."""
        return False

    def describe_end(self, replica: PodReplica) -> str:
        """Why its pod was ended from outside, else the reason that the pod's status gives."""
        return replica.handle.external_end or replica.handle.end or "the worker ended without a word"

    def was_ended_externally(self, replica: PodReplica) -> bool:
        """Whether the pod was deleted or evicted from outside, or turned away by its node."""
        return bool(replica.handle.external_end) or replica.handle.was_refused

    def was_refused(self, replica: PodReplica) -> bool:
        """Whether its kubelet turned the pod away, or it could not be bound."""
        return replica.handle.was_refused

    def release(self, replica: PodReplica) -> None:
        """Nothing to do: PodTable watches pods."""

    def forget(self, replica: PodReplica) -> None:
        """Nothing to do: the pod stays in PodTable until its end is in the journal."""

    def forget_job(self, job: Job) -> None:
        """Pass it on: groups of pods have no files."""
        self.on_job_gone(job.job_id)

    def signal(self, replica: PodReplica, number: int) -> None:
        """Delete the pod; SIGTERM leaves it the rest of its grace period."""
        assert replica.handle.pod is not None, "only an existing pod is signalled"
        grace_s = _KILL_GRACE_S
        if number == signal.SIGTERM and replica.kill_at_s is not None:
            grace_s = max(grace_s, replica.kill_at_s - time.monotonic())
        self.pods.delete(replica.handle.pod, grace_s)

    def exit_code(self, replica: PodReplica) -> int | None:
        """The exit code in the container's status."""
        return replica.handle.pod.exit_code if replica.handle.pod is not None else None

    # --- changes of pods ---------------------------------------------------------------------------------------------

    def _replica_of(self, pod: PodState) -> PodReplica | None:
        replica = self.table.replicas.get(pod.replica_id)
        return replica if replica is not None and replica.handle.pod is pod else None

    def _on_change(self, pod: PodState, reading: Reading) -> None:
        replica = self._replica_of(pod)
        if replica is None:
            return
        if reading.is_running:
            self.on_running(pod)
        if (
            reading.is_ending
            and pod.requested_grace_s is None
            and not (replica.handle.external_end or replica.asked_to_stop)
        ):
            self._note_external_end(replica, reading.external_end)

    def _note_external_end(self, replica: PodReplica, reason: str) -> None:
        """A pod is being ended from outside: its worker saves and leaves, and the others go on without it at once."""
        replica.handle.external_end = reason
        self.table.counts["taken"] += 1
        others = [
            other
            for other in self.table.of_workload(replica.workload_id)
            if other is not replica
            and not (other.handle.external_end or other.asked_to_stop or other.has_exited or other.lost_reason)
            and other.group_generation > 0
        ]
        if replica.is_job and replica.group_generation > 0 and others and not replica.is_script:
            self.table.lose(replica, reason)

    def _on_over(self, pod: PodState) -> None:
        replica = self._replica_of(pod)
        if replica is not None:
            replica.handle.end, replica.handle.was_refused = pod.end, pod.was_refused
            if pod.seen is not None and not replica.asked_to_stop:
                replica.handle.external_end = replica.handle.external_end or pod.seen.external_end
            self.table.note_exit(replica, pod.exit_code)
        elif pod.replica_id not in self.table.replicas:
            # The replica's end was reported already, or the pod never had one.
            self.table.counts["late_ends"] += 1
        self.on_room(pod)

    # --- the fence ---------------------------------------------------------------------------------------------------

    def _fence(self, job: Job, generation: int, then: Callable[[], None]) -> None:
        """On the pool: raise the fence; retried until that succeeds."""
        try:
            self._raise_fence(job.job_id, generation)
        except SpringtideError as error:
            _log.error("older writers of %s could not be fenced off: %s", job.job_id, error)
            self.table.reactor.call(lambda: self._fence_again(job, generation, then))
            return
        self.table.reactor.call(lambda: self._fenced(job, generation, then))

    def _fence_again(self, job: Job, generation: int, then: Callable[[], None]) -> None:
        self.table.counts["fence_errors"] += 1
        if self._fencing.get(job.job_id) != generation:
            return
        if job.has_ended:
            del self._fencing[job.job_id]
            return
        self.table.reactor.after(_FENCE_RETRY_S, lambda: self._resubmit(job, generation, then))

    def _resubmit(self, job: Job, generation: int, then: Callable[[], None]) -> None:
        if self._fencing.get(job.job_id) == generation:
            self._pool.submit(self._fence, job, generation, then)

    def _fenced(self, job: Job, generation: int, then: Callable[[], None]) -> None:
        self.table.crash_point("executor.fence.after")
        job.fenced = max(job.fenced, generation)
        if self._fencing.get(job.job_id, -1) <= generation:
            self._fencing.pop(job.job_id, None)
        then()
