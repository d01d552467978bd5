"""KubernetesExecutor: the Executor port on the pods of a cluster.

It has two threads. The I/O thread owns the table of replicas and their connections, and decides; the API thread
creates, binds, labels and deletes objects. A caller of `start` waits for neither.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace

from springtide.backends.control_channel.listener import WorkerListener
from springtide.backends.control_channel.members import Source
from springtide.backends.control_channel.orders import OrderTable
from springtide.backends.control_channel.reactor import FramedConnection, Reactor
from springtide.backends.control_channel.reports import Reports
from springtide.backends.inbox import Inbox
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import QuotaExceeded
from springtide.backends.kubernetes.client.kinds import POD
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.nodes.registry import NodeTable
from springtide.backends.kubernetes.pods.driver import PodDriver, PodHandle, PodReplica
from springtide.backends.kubernetes.pods.holds import StartHolds
from springtide.backends.kubernetes.pods.launcher import PodLauncher
from springtide.backends.kubernetes.pods.logs import PodLogs
from springtide.backends.kubernetes.pods.machines import PodMachines
from springtide.backends.kubernetes.pods.making import MakingWatch
from springtide.backends.kubernetes.pods.quota import NamespaceQuota
from springtide.backends.kubernetes.pods.reading import trim_pod
from springtide.backends.kubernetes.pods.recovery import PodRecovery
from springtide.backends.kubernetes.pods.shares import SHARE_ANNOTATION, pod_sharing, share_text
from springtide.backends.kubernetes.pods.spec import label_value
from springtide.backends.kubernetes.pods.table import PodTable
from springtide.backends.kubernetes.pods.watch import PodWatch
from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.backends.sockets import listen_tcp
from springtide.core.actions import Action, SetShare
from springtide.core.errors import SpringtideError
from springtide.core.events import Event, NodeJoined, NodeLost, ReplicaLost, ReplicaStopped
from springtide.core.ports import Clock, Standing
from springtide.core.resources import Node
from springtide.core.status.pods import ClusterStatus, PodStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.wire.workers import Report
from springtide.core.workload import Checkpoint, ReplicaId, TrainingJob, WorkloadId
from springtide.storage.files import make_private
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.workloads.store import WorkloadStore

_log = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 30.0
# How long a restart waits for the newest checkpoints from the object store.
_HEADS_S = 15.0
_POLL_S = 0.02
# Storage fences that are raised at once; each is two requests to the object store.
_FENCES_AT_ONCE = 16


class KubernetesExecutor:
    """Runs replicas as pods. `open`, then `recover` or `start`, then `wait` and `acknowledge`; finally `close`.

    `api_thread` is open, and stays so after `close`. `store` is the object store at `settings.store_url`, `term` the
    number of this leadership. Workers connect to `listen_host` at `settings.control_port`. Every method is thread-safe
    and none but `wait`, `open` and `close` blocks. `crash_point` is called with each name of pods.CRASH_POINTS around
    the effects. `on_superseded` is called on the I/O thread once pods show a later term.
    """

    def __init__(
        self,
        state_dir: Path,
        clock: Clock,
        *,
        settings: KubernetesSettings,
        api_thread: ApiThread,
        store: CheckedStore,
        master_key: bytes,
        term: int,
        crash_point: Callable[[str], None] | None = None,
        on_superseded: Callable[[int], None] = lambda term: None,
        listen_host: str = "0.0.0.0",
        credentials: Mapping[str, str] | None = None,
    ) -> None:
        self._state_dir = state_dir.resolve()
        self._inbox: Inbox[Source] = Inbox(clock)
        self._settings = settings
        self._api = api_thread
        self._store = store
        self._master_key = master_key
        self._term = term
        self._crash_point = crash_point or (lambda name: None)
        self._listen_host = listen_host
        self._credentials = os.environ if credentials is None else credentials
        self.on_superseded = on_superseded
        self._thread: threading.Thread | None = None
        self._is_accepting = False
        self._is_recovering = False
        self._is_closing = False
        self._waiting: list[Action] = []
        self._failure = ""

    def open(self) -> None:
        """Listen for workers and list nodes and pods. Raises BackendError."""
        assert self._thread is None, "an executor is opened once"
        settings = self._settings
        make_private(self._state_dir)
        server = listen_tcp(self._listen_host, settings.control_port)
        try:
            self._reactor = Reactor()
            self._listener = WorkerListener(self._reactor, server, self._welcome)
            self._pool = ThreadPoolExecutor(max_workers=_FENCES_AT_ONCE, thread_name_prefix="springtide-fence")
            platform = label_value(settings.name)
            self._pod_cache = self._api.cache(
                POD,
                namespaces=settings.namespaces or ("",),
                labels=f"{names.PLATFORM_LABEL}={platform},{names.REPLICA_LABEL}",
                trim=trim_pod,
            )
            self._machines = PodMachines(self._pod_cache, settings)
            self._nodes = NodeTable(self._api, settings, held=self._machines.held, post=self._post_of_node)
            self._api.sync(SYNC_TIMEOUT_S)
        except BaseException:
            server.close()
            raise
        self._build(platform)
        self._thread = threading.Thread(target=self._reactor.run, name="springtide-executor", daemon=True)
        self._thread.start()

    def _build(self, platform: str) -> None:
        settings = self._settings
        self._pods = PodTable(self._api, self._pod_cache, self._reactor, platform, self._term)
        self._driver = PodDriver(
            self._state_dir,
            self._reactor,
            self._inbox,
            self._crash_point,
            pods=self._pods,
            master_key=self._master_key,
            raise_fence=self._raise_fence,
            pool=self._pool,
        )
        self._table = self._driver.table
        self._quota = NamespaceQuota(self._reactor, self._table, self._inbox.post, self._probe)
        self._launcher = PodLauncher(
            self._driver, self._nodes, settings, self._term, self._master_key, self._credentials, self._quota
        )
        self._orders: OrderTable[PodHandle] = OrderTable(
            self._table, self._launcher.start, self._set_share, self._nodes.label
        )
        self._reports: Reports[PodHandle] = Reports(self._table, self._orders.send_missed, self._launcher.pump)
        self._orders.reports = self._reports
        self._recovery = PodRecovery(self._driver, self._launcher, self._orders)
        self._watch = PodWatch(self._table, settings.worker_lost_after_s)
        self._holds = StartHolds(self._table, lambda replica: self._launcher.reasons.get(replica.replica_id, ""))
        self._making = MakingWatch(self._pods, self._api, self._reactor)
        self._logs = PodLogs(
            self._api,
            lambda pod: self._table.log_path(pod.workload_id, pod.replica_id),
            lambda pod: self._reactor.call(lambda: self._pods.note_logged(pod)),
        )
        self._machines.join(self._table, self._pods, self._nodes, self._api)
        self._driver.on_running = self._logs.follow
        self._table.on_gone = self._on_gone
        self._driver.on_job_gone = self._on_job_gone
        self._pods.on_left = self._logs.forget
        self._pods.on_higher_term = lambda term: self.on_superseded(term)
        self._reactor.on_late = self._watch.reset_silence
        for watch in (self._watch, self._holds, self._making):
            self._reactor.call(watch.start)

    def close(self, stop_workers: bool = False, *, grace_s: float = 5.0) -> None:
        """End the executor and release its thread, connections and port; the API thread stays.

        With `stop_workers`, training workers commit a checkpoint and everything ends within `grace_s`; otherwise all
        workers live on and wait for the next executor, for `settings.worker_lease_s`.
        """
        if self._thread is None:
            return
        if stop_workers and self._thread.is_alive():
            have_orders_been_sent = threading.Event()
            self._reactor.call(lambda: self._orders.stop_all(grace_s))
            self._reactor.call(have_orders_been_sent.set)
            end_s = time.monotonic() + grace_s + 5.0
            have_orders_been_sent.wait(grace_s)
            while self._table.replicas and time.monotonic() < end_s:
                time.sleep(_POLL_S)
        self._inbox.close()
        self._reactor.call(self._disconnect)
        self._reactor.stop()
        self._thread.join()
        self._thread = None
        self._reactor.close()
        self._listener.close()
        self._logs.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are offered."""
        return self._nodes.nodes()

    def post(self, event: Event) -> None:
        """Hand over an event from outside (the API, the gateway); `wait` returns at once."""
        self._inbox.post(event)

    def recover(self, standing: Standing) -> None:
        """Adopt the workers that should run, report those that are gone, end the others, repeat unconfirmed actions."""
        self._reactor.call(lambda: self._begin_recovery(standing))

    def start(self, action: Action) -> None:
        """Start an action; its outcome is reported as an event. Repeating an action is harmless."""

        def begin() -> None:
            if self._is_accepting:
                self._orders.do(action)
                return
            self._waiting.append(action)
            if not self._is_recovering:
                # `recover` was not called, so no pod should be running: those found are ended.
                self._begin_recovery(Standing())

        self._reactor.call(begin)

    def wait(self, deadline_s: float | None) -> Sequence[Event]:
        """Return as soon as something happened, or nothing at the deadline (platform clock) or once closed."""
        return self._inbox.wait(deadline_s)

    def acknowledge(self, events: Sequence[Event]) -> None:
        """The events are in the journal: acknowledge the reports that they came from, and delete ended pods."""
        sources = self._inbox.take_sources(events)
        ended = [event.replica_id for event in events if isinstance(event, ReplicaLost | ReplicaStopped)]
        if sources:
            self._reactor.call(lambda: self._table.settle(sources))
        if ended:
            self._reactor.call(lambda: self._note_journaled(ended))

    def sharing(self) -> SharingStatus:
        """How devices are shared now, and by which mechanism that is enforced."""
        actions = [] if self._thread is None else [r.action for r in list(self._table.replicas.values())]
        holders = [
            (action.workload_id, action.replica_id, action.device_id, action.share)
            for action in actions
            if action is not None and action.share is not None
        ]
        return pod_sharing(holders, self._settings)

    def quota_caps(self) -> dict[WorkloadId, int]:
        """The jobs whose size is limited by quota now, and their largest number of workers."""
        return {} if self._thread is None else self._quota.caps()

    def counts(self) -> dict[str, int]:
        """Counters by name: creates, adopted, lost, taken, refused_hellos, repeated_reports and so on."""
        return {
            **self._table.counts,
            "callback_errors": self._reactor.num_errors,
            "unnamed_pods": self._pods.num_unnamed,
        }

    def status(self) -> ClusterStatus:
        """The status of the connection to the cluster and of all pods. Thread-safe."""
        pods = [self._status_of(replica) for replica in list(self._table.replicas.values())]
        problem = self._failure or self._api.problem
        if self._pods.is_superseded:
            problem = "another control plane has taken over; this one writes nothing any more"
        return ClusterStatus(
            server=self._api.api.server,
            term=self._term,
            num_nodes=len(self._nodes.nodes()),
            num_pods=len(self._pods.pods),
            watch_age_s=self._api.heard_age_s,
            pending_writes=self._api.num_pending,
            problem=problem,
            pods=tuple(pods),
        )

    # --- on the I/O thread -------------------------------------------------------------------------------------------

    def _begin_recovery(self, standing: Standing) -> None:
        if self._is_accepting or self._is_recovering:
            return
        self._is_recovering = True
        if not standing.replicas:
            self._take_over(standing, {})
            return
        jobs = {start.workload_id for start in standing.replicas if isinstance(start.workload, TrainingJob)}

        def read() -> None:
            heads: dict[WorkloadId, Checkpoint] = {}
            try:
                for job_id in sorted(jobs):
                    for checkpoint in WorkloadStore(self._store, job_id).checkpoints()[:1]:
                        heads[job_id] = checkpoint
            except SpringtideError as error:
                _log.error("the newest checkpoints could not be read: %s", error)
            self._reactor.call(lambda: self._take_over(standing, heads))

        self._pool.submit(read)
        self._reactor.after(_HEADS_S, lambda: self._take_over(standing, {}))

    def _take_over(self, standing: Standing, checkpoints: Mapping[WorkloadId, Checkpoint]) -> None:
        if self._is_accepting or self._is_closing or self._failure:
            return
        try:
            self._recovery.recover(standing, checkpoints)
        except Exception as error:
            # Running pods that were not adopted would be deleted as strays: fail instead and change nothing.
            self._failure = f"the pods could not be taken over: {error}"
            raise
        self._is_accepting = True
        self._pods.open()
        self._nodes.begin(standing.labels)
        self._machines.start()
        self._listener.open()
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self._orders.do(action)

    def _note_journaled(self, ended: Sequence[ReplicaId]) -> None:
        for replica_id in ended:
            self._pods.note_journaled(replica_id)

    def _welcome(self, stream: socket.socket) -> None:
        connection: FramedConnection[Report] = FramedConnection(
            self._reactor, stream, Report, self._reports.on_message, self._reports.on_close
        )
        self._reports.register(connection)

    def _on_gone(self, replica: PodReplica) -> None:
        self._reports.on_gone(replica)
        self._launcher.reasons.pop(replica.replica_id, None)
        self._nodes.compare_soon()

    def _on_job_gone(self, workload_id: WorkloadId) -> None:
        self._quota.forget(workload_id)
        self._launcher.forget_job(workload_id)

    def _post_of_node(self, event: NodeJoined | NodeLost) -> None:
        """On the API thread."""
        self._inbox.post(event)
        if isinstance(event, NodeLost):
            self._reactor.call(lambda: self._machines.lose(event.node_id))

    def _raise_fence(self, workload_id: WorkloadId, generation: int) -> None:
        """On the pool."""
        WorkloadStore(self._store, workload_id).raise_fence(generation)

    def _set_share(self, action: SetShare) -> None:
        replica = self._table.replicas.get(action.replica_id)
        if replica is None or replica.action is None:
            self._table.counts["stale_actions"] += 1
            return
        if replica.action.share == action.share:
            self._table.counts["repeated_actions"] += 1
            return
        replica.action = replace(replica.action, share=action.share)
        if replica.handle.pod is not None:
            self._pods.annotate(replica.handle.pod, {SHARE_ANNOTATION: share_text(action.share)})

    def _disconnect(self) -> None:
        self._is_accepting = True
        self._is_closing = True
        self._listener.shut()
        self._pods.close()
        self._table.disconnect_all()
        self._reports.close()

    # --- through the API server --------------------------------------------------------------------------------------

    def _probe(self, replica: PodReplica, told: Callable[[bool], None]) -> None:
        """Find out by a dry run whether quota allows a pod like this replica's now."""
        pod = self._launcher.pod_like(replica)
        if pod is None:
            return

        async def would_do(api: KubeApi) -> bool:
            try:
                await api.create(POD, pod, dry_run=True)
            except QuotaExceeded:
                return False
            return True

        # A refusal for any other reason is reported for the pod itself.
        self._api.write(
            ("probe", replica.workload_id),
            would_do,
            done=lambda has_room: self._reactor.call(lambda: told(bool(has_room))),
            failed=lambda error: self._reactor.call(lambda: told(True)),
            is_still_wanted=self._pods.may_write,
        )

    def _status_of(self, replica: PodReplica) -> PodStatus:
        pod, now_s = replica.handle.pod, time.monotonic()
        reason = self._launcher.reasons.get(replica.replica_id, "")
        if pod is not None:
            reason = replica.handle.external_end or pod.reason
        key = pod.key if pod is not None else self._launcher.key_of(replica)
        return PodStatus(
            workload_id=replica.workload_id,
            replica_id=replica.replica_id,
            namespace=key.namespace,
            pod=key.name,
            node_id=pod.node_id if pod is not None else replica.handle.node_id,
            phase=pod.phase if pod is not None else "waiting",
            reason=reason,
            address=pod.address if pod is not None else "",
            since_s=now_s - (pod.since_s if pod is not None else replica.born_at_s),
        )
