"""What `deploy` and `rollback` say about a release, and the question before requests have to wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click
import pytest

from springtide.cli.jobs.releases import release_asked, released_problem, wait_released, with_room_asked
from springtide.core.errors import InvalidRequest, NoRoomBeside
from springtide.core.status.revisions import RevisionStatus

NOTHING: dict[str, Any] = {"canary": None, "watch": None, "watch_for": None, "when_full": None}


def told(state: str, revision: int = 2, **more: Any) -> Any:
    found = RevisionStatus(revision=revision, state=state, reason="crashed 3 times", **more)  # type: ignore[arg-type]
    return SimpleNamespace(name="echo", revision=1, revisions=(RevisionStatus(revision=1, state="current"), found))


def session_of(*services: Any, may_ask: bool = False) -> Any:
    answers = list(services)
    client = SimpleNamespace(service=lambda name: answers.pop(0) if len(answers) > 1 else answers[0])
    return SimpleNamespace(client=client, may_ask=may_ask, notes=[], note=lambda text: None)


def test_flags_become_a_release() -> None:
    asked = release_asked({**NOTHING, "canary": "10%", "watch": "p99<200ms", "watch_for": "5m", "when_full": "borrow"})
    assert asked == {"canary": 0.1, "watch": "p99<200ms", "watch_for_s": 300.0, "when_full": "borrow"}
    assert release_asked({**NOTHING, "canary": "0.5", "watch_for": "none"}) == {"canary": 0.5, "watch_for_s": 0.0}
    assert release_asked(NOTHING) == {}


@pytest.mark.parametrize("wrong", [{"watch": "errors<1%"}, {"canary": "all"}, {"canary": "100%"}, {"canary": "0"}])
def test_what_cannot_be_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="canary"):
        release_asked({**NOTHING, **wrong})


def test_a_revision_that_was_given_up_is_a_problem_and_says_what_serves() -> None:
    service = told("failed")
    assert wait_released(session_of(told("starting", num_replicas=1), service), "echo", 2) is service
    assert released_problem(service, 2) == (
        "revision 2 of echo was given up: crashed 3 times; revision 1 goes on serving"
    )
    assert released_problem(service, 1) == ""
    assert "cancelled" in released_problem(told("cancelled"), 2)
    assert wait_released(session_of(told("starting"), told("starting", revision=1)), "echo", 1) is None


def refused_once(asked: list[str]) -> Any:
    def send(release: Any) -> str:
        asked.append(release["when_full"])
        if release["when_full"] == "refuse":
            raise NoRoomBeside("requests wait")
        return "sent"

    return send


def test_the_present_revision_is_stopped_first_only_if_a_person_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with pytest.raises(NoRoomBeside):
        with_room_asked(session_of(told("starting")), {}, refused_once(asked))
    monkeypatch.setattr(click, "confirm", lambda *_, **__: False)
    with pytest.raises(NoRoomBeside):
        with_room_asked(session_of(told("starting"), may_ask=True), {}, refused_once(asked))
    assert asked == ["refuse", "refuse"]
    monkeypatch.setattr(click, "confirm", lambda *_, **__: True)
    assert with_room_asked(session_of(told("starting"), may_ask=True), {}, refused_once(asked)) == "sent"
    assert asked[2:] == ["refuse", "stop-first"]
    assert with_room_asked(session_of(told("starting")), {"when_full": "borrow"}, refused_once(asked)) == "sent"
