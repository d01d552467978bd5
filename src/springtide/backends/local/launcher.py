"""Starting workers: a token, a durable record, then a request to the zygote or a command; a few at a time."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.control_channel.reports import hash_token
from springtide.backends.local.devices import VISIBLE_VARIABLE
from springtide.backends.local.driver import ProcessDriver
from springtide.backends.local.members import Worker
from springtide.backends.local.shares.slots import ShareSlots
from springtide.backends.local.zygote import ZygoteClient
from springtide.backends.processes import identify, signal_group, spawn_detached, worker_environment
from springtide.core.actions import StartReplica
from springtide.core.errors import BackendError, StorageError
from springtide.core.resources import DeviceId, DeviceKind, Node
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import ReplicaId
from springtide.storage.files import make_private, write_durable

MAX_SPAWNS_AT_ONCE = 8
# A spawned worker that has not connected after this no longer counts against MAX_SPAWNS_AT_ONCE.
_ROOM_TIMEOUT_S = 10.0
_MAX_ATTEMPTS = 3


class WorkerLauncher:
    """Turns a StartReplica into a process. Runs on the I/O thread; either `zygote` or `command` is used."""

    def __init__(
        self,
        driver: ProcessDriver,
        nodes: Sequence[Node],
        control_address: str,
        lease_s: float,
        *,
        command: Sequence[str] | None,
        in_environment: Sequence[str],
        shares: ShareSlots,
    ) -> None:
        """`in_environment` starts a worker whose workload has packages of its own."""
        self._driver = driver
        self._table = driver.table
        self._shares = shares
        devices = [device for node in nodes for device in node.devices]
        self._kinds: Mapping[str, DeviceKind] = {device.device_id: device.kind for device in devices}
        # Devices are numbered as the driver numbers them, however the machine is divided into nodes.
        self._numbers: Mapping[str, int] = {device.device_id: number for number, device in enumerate(devices)}
        self._num_threads = max(1, (os.cpu_count() or 1) // max(1, len(devices)))
        self._control_address = control_address
        self._lease_s = lease_s
        self._command = command
        self._in_environment = in_environment
        self.zygote: ZygoteClient | None = None
        self._queue: deque[Worker] = deque()
        self._attempts: dict[ReplicaId, int] = {}
        self._pids: dict[ReplicaId, int] = {}

    def start(self, action: StartReplica) -> None:
        """Start one worker, unless it has existed before. Raises StorageError."""
        table = self._table
        if table.has_existed(action.replica_id):
            table.counts["repeated_actions"] += 1
            return
        self._raise_fence(action)
        replica = self._driver.make_replica(action, "")
        replica.ordered_at_s = time.monotonic()
        self._queue.append(replica)
        self.pump()

    def pump(self) -> None:
        """Spawn queued workers, at most MAX_SPAWNS_AT_ONCE at a time."""
        now_s = time.monotonic()
        num_busy = sum(
            replica.phase is MemberPhase.SPAWNING and now_s - replica.born_at_s < _ROOM_TIMEOUT_S
            for replica in self._table.replicas.values()
        )
        while self._queue and num_busy < MAX_SPAWNS_AT_ONCE:
            replica = self._queue.popleft()
            if replica.phase is MemberPhase.QUEUED:
                self._spawn(replica)
                num_busy += 1

    def spawned(self, replica_id: ReplicaId, pid: int) -> None:
        """The zygote has forked a worker."""
        replica = self._table.replicas.get(replica_id)
        if replica is None:
            self.stray(replica_id, pid)
            return
        self._attempts.pop(replica_id, None)
        self._pids[replica_id] = pid
        if replica.handle.identity is None:
            self._driver.attach_process(replica, identify(pid))
            self._write_record(replica)
        self._table.crash_point("executor.spawn.after")
        if replica.asked_to_stop and replica.phase is MemberPhase.SPAWNING:
            self._table.kill(replica)

    def stray(self, replica_id: ReplicaId, pid: int) -> None:
        """The zygote has forked a worker that is no longer wanted; end it, since nothing else would."""
        replica = self._table.replicas.get(replica_id)
        if replica is not None and replica.handle.identity is not None and replica.handle.identity.pid == pid:
            return
        identity = identify(pid)
        if identity is not None:
            self._table.counts["strays"] += 1
            signal_group(identity, signal.SIGKILL)

    def exited(self, replica_id: ReplicaId, pid: int, exit_code: int) -> None:
        """The zygote has reaped a worker."""
        replica = self._table.replicas.get(replica_id)
        if replica is None:
            return
        # The process may be an earlier one of the same replica, requested by an earlier control plane: ignore its end.
        known = replica.handle.identity.pid if replica.handle.identity is not None else self._pids.get(replica_id)
        if pid == known:
            self._table.note_exit(replica, exit_code)

    def failed(self, replica_id: ReplicaId, reason: str) -> None:
        """The worker could not be started."""
        replica = self._table.replicas.get(replica_id)
        if replica is not None and replica.handle.identity is None:
            self._abandon(replica, reason)

    def request_lost(self, replica_id: ReplicaId) -> None:
        """A zygote died with the request: repeat it with a new token, which the first worker, if any, does not have."""
        replica = self._table.replicas.get(replica_id)
        if replica is None or replica.handle.identity is not None or replica.phase is not MemberPhase.SPAWNING:
            return
        self._attempts[replica_id] = self._attempts.get(replica_id, 0) + 1
        if replica.asked_to_stop or self._attempts[replica_id] >= _MAX_ATTEMPTS:
            self._abandon(replica, "the process that starts workers died three times on it")
            return
        replica.phase = MemberPhase.QUEUED
        self._queue.append(replica)
        self.pump()

    def release(self, replica: Worker) -> None:
        """The replica is gone: spawn the next queued one."""
        self._attempts.pop(replica.replica_id, None)
        self._pids.pop(replica.replica_id, None)
        if self.zygote is not None:
            self.zygote.withdraw(replica.replica_id)
        self.pump()

    def knows_exit_codes(self, replica: Worker) -> bool:
        """Whether the zygote will still report this worker's exit code."""
        is_born = replica.handle.identity is not None or replica.replica_id in self._pids
        return self.zygote is not None and self.zygote.is_connected and is_born

    def _abandon(self, replica: Worker, reason: str) -> None:
        """Report a worker's end: it has no process and will get none."""
        if replica.asked_to_stop:
            self._table.note_exit(replica)
        else:
            self._table.lose(replica, reason)

    def _raise_fence(self, action: StartReplica) -> None:
        """On a fresh start of a job, prevent workers of older generations from writing."""
        table = self._table
        job = table.jobs.get(action.workload_id)
        known = job.generation if job is not None else 0
        is_fresh = action.generation > known and not table.of_workload(action.workload_id)
        work_dir = table.work_dir(action.workload_id)
        make_private(work_dir)
        if is_fresh:
            # The state of the job's last group is obsolete.
            table.jobs.pop(action.workload_id, None)
        if is_fresh and action.generation > 0:
            self._driver.raise_fence(work_dir, action.generation)

    def _spawn(self, replica: Worker) -> None:
        table = self._table
        token = secrets.token_hex(32)
        replica.token_sha256 = hash_token(token)
        replica.phase = MemberPhase.SPAWNING
        replica.born_at_s = time.monotonic()
        try:
            make_private(replica.log_path.parent)
            slot = self._shares.slot_of(replica)
            self._driver.write_record(replica)
            spec = self._make_spec(replica, token, slot)
            table.crash_point("executor.spawn.before")
            table.counts["spawns"] += 1
            command = self._command
            if spec.workload.packages is not None:
                # It makes the environment if need be and becomes a worker in it: the zygote has other packages.
                command = self._in_environment
            if command is None:
                assert self.zygote is not None
                self.zygote.spawn(spec)
                return
            path = self._driver.records.spec_path(replica.replica_id)
            write_durable(path, msgspec.json.encode(spec))
            command = [*command, "--spec", str(path)]
            pid = spawn_detached(command, worker_environment() | spec.environment, replica.log_path)
        except (BackendError, StorageError, OSError) as error:
            table.lose(replica, f"the worker could not be started: {error}")
            return
        table.crash_point("executor.spawn.after")
        self._driver.attach_process(replica, identify(pid))
        self._write_record(replica)

    def _write_record(self, replica: Worker) -> None:
        if replica.phase is MemberPhase.GONE:
            return
        try:
            self._driver.write_record(replica)
        except StorageError:
            # The worker runs and is watched; but a restarted control plane could not identify its process.
            self._table.counts["record_errors"] += 1

    def _make_spec(self, replica: Worker, token: str, slot: tuple[str, int]) -> WorkerSpec:
        action = replica.action
        assert action is not None, "a foreigner is never spawned"
        index, num_devices = self._numbers.get(action.device_id, 0), len(action.device_ids)
        kind = self._kinds.get(action.device_id, "cpu")
        # A share of a CPU device is at most one core: more threads would only exhaust it sooner and wait longer.
        num_threads = num_devices * (self._num_threads if action.share is None or kind == "gpu" else 1)
        environment = {"OMP_NUM_THREADS": str(num_threads)}
        if kind == "gpu":
            # The worker sees only its own devices, which are numbered from 0 in its world.
            environment[VISIBLE_VARIABLE] = ",".join([self._visible_as(each) for each in action.device_ids])
            environment |= self._shares.gpu.additions
            index = 0
        return WorkerSpec(
            workload=action.workload,
            replica_id=action.replica_id,
            generation=action.generation,
            control_address=self._control_address,
            token=token,
            work_dir=str(replica.work_dir),
            log_path=str(replica.log_path),
            device_index=index,
            device_kind="gpu" if kind == "gpu" else "cpu",
            num_devices=num_devices,
            num_threads=num_threads,
            restore=action.restore,
            lease_s=self._lease_s,
            environment=environment,
            share=action.share,
            share_path=slot[0],
            share_slot=slot[1],
            ordered_at_s=replica.ordered_at_s,
        )

    def _visible_as(self, device_id: DeviceId) -> str:
        gpu = self._shares.gpu_of(device_id)
        return str(self._numbers.get(device_id, 0)) if gpu is None else gpu.visible_as
