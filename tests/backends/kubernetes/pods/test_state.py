"""The lifecycle of a pod against the booleans that it replaced: each combination of them is one state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.kubernetes.pod_stage import StillReactor
from springtide.backends.kubernetes.client.cache import Cache
from springtide.backends.kubernetes.client.kinds import POD, Key
from springtide.backends.kubernetes.pods.state import EDGES, Acknowledgement, PodLifecycle, PodState
from springtide.backends.kubernetes.pods.table import PodTable
from springtide.core.errors import BackendError

EVENTS = (
    "see binding",
    "see starting",
    "see running",
    "see ending",
    "see over",
    "is absent",
    "refused",
    "delete",
    "journaled",
    "output begins",
    "output was read",
    "node gone",
)


@dataclass
class Flags:
    """A pod as it was kept before there were states."""

    phase: str = "creating"
    has_uid: bool = False
    is_wanted: bool = True
    is_over: bool = False
    is_told: bool = False
    is_gone: bool = False
    is_removed: bool = False
    is_logged: bool = True
    is_asked: bool = False
    has_left: bool = False

    def apply(self, event: str) -> None:
        if event.startswith("see"):
            self.see(event.removeprefix("see "))
        elif event == "is absent":
            self.is_gone = True
            if not self.is_over:
                self.finish()
        elif event == "refused" and not (self.has_uid or self.is_over):
            self.is_gone = self.is_over = self.is_told = self.has_left = True
            self.is_wanted = False
        elif event in ("refused", "delete"):
            self.delete()
        elif event == "journaled":
            self.is_told = True
        elif event in ("output begins", "output was read"):
            self.is_logged = event == "output was read"
        elif not self.is_over:
            self.finish()
        if event in ("is absent", "journaled", "output was read"):
            self.tidy()

    def see(self, what: str) -> None:
        self.has_uid = True
        if self.is_over:
            self.tidy()
        elif what == "over":
            self.finish()
        else:
            self.phase = "ending" if self.is_asked else what

    def delete(self) -> None:
        self.is_wanted = False
        if not self.is_over:
            self.is_asked, self.phase = True, "ending"

    def finish(self) -> None:
        self.is_over, self.is_wanted, self.phase = True, False, "ending"
        self.tidy()

    def tidy(self) -> None:
        if not self.is_over or not self.is_told or not (self.is_logged or self.is_gone):
            return
        if self.is_gone or not self.has_uid:
            self.has_left = True
        else:
            self.is_removed = True

    @property
    def state(self) -> PodLifecycle:
        if self.has_left:
            return PodLifecycle.FORGOTTEN
        if self.is_gone:
            return PodLifecycle.GONE
        if self.is_removed:
            return PodLifecycle.REMOVING
        if self.is_over:
            return PodLifecycle.OVER
        return PodLifecycle(self.phase)

    def is_possible(self, event: str) -> bool:
        """What the cluster and the platform can do to it: only what runs begins to write, and no deletion is undone."""
        if event == "output begins":
            return self.phase == "running" and not self.is_over
        if event in ("see binding", "see starting", "see running") and self.phase == "ending":
            return self.is_asked or self.is_over
        return not (self.has_left and event in ("journaled", "node gone"))


class Thread:
    def write(self, key: object, effect: object, **callbacks: Any) -> None:
        return


def shown(event: str) -> dict[str, Any]:
    what = event.removeprefix("see ")
    states: dict[str, Any] = {"running": {"running": {}}, "over": {"terminated": {"exitCode": 0}}}
    pod: dict[str, Any] = {
        "metadata": {"name": "job-0", "namespace": "ml", "uid": "u", "resourceVersion": "1"},
        "spec": {} if what == "binding" else {"nodeName": "n"},
        "status": {
            "phase": "Succeeded" if what == "over" else "Pending",
            "containerStatuses": [{"name": "worker", "state": states.get(what, {})}],
        },
    }
    if what == "ending":
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return pod


class Subject:
    """A real table with one pod."""

    def __init__(self) -> None:
        self.table = PodTable(Thread(), Cache(POD), StillReactor(), "mine", 5)  # type: ignore[arg-type]
        self.pod = self.table.enter(
            PodState(replica_id="job.0", workload_id="job", key=Key("ml", "job-0"), device_ids=("n/0",), node_id="n")
        )

    def apply(self, event: str) -> None:
        if event.startswith("see"):
            self.table._update(self.pod, shown(event))
        elif event == "is absent":
            self.table._on_answer(self.pod, None)
        elif event == "refused":
            self.table._refused(self.pod, BackendError("no"))
        elif event == "delete":
            self.table.delete(self.pod, 1)
        elif event == "journaled":
            self.table.note_journaled("job.0")
        elif event == "output begins":
            self.pod.awaiting |= {Acknowledgement.LOGS}
        elif event == "output was read":
            self.table.note_logged(self.pod)
        else:
            self.table.note_node_gone("n")


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_each_combination_of_the_old_flags_is_one_state(events: list[str]) -> None:
    flags, subject = Flags(), Subject()
    for event in events:
        if not flags.is_possible(event):
            continue
        flags.apply(event)
        subject.apply(event)
        pod = subject.pod
        assert pod.state is flags.state, event
        assert (pod.is_over, pod.is_wanted) == (flags.is_over, flags.is_wanted)
        assert pod.phase == flags.phase or flags.has_left
        assert ("job.0" in subject.table.pods) is not flags.has_left


@pytest.mark.parametrize("state", PodLifecycle)
def test_what_is_no_edge_raises(state: PodLifecycle) -> None:
    for target in PodLifecycle:
        pod = PodState(replica_id="r", workload_id="w", key=Key("", ""), device_ids=("d",), node_id="n", state=state)
        if target is state or target in EDGES[state]:
            pod.move(target)
            assert pod.state is target
        else:
            with pytest.raises(AssertionError, match="cannot go from"):
                pod.move(target)


def test_every_state_leads_to_an_end() -> None:
    for state in PodLifecycle:
        reached = {state}
        while grown := {after for each in reached for after in EDGES[each]} - reached:
            reached |= grown
        assert PodLifecycle.FORGOTTEN in reached


def test_what_is_to_end_never_runs_again() -> None:
    ends = {PodLifecycle.ENDING, PodLifecycle.OVER, PodLifecycle.REMOVING, PodLifecycle.GONE, PodLifecycle.FORGOTTEN}
    for state in ends:
        assert EDGES[state] <= ends
