"""Which starts are told as held up; on real pods in tests/kubernetes/test_k8s_trouble.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.kubernetes.pods.driver import PodHandle
from springtide.backends.kubernetes.pods.holds import StartHolds


def replica(**changes: Any) -> Any:
    pod = SimpleNamespace(phase="pending", reason="its image is pulled", is_stuck=False)
    fields = {
        "handle": PodHandle(pod=pod),  # type: ignore[arg-type]
        "workload_id": "echo",
        "replica_id": "echo.0",
        "phase": MemberPhase.SPAWNING,
        "ordered_at_s": time.monotonic() - 60.0,
        "action": None,
        "lost_reason": None,
        **dict.fromkeys(("is_ready", "is_preparing", "asked_to_stop", "has_exited"), False),
    }
    return SimpleNamespace(**(fields | changes))


def test_what_a_worker_says_that_it_waits_for_is_not_taken_back_when_its_pod_runs() -> None:
    told: list[str] = []
    one = replica()
    table = SimpleNamespace(
        reactor=SimpleNamespace(after=lambda *_: None),
        replicas={"echo.0": one},
        post=lambda event: told.append(event.reason),
    )
    holds = StartHolds(table, lambda _: "")  # type: ignore[arg-type]
    holds.start()
    assert told == ["its image is pulled"]
    # It has begun, and makes its environment before the first look at that.
    one.handle.pod.phase, one.is_preparing = "running", True
    holds.start()
    one.is_preparing = False
    holds.start()
    assert told == ["its image is pulled"]
    one.handle.told_hold = None
    holds.start()
    assert told == ["its image is pulled", ""], "a new control plane says that it has begun"
