"""Finds out what kubelets are at that make containers: of an image that is being pulled only the pod's events tell."""

from __future__ import annotations

import logging
import time
from functools import partial

from springtide.backends.control_channel.reactor import Reactor
from springtide.backends.kubernetes.client.api import KubeApi
from springtide.backends.kubernetes.client.errors import KubeForbidden
from springtide.backends.kubernetes.client.kinds import EVENT
from springtide.backends.kubernetes.client.thread import ApiThread
from springtide.backends.kubernetes.pods.reading import Making, read_making
from springtide.backends.kubernetes.pods.state import PodState
from springtide.backends.kubernetes.pods.table import PodTable
from springtide.core.errors import BackendError

_log = logging.getLogger(__name__)

LOOK_S = 1.0
# Containers that are made sooner are not asked about.
ASK_AFTER_S = 2.0
# How often the events of one pod are read, and of how many pods at once.
ASK_EVERY_S = 10.0
MAX_ASKED = 8


class MakingWatch:
    """Reads the events of pods whose containers are being made, on the I/O thread.

    Without the right to list events a pull is not told from other work.
    """

    def __init__(self, pods: PodTable, api_thread: ApiThread, reactor: Reactor) -> None:
        self._pods = pods
        self._api = api_thread
        self._reactor = reactor
        self._may_ask = True

    def start(self) -> None:
        """Begin to look."""
        self._reactor.after(LOOK_S, self.start)
        now_s = time.monotonic()
        due = [pod for pod in self._pods.pods.values() if pod.is_making and self._is_due(pod, now_s)]
        for pod in sorted(due, key=lambda pod: pod.asked_at_s)[:MAX_ASKED] if self._may_ask else ():
            self._ask(pod, now_s)

    def _is_due(self, pod: PodState, now_s: float) -> bool:
        return now_s - pod.since_s >= ASK_AFTER_S and now_s - pod.asked_at_s >= ASK_EVERY_S

    def _ask(self, pod: PodState, now_s: float) -> None:
        pod.asked_at_s = now_s

        async def read(api: KubeApi) -> None:
            try:
                events = await api.list(EVENT, pod.key.namespace, fields=f"involvedObject.uid={pod.uid}")
            except BackendError as error:
                self._reactor.call(partial(self._note_failure, error))
                return
            making = read_making(events.items)
            self._reactor.call(lambda: self._note(pod, making))

        self._api.run(read)

    def _note(self, pod: PodState, making: Making) -> None:
        if pod.is_making and not pod.is_over:
            pod.making = making
            self._pods.refresh(pod)

    def _note_failure(self, error: BackendError) -> None:
        if isinstance(error, KubeForbidden) and self._may_ask:
            self._may_ask = False
            _log.warning("pods that pull their images are not known, and fail after a while: %s", error)
