"""Which devices of a node count as held, before and after workers were adopted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kits.kubernetes.pod_stage import stand_still
from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.cache import Cache
from springtide.backends.kubernetes.client.kinds import POD
from springtide.backends.kubernetes.pods import machines as pod_machines
from springtide.backends.kubernetes.pods.machines import PodMachines
from springtide.backends.kubernetes.settings import KubernetesSettings


def pod(number: int, node: str, phase: str = "Running", **annotations: str) -> dict:
    return {
        "metadata": {
            "name": f"p{number}",
            "namespace": "ml",
            "uid": f"u{number}",
            "resourceVersion": str(number + 1),
            "annotations": {names.DEVICE_ANNOTATION: f"{node}/{number}", **annotations},
        },
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    }


def replica(
    number: int,
    *more: int,
    heard_at_s: float,
    phase: MemberPhase = MemberPhase.RUNNING,
    lost: str | None = None,
) -> SimpleNamespace:
    device_ids = tuple([f"a/{each}" for each in (number, *more)])
    state = SimpleNamespace(node_id="a", device_ids=device_ids, uid="", is_over=False)
    return SimpleNamespace(handle=SimpleNamespace(pod=state), heard_at_s=heard_at_s, phase=phase, lost_reason=lost)


def test_who_holds_what(monkeypatch: pytest.MonkeyPatch) -> None:
    reactor = stand_still(monkeypatch, pod_machines)
    cache = Cache(POD)
    machines = PodMachines(cache, KubernetesSettings(worker_lost_after_s=10.0))
    further = {names.MORE_DEVICES_ANNOTATION: "a/7,a/8"}
    for each in (pod(0, "a", **further), pod(1, "a", "Failed"), pod(2, "b")):
        cache.put(each)
    # Nobody has been adopted yet: whoever has a pod that is not over may well live.
    assert machines.held("a") == {"a/0", "a/7", "a/8"}
    assert machines.held("b") == {"b/2"}
    assert machines.held("c") == frozenset()
    now_s = reactor.now_s
    replicas = [
        replica(0, 5, 6, heard_at_s=now_s - 1),
        replica(1, heard_at_s=now_s - 11),
        replica(2, heard_at_s=0.0, phase=MemberPhase.SPAWNING),
        replica(3, heard_at_s=now_s - 11, phase=MemberPhase.ADOPTING),
        replica(4, heard_at_s=now_s, lost="it is lost"),
    ]
    pods = SimpleNamespace(replicas=dict(enumerate(replicas)), reactor=reactor)
    machines.join(pods, SimpleNamespace(pods={}), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    machines.start()
    assert machines.held("a") == {"a/0", "a/5", "a/6", "a/3"}
    reactor.pass_time(9.5)
    assert machines.held("a") == {"a/3"}
