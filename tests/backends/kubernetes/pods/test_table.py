"""The table of pods against a cache that a test fills: what is looked at, what is asked, and who is told to go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kits.kubernetes.pod_stage import stand_still
from springtide.backends.kubernetes import settings as names
from springtide.backends.kubernetes.client.cache import Cache
from springtide.backends.kubernetes.client.errors import KubeForbidden
from springtide.backends.kubernetes.client.kinds import POD, Key
from springtide.backends.kubernetes.pods import table as pod_table
from springtide.backends.kubernetes.pods.state import Acknowledgement, PodState
from springtide.backends.kubernetes.pods.table import RESYNC_S, PodTable


class Thread:
    """Stands for the API thread: keeps what it is asked, and answers when the test says so."""

    def __init__(self) -> None:
        self.writes: list[dict[str, Any]] = []
        self.asked: dict[str, Callable[[Any], None]] = {}

    def write(self, key: object, effect: object, **callbacks: Any) -> None:
        self.writes.append({"key": key, "effect": effect, **callbacks})

    def confirm(self, cache: Cache, name: str, namespace: str, told: Callable[[Any], None]) -> None:
        self.asked[name] = told

    def of(self, name: str) -> list[dict[str, Any]]:
        """The writes to a pod that still stand."""
        return [each for each in self.writes if each["key"] == ("pod", "ml", name) and each["is_still_wanted"]()]


class Stage:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reactor = stand_still(monkeypatch, pod_table)
        self.thread = Thread()
        self.cache = Cache(POD)
        self.table = PodTable(self.thread, self.cache, self.reactor, "mine", 5)  # type: ignore[arg-type]
        self.over: list[tuple[str, int | None, str]] = []
        self.table.on_over = lambda pod: self.over.append((pod.replica_id, pod.exit_code, pod.end))
        self.version = 0

    def pod(self, number: int = 0, **changes: Any) -> PodState:
        fields = {"uid": f"u{number}", "device_ids": (f"n/{number}",)} | changes
        return self.table.enter(
            PodState(
                replica_id=f"job.{number}",
                workload_id="job",
                key=Key("ml", f"job-{number}"),
                node_id="n",
                **fields,
            )
        )

    def show(
        self, number: int = 0, phase: str = "Running", *, term: int = 5, ending: bool = False, **labels: str
    ) -> None:
        """Let the cache see a pod."""
        self.version += 1
        state = {"running": {}} if phase == "Running" else {"terminated": {"exitCode": 1, "reason": "Error"}}
        pod: dict[str, Any] = {
            "metadata": {
                "name": f"job-{number}",
                "namespace": "ml",
                "uid": f"u{number}",
                "resourceVersion": str(self.version),
                "labels": {
                    names.PLATFORM_LABEL: "mine",
                    names.REPLICA_LABEL: f"job.{number}",
                    names.TERM_LABEL: str(term),
                    **labels,
                },
                "annotations": {names.REPLICA_ANNOTATION: f"job.{number}"},
            },
            "spec": {"nodeName": "n"},
            "status": {"phase": phase, "containerStatuses": [{"name": "worker", "state": state}]},
        }
        if ending:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.cache.put(pod)

    def vanish(self, number: int = 0) -> None:
        self.cache.drop(Key("ml", f"job-{number}"))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_a_pod_holds_each_of_its_devices_until_it_has_left(stage: Stage) -> None:
    pod = stage.pod(device_ids=("n/0", "n/3"))
    stage.table.open()
    stage.show()
    held = ("n/0", "n/1", "n/3")
    assert [stage.table.holder(each, is_sharer=False) for each in held] == [pod, None, pod]
    stage.show(phase="Failed")
    stage.table.note_journaled("job.0")
    stage.thread.of("job-0")[0]["done"](False)
    assert stage.pod(1, device_ids=("n/3", "n/4")) is stage.table.holder("n/3", is_sharer=False)
    assert stage.table.holder("n/0", is_sharer=False) is None
    assert pod not in [each for found in stage.table._of_device.values() for each in found]


def test_absence_is_believed_only_from_the_api_server_itself(stage: Stage) -> None:
    pod = stage.pod()
    stage.table.open()
    stage.show()
    stage.vanish()
    assert stage.over == []
    stage.thread.asked.pop("job-0")(stage.cache.get("job-0", "ml"))
    assert stage.over == [("job.0", None, pod.absent)]


def test_a_listing_from_the_past_is_set_right_by_what_the_server_says(stage: Stage) -> None:
    pod = stage.pod(uid="")
    stage.table.open()
    stage.table.confirm(pod)
    stage.show(term=3)
    stage.thread.asked.pop("job-0")(stage.cache.get("job-0", "ml"))
    assert stage.over == []
    assert pod.uid == "u0"
    assert len(stage.thread.of("job-0")) == 1, "it is given the term of who leads now"


def test_its_end_is_told_once_and_its_object_goes_when_the_journal_knows(stage: Stage) -> None:
    stage.pod()
    stage.table.open()
    stage.show(phase="Failed")
    stage.reactor.pass_time(3 * RESYNC_S)
    assert stage.over == [("job.0", 1, "the worker ended with exit code 1")]
    assert stage.thread.of("job-0") == []
    stage.table.note_journaled("job.0")
    stage.table.note_journaled("job.0")
    (removal,) = stage.thread.of("job-0")
    removal["done"](False)
    assert stage.table.pods == {}


def test_output_that_is_still_read_keeps_an_object_a_little_longer(stage: Stage) -> None:
    pod = stage.pod()
    pod.awaiting |= {Acknowledgement.LOGS}
    stage.table.open()
    stage.show(phase="Failed")
    stage.table.note_journaled("job.0")
    assert stage.thread.of("job-0") == []
    stage.reactor.pass_time(30)
    assert len(stage.thread.of("job-0")) == 1


def test_a_device_is_held_until_nothing_runs_on_it(stage: Stage) -> None:
    stage.pod()
    sharer = stage.pod(1, is_sharer=True)
    table = stage.table
    assert table.holder("n/0", is_sharer=False) is not None
    assert table.holder("n/0", is_sharer=True) is not None
    assert table.holder("n/1", is_sharer=True) is None
    assert table.holder("n/1", is_sharer=False) is sharer
    table.open()
    stage.show()
    table.delete(table.pods["job.0"], 1)
    stage.show(ending=True)
    assert table.holder("n/0", is_sharer=False) is not None
    stage.show(phase="Failed")
    assert table.holder("n/0", is_sharer=False) is None


def test_a_pod_is_asked_to_go_again_only_with_less_time(stage: Stage) -> None:
    pod = stage.pod()
    for grace_s in (5.0, 5.0, 9.0, 2.0, 0.0, 1.0):
        stage.table.delete(pod, grace_s)
    assert len(stage.thread.of("job-0")) == 3
    assert pod.requested_grace_s == 1, "at once would forget what may run on"


def test_a_deletion_that_is_refused_is_asked_for_again(stage: Stage) -> None:
    pod = stage.pod()
    stage.table.open()
    stage.show()
    stage.table.delete(pod, 1)
    stage.thread.of("job-0")[0]["failed"](KubeForbidden(403, "Forbidden", "no such right"))
    assert "no such right" in pod.reason
    stage.reactor.pass_time(RESYNC_S + 1)
    assert len(stage.thread.of("job-0")) == 2


def test_what_nobody_named_is_ended_and_nothing_else(stage: Stage) -> None:
    stage.show(1)
    stage.show(2, **{names.PLATFORM_LABEL: "another"})
    stage.show(3, ending=True)
    stage.show(4)
    stage.table.is_expected = lambda key: key.name == "job-4"
    stage.reactor.pass_time(RESYNC_S)
    assert stage.thread.writes == [], "what is wanted is not known before the table is opened"
    stage.table.open()
    assert {write["key"] for write in stage.thread.writes} == {("pod", "ml", "job-1")}
    assert stage.table.num_unnamed == 1
    stage.reactor.pass_time(3 * RESYNC_S)
    assert stage.table.num_unnamed == 1
    # It holds its device like any other until it is gone.
    stage.show(1, phase="Failed")
    assert stage.over == [("job.1", 1, "the worker ended with exit code 1")]


def test_pods_without_a_replica_are_no_business_of_the_table(stage: Stage) -> None:
    stage.table.open()
    stage.show(1)
    pod = {**stage.cache.get("job-1", "ml")}
    own = {"metadata": {**pod["metadata"], "name": "control-plane", "uid": "c", "resourceVersion": "99"}, "spec": {}}
    own["metadata"]["labels"] = {names.PLATFORM_LABEL: "mine"}
    before = len(stage.thread.writes)
    stage.cache.put(own)
    assert len(stage.thread.writes) == before


def test_a_later_term_ends_all_writing(stage: Stage) -> None:
    told: list[int] = []
    stage.table.on_higher_term = told.append
    pod = stage.pod()
    stage.pod(1)
    stage.table.delete(pod, 1)
    stage.table.open()
    stage.show(1, term=6)
    assert told == [6]
    assert stage.thread.of("job-0") == []
    stage.show(2)
    stage.table.delete(stage.table.pods["job.1"], 1)
    assert not any(write["is_still_wanted"]() for write in stage.thread.writes)
    assert told == [6]


def test_a_machine_that_is_gone_takes_its_pods_along(stage: Stage) -> None:
    stage.pod()
    stage.table.open()
    stage.show()
    stage.table.note_node_gone("other")
    assert stage.over == []
    stage.table.note_node_gone("n")
    stage.table.note_node_gone("n")
    assert stage.over == [("job.0", None, "node n is gone")]
    stage.table.note_journaled("job.0")
    assert len(stage.thread.of("job-0")) == 1


def test_an_executor_that_is_closed_leaves_pods_to_the_next(stage: Stage) -> None:
    pod = stage.pod()
    stage.table.delete(pod, 5)
    stage.table.close()
    assert stage.thread.of("job-0") == []
