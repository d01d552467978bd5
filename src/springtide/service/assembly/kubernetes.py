"""The composition root of a platform on Kubernetes: waits until it is elected, then builds all parts and serves.

    Lease -> term of the journal -> function service, where there is one -> executor (caches, workers' port)
          -> platform (journal replayed, pods and functions adopted) -> reconciler of objects -> API and gateway

A process that loses the Lease or the journal's term exits at once with the code SUPERSEDED. It cleans up nothing,
because its successor is already working.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry

import springtide
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.kinds import POD, Key
from springtide.backends.kubernetes.client.leases import Leadership
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.executor import KubernetesExecutor
from springtide.backends.kubernetes.install.manifests import ACTIVE_LABEL
from springtide.backends.kubernetes.settings import MANAGED_BY_LABEL, PLATFORM_LABEL, KubernetesSettings
from springtide.control.journal.journal import DurableJournal, open_journal
from springtide.control.journal.retention import retention_of
from springtide.core.decision import Overheads
from springtide.core.errors import BackendError, InvalidRequest, JournalError, Superseded
from springtide.core.status.pods import ClusterStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.tokens import gateway_token, workload_key
from springtide.core.workload import WorkloadId
from springtide.service.api.application import build_api
from springtide.service.api.dashboard import dashboard_routes
from springtide.service.api.service_callers import identity_of
from springtide.service.api.sessions import SESSIONS_FILE, BrowserSessions
from springtide.service.assembly.cluster_secrets import api_token, master_key, token_secret
from springtide.service.assembly.kubernetes_functions import ClusterFunctions
from springtide.service.assembly.local import USUAL_USD_PER_CPU_HOUR, USUAL_USD_PER_GPU_HOUR, Address
from springtide.service.assembly.pool_settings import STRATEGY, tide_of
from springtide.service.clock import PlatformClock
from springtide.service.crash_points import EventExecutor
from springtide.service.gateway.access_log import AccessLog
from springtide.service.gateway.application import Gateway
from springtide.service.gateway.routes import service_routes
from springtide.service.platform import Platform, PlatformBuild, PlatformView
from springtide.service.reconciler.controller import ResourceReconciler
from springtide.service.server import CRASH_AT, LOOPBACK, bind, crash_point_of, lifespan_of, server_of, signals_end
from springtide.service.standby import Standby
from springtide.service.submission.source_stores import ObjectSources
from springtide.storage.files import lock_file, make_private, write_durable
from springtide.storage.stores.open import open_store

LOG = logging.getLogger("springtide.kubernetes")
T = TypeVar("T")
# The label that tells the pods of one platform's control plane from those of another.
INSTANCE_LABEL = "app.kubernetes.io/instance"

# The exit code of a control plane whose platform another one has taken over.
SUPERSEDED = 3
# Used until changes have been measured: the time from the order to the first step, in which the pod is created, bound
# and started and the worker imports its code and builds the model.
KUBERNETES_OVERHEADS = Overheads(change_s=6.0)
_RETRY_S = 1.0
_LOCK_FILE = "control-plane.lock"
_LEADER_FILE = "leader"
_REASONS_AGE_S = 1.0


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a control plane. Without `kubeconfig`, KUBECONFIG or the pod's service account is used.

    `host` is the address to listen at. `state_dir` holds copies that may be lost; it also holds the journal unless the
    settings name another one.
    """

    settings: KubernetesSettings
    state_dir: Path
    kubeconfig: Path | None = None
    host: str = "0.0.0.0"


def serve_on_kubernetes(options: ClusterOptions) -> int:
    """Run a control plane until a signal ends it. Returns the process's exit code: 0, 1 failed, 3 superseded.

    Raises InvalidRequest (settings), BackendError (cluster out of reach, port in use), StorageError.
    """
    if not options.settings.store_url:
        raise InvalidRequest("store_url must name the object store that pods and control plane share, like s3://BUCKET")
    make_private(options.state_dir)
    crash_point = crash_point_of(os.environ.get(CRASH_AT, ""))
    held = lock_file(
        options.state_dir / _LOCK_FILE,
        f"another control plane runs on {options.state_dir}; give each a state directory of its own: --state DIR",
    )
    try:
        listener = bind(options.settings.port, options.host)
        try:
            return _ControlPlane(options, listener, crash_point).run()
        finally:
            listener.close()
    finally:
        os.close(held)


