"""A control plane of this process, on a state directory and a journal of its own, with machines that are played."""

from __future__ import annotations

import threading

from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from kits.service.api_fixtures import HEADERS, TOKEN
from springtide.backends.inbox import Inbox
from springtide.core.actions import StartReplica, StopReplica
from springtide.core.events import PlatformStarted, ReplicaReady, ReplicaStopped
from springtide.core.status.shares import SharingStatus
from springtide.service.api.application import build_api
from springtide.service.platform import Platform


class ObedientReplicas:
    """An executor whose replicas start and stop at once. Without devices every job waits until it is cancelled."""

    def __init__(self, clock):
        self.inbox = Inbox(clock)
        self.post, self.wait, self.acknowledge = self.inbox.post, self.inbox.wait, self.inbox.take_sources

    def recover(self, standing):
        pass

    def start(self, action):
        if isinstance(action, StartReplica):
            self.post(ReplicaReady(workload_id=action.workload_id, replica_id=action.replica_id))
        elif isinstance(action, StopReplica):
            self.post(ReplicaStopped(workload_id=action.workload_id, replica_id=action.replica_id))


class Serving:
    """A control plane with its API. `prepare(platform)` is called before it starts."""

    def __init__(self, folder, keep=None, nodes=(), prepare=lambda platform: None):
        self.platform = Platform(folder, "fifo", nodes, ObedientReplicas, keep=keep, sharing=SharingStatus)
        self.app = build_api(self.platform, token=TOKEN, registry=CollectorRegistry())
        self.client = TestClient(self.app, base_url="http://127.0.0.1:8787", headers=HEADERS)
        self.ended = threading.Event()
        prepare(self.platform)
        self.platform.start(on_stop=self.ended.set)

    def turn(self, number=2):
        for _ in range(number):
            self.platform.submit(PlatformStarted())

    def get(self, path, status=200):
        answer = self.client.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def end(self):
        self.platform.request_shutdown(stop_workers=False)
        self.platform.join(timeout_s=20.0)
