"""The function service of a platform on Kubernetes: its settings, its place among the nodes, and what runs jobs there.

Jobs on functions have no pods. Their coordinators are threads of the control plane that leads; all that these know is
in the object store (backends/functions/shell/fence.py), so that the next one, on whatever node, goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from springtide.backends.kubernetes.settings import KubernetesSettings
from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.core.resources import Node
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.workload import WorkloadId
from springtide.service.assembly.function_settings import FunctionSettings, shown_address
from springtide.service.executors import PostingExecutor
from springtide.service.platform import EventExecutor, PlatformClock
from springtide.storage.stores.probe import probe_store

if TYPE_CHECKING:
    from springtide.backends.functions.executor import FunctionsExecutor
    from springtide.service.assembly.functions import ServiceConnection

LOG = logging.getLogger("springtide.kubernetes")
# In the Secret `store_secret`, beside the keys of the object store.
REDIS_PASSWORD = "REDIS_PASSWORD"


def function_settings(settings: KubernetesSettings, environment: Mapping[str, str]) -> FunctionSettings | None:
    """The settings of the function service, as every platform has them; None where there is none."""
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
    """The function service of one control plane while it leads; of a platform without one it is empty."""

    def __init__(self, connection: ServiceConnection | None) -> None:
        self._connection = connection
        self._executor: FunctionsExecutor | None = None

    @classmethod
    def connect(cls, settings: KubernetesSettings, state_dir: Path, environment: Mapping[str, str]) -> ClusterFunctions:
        """Reach the service; nothing is deployed before the first job.

        A store that does not answer now is told and no more: whatever runs in pods has no need of it. Raises
        InvalidRequest for what cannot be, BackendError for an emulator that is not there yet.
        """
        given = function_settings(settings, environment)
        if given is None:
            return cls(None)
        from springtide.service.assembly.functions import connect, stores_of

        try:
            connection = connect(given, state_dir, probes=False)
        except InvalidRequest as error:
            # What is a flag on one machine is a setting here.
            raise InvalidRequest(str(error).replace("--functions-", "functions.")) from None
        urls = stores_of(given, connection.store_url)
        threading.Thread(target=_probe, args=(urls,), name="springtide-probe", daemon=True).start()
        return cls(connection)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The service as a node, each of its devices a place for one job."""
        return () if self._connection is None else (self._connection.node,)

    @property
    def has_parameter_store(self) -> bool:
        """Whether what functions tell each other goes through a store of its own."""
        return self._connection is not None and self._connection.parameter_host is not None

    def beside(self, machines: PostingExecutor, state_dir: Path, clock: PlatformClock, term: int) -> EventExecutor:
        """The executor of the cluster's pods, with that of functions beside it where there are any."""
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
        """Which functions run a job. Any thread may ask."""
        return None if self._executor is None else self._executor.status(workload_id)

    def close(self, *, stop_workers: bool) -> None:
        """Let go of everything; functions work on unless they are to be stopped."""
        if self._executor is not None:
            self._executor.close(stop_workers=stop_workers)
        if self._connection is not None:
            self._connection.end(stop_workers)


def _with_password(address: str, password: str) -> str:
    """The address of a Redis with its password, which is none of the settings."""
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