class _ControlPlane:
    def __init__(self, options: ClusterOptions, listener: socket.socket, crash_point: Callable[[str], None]) -> None:
        self._options = options
        # The address at which pods reach this process: the configured one, else that of its own pod.
        advertise = options.settings.advertise or os.environ.get("POD_IP") or socket.gethostname()
        self._settings = msgspec.structs.replace(options.settings, advertise=advertise)
        self._listener = listener
        self._crash_point = crash_point
        # Set when this process is elected or asked to end.
        self._wake = threading.Event()
        self._is_asked_to_end = threading.Event()
        settings = options.settings
        self._leadership = Leadership(
            Key(settings.namespace, settings.name),
            lease_s=settings.lease_s,
            on_acquired=self._wake.set,
            on_lost=_exit_now,
            labels={MANAGED_BY_LABEL: "springtide", PLATFORM_LABEL: settings.name},
            # The directory's lock is free, so its last leader has ended: take the Lease over without waiting.
            predecessor=_read_leader(options.state_dir),
        )
        self._thread = ApiThread(lambda: KubeApi.connect(options.kubeconfig), may_write=self._leadership.may_act)
        self._executor: KubernetesExecutor | None = None
        self._reasons: Mapping[WorkloadId, str] = {}
        self._reasons_at_s = float("-inf")

    def run(self) -> int:
        """Wait for the election, lead, and release the Lease at the end. Returns the exit code."""
        self._thread.open()
        standby = Standby(self._listener, self._role, lambda: self._leadership.holder)
        try:
            with self._handle_signals():
                standby.start()
                self._retry(lambda: self._thread.call(self._unlabel_pod))
                self._thread.run(self._leadership.run).add_done_callback(_exit_if_failed)
                LOG.info("%s stands by", self._leadership.identity)
                self._wake.wait()
                if self._is_asked_to_end.is_set():
                    return 0
                return self._lead(standby)
        finally:
            standby.stop()
            with contextlib.suppress(BackendError):
                self._thread.call(self._leadership.release, timeout_s=5.0)
            self._thread.close()

    def _watch_term(self, journal: DurableJournal) -> None:
        """While the API server cannot be reached, check in the journal that no other process leads."""
        while not self._is_asked_to_end.wait(self._settings.lease_s):
            if not self._leadership.is_suspended:
                continue
            try:
                journal.check()
            except Superseded as error:
                _exit_now(str(error))
            except JournalError as error:
                LOG.warning("cut off from the API server, and from the journal: %s", error)

    def _role(self) -> str:
        return "starting" if self._leadership.is_leading else "standby"

    # --- leading -----------------------------------------------------------------------------------------------------

    def _lead(self, standby: Standby) -> int:
        settings = self._settings
        write_durable(self._options.state_dir / _LEADER_FILE, self._leadership.identity.encode(), mode=0o600)
        key = self._retry(lambda: self._thread.call(lambda api: master_key(api, settings)))
        token = self._retry(lambda: self._thread.call(lambda api: api_token(api, settings)))
        journal = self._retry(self._take_term)
        functions = self._retry(lambda: ClusterFunctions.connect(settings, self._options.state_dir, os.environ))
        if key is None or token is None or journal is None or functions is None:
            return 0
        LOG.info("%s leads in term %d", self._leadership.identity, journal.term)
        platform = self._make_platform(journal, key, functions)
        registry = CollectorRegistry()
        gateway = Gateway(platform.post, registry=registry, access_log=AccessLog(None))

        url = f"http://{settings.advertise}:{self._listener.getsockname()[1]}"

        def update(view: PlatformView) -> None:
            gateway.update(
                service_routes(
                    view,
                    token_of=lambda service_id: gateway_token(workload_key(key, service_id)),
                    waits_of=self._waiting_reason,
                    identity_of=partial(identity_of, token=token, url=url),
                )
            )

        platform.subscribe(lambda seq, step, view: update(view))
        reconciler = ResourceReconciler(
            platform,
            self._thread,
            settings,
            cluster_status=self._status,
            quota_caps=self._quota_caps,
        )
        app = build_api(
            platform,
            token=token,
            submissions=reconciler.submissions,
            extra_routes=[*gateway.routes(), *dashboard_routes()],
            registry=registry,
            function_paths=gateway.openapi_paths,
            lifespan=lifespan_of(gateway),
            first_answer_s=gateway.first_answer_s,
            admission_of=gateway.admission,
            sessions=BrowserSessions(self._options.state_dir / SESSIONS_FILE),
            note_refused=gateway.log,
            token_place=f"the Secret {settings.namespace}/{token_secret(settings)}",
        )
        server = server_of(app)
        platform.start(on_stop=lambda: setattr(server, "should_exit", True))
        update(platform.view())
        reconciler.start()
        threading.Thread(target=self._watch_term, args=(journal,), name="springtide-term", daemon=True).start()
        try:
            return self._serve(platform, reconciler, server, token, standby)
        finally:
            functions.close(stop_workers=platform.stop_workers)

    def _take_term(self) -> DurableJournal:
        """Take the journal over. Raises BackendError if the Lease has expired since the election."""
        if not self._leadership.may_act():
            raise BackendError("the lease has to be renewed before the journal is taken over")
        return open_journal(self._settings.journal_url, self._options.state_dir, holder=self._leadership.identity)

    def _make_platform(self, journal: DurableJournal, key: bytes, functions: ClusterFunctions) -> Platform:
        settings, state_dir = self._settings, self._options.state_dir
        store = open_store(settings.store_url)

        def make_executor(clock: PlatformClock) -> EventExecutor:
            self._executor = executor = KubernetesExecutor(
                state_dir,
                clock,
                settings=settings,
                api_thread=self._thread,
                store=store,
                master_key=key,
                term=journal.term,
                crash_point=self._crash_point,
                on_superseded=lambda term: _exit_now(f"pods bear the later term {term}, this is {journal.term}"),
            )
            executor.open()
            return functions.combined_with(executor, state_dir, clock, journal.term)

        def nodes() -> Any:
            assert self._executor is not None
            return self._executor.nodes()

        policy = settings.policy
        if settings.pools and "/" not in policy:
            policy = f"{STRATEGY}/{policy}"
        usual = USUAL_USD_PER_GPU_HOUR if settings.device_kind == "gpu" else USUAL_USD_PER_CPU_HOUR
        price = usual if settings.usd_per_device_hour is None else settings.usd_per_device_hour
        return Platform(
            state_dir,
            policy,
            functions.nodes,
            make_executor,
            self._crash_point,
            price,
            tide_of(settings.day_s),
            function_status=functions.status,
            has_parameter_store=functions.has_parameter_store,
            sharing=self._sharing,
            max_unfinished=settings.max_unfinished,
            keep=retention_of(settings.journal_retention, settings.keep_ended),
            build=PlatformBuild(
                journal=journal,
                source_store=ObjectSources(store, state_dir),
                nodes=nodes,
                store_url=settings.store_url,
                overheads=KUBERNETES_OVERHEADS,
                learns_overheads=True,
                cluster=self._cluster,
                on_superseded=lambda error: _exit_now(str(error)),
            ),
        )

    def _serve(
        self, platform: Platform, reconciler: ResourceReconciler, server: uvicorn.Server, token: str, standby: Standby
    ) -> int:
        state_dir = self._options.state_dir
        port = self._listener.getsockname()[1]
        url = f"http://{LOOPBACK}:{port}"
        # Commands on the same machine find the platform by these files.
        write_durable(state_dir / "token", token.encode() + b"\n", mode=0o600)
        address = Address(pid=os.getpid(), url=url, version=springtide.__version__)
        write_durable(state_dir / "platform.json", msgspec.json.encode(address))
        standby.stop()
        try:
            with signals_end(server):
                if self._is_asked_to_end.is_set():
                    server.should_exit = True
                self._thread.write(ACTIVE_LABEL, self._label_pod, failed=_log_label_failure)
                LOG.info(
                    "springtide %s is up on port %d with %d nodes", springtide.__version__, port, self._num_nodes()
                )
                # Each garbage collection stops all threads. Objects that exist now mostly stay, so they are frozen:
                # later collections do not scan them.
                gc.collect()
                gc.freeze()
                server.run(sockets=[self._listener.dup()])
            self._is_asked_to_end.set()
            reconciler.stop()
            # Workers keep running for the next leader. Only `springtide down` stops them.
            platform.request_shutdown(stop_workers=False)
            platform.join(timeout_s=60.0)
            assert self._executor is not None
            self._executor.close(stop_workers=platform.stop_workers)
        finally:
            (state_dir / "platform.json").unlink(missing_ok=True)
        if platform.failure is not None:
            LOG.error("the control loop failed: %s", platform.failure)
            return SUPERSEDED if isinstance(platform.failure, Superseded) else 1
        return 0

    # --- status ------------------------------------------------------------------------------------------------------

    def _status(self) -> ClusterStatus:
        assert self._executor is not None
        status, lead = self._executor.status(), self._leadership
        return msgspec.structs.replace(status, leader=lead.holder, problem=status.problem or lead.problem)

    def _cluster(self) -> ClusterStatus | None:
        return None if self._executor is None else self._status()

    def _quota_caps(self) -> Mapping[WorkloadId, int]:
        return {} if self._executor is None else self._executor.quota_caps()

    def _sharing(self) -> SharingStatus:
        return SharingStatus() if self._executor is None else self._executor.sharing()

    def _num_nodes(self) -> int:
        return 0 if self._executor is None else len(self._executor.nodes())

    def _waiting_reason(self, service_id: WorkloadId) -> str:
        """Why the pods of a service do not start; empty if they do or the reason is not known.

        Called on the loop's thread for each service after each step, so the reasons of all pods are cached for a while.
        """
        now_s = time.monotonic()
        if self._executor is not None and now_s - self._reasons_at_s > _REASONS_AGE_S:
            self._reasons_at_s = now_s
            self._reasons = {pod.workload_id: pod.reason for pod in self._executor.status().pods if pod.reason}
        return self._reasons.get(service_id, "")

    # --- the pod of this control plane -------------------------------------------------------------------------------

    async def _label_pod(self, api: KubeApi) -> None:
        """Label this pod and no other, so that the platform's Service selects it."""
        own = os.environ.get("POD_NAME", "")
        if not own:
            return
        namespace = self._settings.namespace
        listing = await api.list(POD, namespace, labels=f"{ACTIVE_LABEL}=true,{INSTANCE_LABEL}={self._settings.name}")
        for pod in listing.items:
            if pod["metadata"]["name"] != own:
                await api.patch(POD, pod["metadata"]["name"], _active_label(None), namespace)
        await api.patch(POD, own, _active_label("true"), namespace)

    async def _unlabel_pod(self, api: KubeApi) -> None:
        """Remove the label that an earlier process of this pod may have set: only the leader has it."""
        own = os.environ.get("POD_NAME", "")
        if own:
            await api.patch(POD, own, _active_label(None), self._settings.namespace)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _retry(self, task: Callable[[], T]) -> T | None:
        """Retry until the task succeeds; None if the process is asked to end. InvalidRequest is not retried."""
        last_error = ""
        while not self._is_asked_to_end.is_set():
            try:
                return task()
            except InvalidRequest:
                raise
            except (BackendError, JournalError) as error:
                if str(error) != last_error:
                    LOG.warning("not yet: %s", error)
                last_error = str(error)
            self._is_asked_to_end.wait(_RETRY_S)
        return None

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Make SIGTERM and SIGINT end the waiting. While the platform is served, the server handles them."""

        def end(*_: object) -> None:
            self._is_asked_to_end.set()
            self._wake.set()

        names = (signal.SIGTERM, signal.SIGINT)
        before = {name: signal.signal(name, end) for name in names}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)


def _read_leader(state_dir: Path) -> str:
    """The identity of the last leader that used this directory; empty if there was none."""
    try:
        return (state_dir / _LEADER_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _exit_now(reason: str, code: int = SUPERSEDED) -> None:
    """End this process at once, without waiting for its other threads."""
    LOG.error("this control plane ends: %s", reason)
    logging.shutdown()
    os._exit(code)


def _exit_if_failed(election: Future[None]) -> None:
    """End the process if the election failed: it could never lead, but a restarted one may."""
    if not election.cancelled() and election.exception() is not None:
        _exit_now(f"its election failed: {election.exception()}", code=1)


def _log_label_failure(error: BackendError) -> None:
    LOG.error("the platform's Service does not lead here: %s", error)


def _active_label(value: str | None) -> dict[str, Any]:
    return {"metadata": {"labels": {ACTIVE_LABEL: value}}}
