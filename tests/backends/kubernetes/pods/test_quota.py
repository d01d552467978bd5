"""What becomes of pods and jobs when a namespace has no room."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kits.kubernetes.pod_stage import StillReactor, stand_still
from springtide.backends.kubernetes.pods import quota as quota_module
from springtide.backends.kubernetes.pods.quota import PATIENCE_S, PROBE_S, RETRY_S, NamespaceQuota
from springtide.core.events import ScaleRequested
from springtide.core.workload import Entrypoint, TrainingJob


class Stage:
    def __init__(self, reactor: StillReactor) -> None:
        self.reactor = reactor
        self.replicas: list[SimpleNamespace] = []
        self.events: list[ScaleRequested] = []
        self.num_tries = 0
        self.has_room = False
        self.quota = NamespaceQuota(reactor, self, self.events.append, self._probe)  # type: ignore[arg-type]
        self.quota.on_room = self._on_room

    def of_workload(self, workload_id: str) -> list[SimpleNamespace]:
        return [replica for replica in self.replicas if replica.action.workload.job_id == workload_id]

    def replica(self, *, is_made: bool, **changes: object) -> SimpleNamespace:
        job = TrainingJob(
            job_id="job", name="job", entrypoint=Entrypoint(source_path="a"), **({"max_workers": 4} | changes)
        )
        body = SimpleNamespace(uid="u") if is_made else None
        replica = SimpleNamespace(
            action=SimpleNamespace(workload=job),
            handle=SimpleNamespace(pod=body),
            asked_to_stop=False,
            lost_reason=None,
        )
        self.replicas.append(replica)
        return replica

    def refuse(self, replica: SimpleNamespace) -> None:
        self.quota.refused(replica, "ml", "exceeded quota: few")  # type: ignore[arg-type]

    def _probe(self, like: object, told: Callable[[bool], None]) -> None:
        told(self.has_room)

    def _on_room(self) -> None:
        self.num_tries += not self.quota.obstacle("ml")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(stand_still(monkeypatch, quota_module))


def test_one_pod_at_a_time_finds_out_whether_there_is_room(stage: Stage) -> None:
    assert stage.quota.obstacle("ml") == ""
    stage.refuse(stage.replica(is_made=False))
    assert "exceeded quota: few" in stage.quota.obstacle("ml")
    assert stage.quota.obstacle("web") == ""
    stage.reactor.pass_time(2 * RETRY_S[0])
    assert stage.num_tries == 1
    assert stage.quota.obstacle("ml"), "one is on its way; the others wait for what it finds"
    stage.quota.accepted("ml")
    assert stage.quota.obstacle("ml") == ""


def test_tries_become_rarer_and_a_pod_that_ends_brings_the_next_one_forward(stage: Stage) -> None:
    replica = stage.replica(is_made=False, elastic=False)
    for _ in range(8):
        stage.refuse(replica)
        stage.reactor.pass_time(1.25 * RETRY_S[1] + 1)
    assert stage.num_tries == 8
    stage.refuse(replica)
    stage.reactor.pass_time(0.5 * RETRY_S[1])
    assert stage.num_tries == 8
    stage.quota.released("ml")
    stage.reactor.pass_time(1.0)
    assert stage.num_tries == 9


def test_an_elastic_job_does_with_what_runs_until_there_is_room(stage: Stage) -> None:
    stage.replica(is_made=True)
    stage.replica(is_made=True)
    stage.refuse(stage.replica(is_made=False))
    stage.reactor.pass_time(PATIENCE_S - 0.5)
    assert stage.events == []
    stage.reactor.pass_time(1.0)
    (limited,) = stage.events
    assert (limited.minimum, limited.maximum, limited.is_limit) == (1, 2, True)
    assert limited.reason == f"no quota in namespace ml for more: {stage.quota._refusals['ml'].message}"
    assert stage.quota.caps() == {"job": 2}
    stage.reactor.pass_time(10 * PROBE_S[1])
    assert len(stage.events) == 1
    stage.has_room = True
    stage.reactor.pass_time(2 * PROBE_S[1])
    told = "the quota in namespace ml has room again"
    assert stage.events[1:] == [ScaleRequested(workload_id="job", minimum=1, maximum=4, reason=told)]
    assert stage.quota.caps() == {}


@pytest.mark.parametrize(
    ("made", "changes"),
    [(0, {}), (1, {"min_workers": 2}), (2, {"elastic": False})],
    ids=["nobody runs", "fewer than it needs", "it cannot change"],
)
def test_a_job_that_cannot_do_with_less_only_waits(stage: Stage, made: int, changes: dict[str, object]) -> None:
    for _ in range(made):
        stage.replica(is_made=True, **changes)
    stage.refuse(stage.replica(is_made=False, **changes))
    stage.reactor.pass_time(10 * PATIENCE_S)
    assert stage.events == []
    assert stage.quota.caps() == {}


def test_room_within_its_patience_leaves_a_job_alone(stage: Stage) -> None:
    stage.replica(is_made=True)
    waiting = stage.replica(is_made=False)
    stage.refuse(waiting)
    waiting.handle.pod = SimpleNamespace(uid="v")
    stage.quota.accepted("ml")
    stage.reactor.pass_time(2 * PATIENCE_S)
    assert stage.events == []


def test_a_job_that_has_ended_is_not_asked_about(stage: Stage) -> None:
    stage.replica(is_made=True)
    stage.refuse(stage.replica(is_made=False))
    stage.reactor.pass_time(2 * PATIENCE_S)
    stage.quota.forget("job")
    stage.has_room = True
    stage.reactor.pass_time(10 * PROBE_S[1])
    assert len(stage.events) == 1
