"""The composition root of the embedded platform: builds it from its parts and serves it on one loopback port."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry

import springtide
from springtide.backends.local import LocalExecutor
from springtide.backends.local.devices import discover_node, split_node
from springtide.control.journal.retention import Retention
from springtide.core.resources import Node, Pool
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.workload import MAX_UNFINISHED, WorkloadId
from springtide.service.api.application import build_api
from springtide.service.api.auth import load_or_create_token
from springtide.service.api.dashboard import dashboard_routes
from springtide.service.api.service_callers import identity_of
from springtide.service.api.sessions import SESSIONS_FILE, BrowserSessions
from springtide.service.assembly.function_settings import FunctionSettings
from springtide.service.assembly.functions import ServiceConnection, connect, node_of
from springtide.service.assembly.pool_settings import policy_with_pools, tide_of
from springtide.service.clock import PlatformClock
from springtide.service.crash_points import EventExecutor
from springtide.service.gateway.access_log import ACCESS_FILE, AccessLog
from springtide.service.gateway.application import Gateway
from springtide.service.gateway.routes import service_routes
from springtide.service.grpc.process import grpc_beside
from springtide.service.platform import Platform
from springtide.service.quotes.move_watch import MoveWatch
from springtide.service.quotes.moves import JobMoves
from springtide.service.quotes.quote import LiveQuotes
from springtide.service.secrets_keeper import SecretsKeeper
from springtide.service.server import CRASH_AT, LOOPBACK, bind, crash_point_of, lifespan_of, server_of, signals_end
from springtide.service.supervise import RESTARTED
from springtide.storage.files import make_private, write_durable

if TYPE_CHECKING:
    from springtide.backends.functions.executor import FunctionsExecutor

LOG = logging.getLogger("springtide")
# Approximate on-demand prices of clouds for a virtual core and for a data centre GPU.
USUAL_USD_PER_CPU_HOUR = 0.05
USUAL_USD_PER_GPU_HOUR = 2.50


class PlatformOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to run the embedded platform. `port` 0 takes a free port; `num_slots` None counts GPUs or cores.

    `usd_per_device_hour` None takes the usual price of the kind of device. `pools` is the number of slots that each
    pool owns; if empty, all slots form one node. `day_s` is the period of the tide; None: 24 hours. `functions` is the
    function service on which jobs may also run, `max_unfinished` how many workloads may be unfinished (0: any number).
    `grpc_port` answers gRPC there (0: a free port; None: no gRPC). `keep` says how long the journal keeps steps and
    ended jobs.
    """

    state_dir: Path
    num_slots: int | None = None
    policy: str = "springtide"
    port: int = 8787
    grpc_port: int | None = None
    usd_per_device_hour: float | None = None
    pools: Mapping[Pool, int] = {}
    day_s: float | None = None
    functions: FunctionSettings | None = None
    max_unfinished: int = MAX_UNFINISHED
    keep: Retention = Retention()


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `platform.json`, by which clients find a running platform. `grpc` is empty without gRPC."""

    pid: int
    url: str
    version: str
    grpc: str = ""


def serve(options: PlatformOptions) -> int:
    """Run the platform until a signal or a request ends it. Returns the process's exit code.

    Raises InvalidRequest (unknown policy), BackendError (another platform runs, port in use), JournalError.
    """
    make_private(options.state_dir)
    token = load_or_create_token(options.state_dir)
    crash_point = crash_point_of(os.environ.get(CRASH_AT, ""))
    machine = discover_node(options.num_slots)
    nodes = split_node(machine, options.pools) if options.pools else (machine,)
    listener = bind(options.port)
    executors = _Executors(options.state_dir, nodes, crash_point, options.functions)
    if options.functions is not None:
        nodes = (*nodes, node_of(options.functions))
    price = usual_price_usd(machine) if options.usd_per_device_hour is None else options.usd_per_device_hour
    platform = Platform(
        options.state_dir,
        policy_with_pools(options.policy, options.pools),
        nodes,
        executors.make_executor,
        crash_point,
        price,
        tide_of(options.day_s),
        function_status=executors.function_status,
        has_parameter_store=options.functions is not None and bool(options.functions.parameter_store),
        sharing=executors.sharing,
        restarted=os.environ.get(RESTARTED, ""),
        max_unfinished=options.max_unfinished,
        keep=options.keep,
    )
    if platform.restarted:
        LOG.warning("this control plane was started again: the one before %s", platform.restarted)
    keeper, registry = SecretsKeeper(platform), CollectorRegistry()
    gateway = Gateway(platform.post, registry=registry, access_log=AccessLog(options.state_dir / ACCESS_FILE))
    url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
    routes_of = partial(service_routes, identity_of=partial(identity_of, token=token, url=url))
    platform.subscribe(lambda seq, step, view: gateway.update(routes_of(view)))
    app = build_api(
        platform,
        token=token,
        extra_routes=[*gateway.routes(), *dashboard_routes()],
        registry=registry,
        function_paths=gateway.openapi_paths,
        lifespan=lifespan_of(gateway),
        first_answer_s=gateway.first_answer_s,
        admission_of=gateway.admission,
        sessions=BrowserSessions(options.state_dir / SESSIONS_FILE),
        note_refused=gateway.log,
    )
    server, grpc = server_of(app), grpc_beside(options.grpc_port, url)
    try:
        platform.start(on_stop=lambda: setattr(server, "should_exit", True))
        keeper.sweep()
        gateway.update(routes_of(platform.view()))
        _publish(options.state_dir, url, grpc.address)
        LOG.info("springtide %s is up at %s with %d devices", springtide.__version__, url, len(machine.devices))
        with signals_end(server), _moves_watched(platform, options.functions):
            server.run(sockets=[listener])
            platform.request_shutdown(stop_workers=True)
            platform.join(timeout_s=60.0)
            executors.close(stop_workers=platform.stop_workers)
    finally:
        listener.close()
        grpc.stop()
        executors.disconnect(ends_functions=platform.stop_workers)
        with contextlib.suppress(OSError):
            (options.state_dir / "platform.json").unlink(missing_ok=True)
    if platform.failure is not None:
        LOG.error("the control loop failed: %s", platform.failure)
    return int(platform.failure is not None)


def _publish(state_dir: Path, url: str, grpc: str) -> None:
    address = Address(pid=os.getpid(), url=url, version=springtide.__version__, grpc=grpc)
    write_durable(state_dir / "platform.json", msgspec.json.encode(address))


@contextlib.contextmanager
def _moves_watched(platform: Platform, functions: FunctionSettings | None) -> Iterator[None]:
    """While the platform runs, move jobs to functions whose deadlines are lost on machines, if it has functions."""
    if functions is None:
        yield
        return
    watch = MoveWatch(platform, JobMoves(platform, LiveQuotes(platform)))
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class _Executors:
    """Creates and closes the executors: that of this machine and, if configured, that of the function service."""

    def __init__(
        self,
        state_dir: Path,
        machines: Sequence[Node],
        crash_point: Callable[[str], None],
        functions: FunctionSettings | None,
    ) -> None:
        self._state_dir = state_dir
        self._machines = machines
        self._crash_point = crash_point
        self._settings = functions
        self._connection: ServiceConnection | None = None
        self._local: LocalExecutor | None = None
        self._functions: FunctionsExecutor | None = None

    def make_executor(self, clock: PlatformClock) -> EventExecutor:
        """Create the executor for the platform's loop. The platform holds the lock of the state directory by then."""
        self._local = LocalExecutor(self._state_dir, clock, nodes=self._machines, crash_point=self._crash_point)
        if self._settings is None:
            self._local.open()
            return self._local
        # Imported only if functions are configured, because other platforms do not need the libraries.
        from springtide.backends.functions.executor import FunctionsExecutor
        from springtide.service.executors import RoutedExecutor

        self._connection = connection = connect(self._settings, self._state_dir)
        self._local.open()
        self._functions = FunctionsExecutor(
            self._state_dir,
            clock,
            provider=connection.provider,
            node=connection.node,
            store_url=connection.store_url,
            parameter_host=connection.parameter_host,
        )
        self._functions.open()
        return RoutedExecutor(self._local, self._functions)

    def function_status(self, workload_id: WorkloadId) -> FunctionRunStatus | None:
        """Which functions run a job; None for a job on machines."""
        return None if self._functions is None else self._functions.status(workload_id)

    def sharing(self) -> SharingStatus:
        """Which workloads share which device of this machine, and what enforces it."""
        return SharingStatus() if self._local is None else self._local.sharing()

    def close(self, *, stop_workers: bool) -> None:
        """Close the executors. Workers and functions keep running unless `stop_workers`."""
        if self._functions is not None:
            self._functions.close(stop_workers=stop_workers)
        if self._local is not None:
            self._local.close(stop_workers=stop_workers)

    def disconnect(self, *, ends_functions: bool) -> None:
        """Disconnect from the function service; with `ends_functions` an emulator ends with its functions."""
        if self._connection is not None:
            self._connection.end(ends_functions)


def usual_price_usd(node: Node) -> float:
    """The usual price of one hour of one of the node's devices, in US dollars."""
    has_gpus = any(device.kind == "gpu" for device in node.devices)
    return USUAL_USD_PER_GPU_HOUR if has_gpus else USUAL_USD_PER_CPU_HOUR
