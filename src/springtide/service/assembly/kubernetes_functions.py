"""The function service of a platform on Kubernetes: its settings, its node, and the executor of its jobs.

Jobs on functions have no pods. Their coordinators are threads of the leading control plane. They keep their state in
the object store (backends/functions/shell/fence.py), so that the next leader can continue on any node.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.errors import InvalidRequest, InvalidSetting, SpringtideError
from springtide.core.resources import Node
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.workload import WorkloadId
from springtide.service.assembly.function_settings import FunctionSettings, shown_address
from springtide.service.clock import PlatformClock
from springtide.service.crash_points import EventExecutor
from springtide.service.executors import PostingExecutor
from springtide.storage.stores.probe import probe_store

if TYPE_CHECKING:
    from springtide.backends.functions.executor import FunctionsExecutor
    from springtide.service.assembly.functions import ServiceConnection

LOG = logging.getLogger("springtide.kubernetes")
# A key of the Secret `store_secret`, which also holds the keys of the object store.
REDIS_PASSWORD = "REDIS_PASSWORD"


def function_settings(settings: KubernetesSettings, environment: Mapping[str, str]) -> FunctionSettings | None:
    """Convert the cluster's settings to those of a function service; None if no provider is configured."""
    given = settings.functions
    if not given.provider:
        return None
    return FunctionSettings(
        provider=given.provider,
        store=settings.store_url,
        parameter_store=_with_password(given.parameter_store, environment.get(REDIS_PASSWORD, "")),
        region=given.region,
        role=given.role,
        image=given.image,
        endpoint=given.endpoint,
        name=settings.name,
        concurrency=given.concurrency or None,
        places=given.places,
    )


class ClusterFunctions:
    """The function service of one control plane while it leads. Without a service everything is empty."""

    def __init__(self, connection: ServiceConnection | None) -> None:
        self._connection = connection
        self._executor: FunctionsExecutor | None = None

    @classmethod
    def connect(cls, settings: KubernetesSettings, state_dir: Path, environment: Mapping[str, str]) -> ClusterFunctions:
        """Connect to the service. Nothing is deployed before the first job.

        A store that does not answer is only logged, because jobs in pods do not need it. Raises InvalidRequest for
        wrong settings, BackendError for an emulator that does not run yet.
        """
        given = function_settings(settings, environment)
        if given is None:
            return cls(None)
        from springtide.service.assembly.functions import connect, stores_of

        try:
            connection = connect(given, state_dir, probes=False)
        except InvalidSetting as error:
            raise InvalidRequest(error.in_files) from None
        urls = stores_of(given, connection.store_url)
        threading.Thread(target=_probe, args=(urls,), name="springtide-probe", daemon=True).start()
        return cls(connection)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The service as a node: each of its devices is a place for one job."""
        return () if self._connection is None else (self._connection.node,)

    @property
    def has_parameter_store(self) -> bool:
        """Whether functions exchange data through a parameter store."""
        return self._connection is not None and self._connection.parameter_host is not None

    def combined_with(
        self, machines: PostingExecutor, state_dir: Path, clock: PlatformClock, term: int
    ) -> EventExecutor:
        """Combine the executor of the cluster's pods with one for functions, if there is a function service."""
        if self._connection is None:
            return machines
        from springtide.backends.functions.executor import FunctionsExecutor
        from springtide.service.executors import RoutedExecutor

        self._executor = FunctionsExecutor(
            state_dir,
            clock,
            provider=self._connection.provider,
            node=self._connection.node,
            store_url=self._connection.store_url,
            parameter_host=self._connection.parameter_host,
            term=term,
        )
        self._executor.open()
        return RoutedExecutor(machines, self._executor)

    def status(self, workload_id: WorkloadId) -> FunctionRunStatus | None:
        """Which functions run a job; None for a job in pods. Thread-safe."""
        return None if self._executor is None else self._executor.status(workload_id)

    def close(self, *, stop_workers: bool) -> None:
        """Close the executor and the connection. Functions keep running unless `stop_workers`."""
        if self._executor is not None:
            self._executor.close(stop_workers=stop_workers)
        if self._connection is not None:
            self._connection.end(stop_workers)


def _with_password(address: str, password: str) -> str:
    """Add the password of a Redis to its address; the settings do not contain it."""
    parts = urlsplit(address)
    if not address or not password:
        return address
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))


def _probe(urls: tuple[str, ...]) -> None:
    for url in urls:
        try:
            probe_store(url)
        except SpringtideError as error:
            LOG.warning("jobs on functions will wait for %s: %s", shown_address(url), error)
