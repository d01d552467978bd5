"""Policies in processes of their own: the same answers, and one that fails does not cost the others."""

from __future__ import annotations

import io
import time

import msgspec
import pytest

from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.simulator.parallel_runs import StudyRequest, _Line, _merge, play_request
from springtide.simulator.simulate import simulate
from springtide.workloads.profiles import Profiles


@pytest.mark.slow
def test_processes_give_the_same_answer_as_one() -> None:
    told: list[tuple[str, int, int]] = []
    alone = simulate("generated:30", "2x4", ["fifo", "edf"], seed=5)
    both = simulate(
        "generated:30", "2x4", ["fifo", "edf"], seed=5, num_processes=2, on_progress=lambda *said: told.append(said)
    )
    assert both == alone
    assert {name for name, _, _ in told} == {"fifo", "edf"}
    assert ("edf", 30, 30) in told


def say(**arguments: object) -> list[_Line]:
    out = io.BytesIO()
    given = {"trace": "generated:5", "cluster": "1x4", **arguments}
    study = "springtide.simulator.simulate:simulate_policy"
    play_request(msgspec.json.encode(StudyRequest(study=study, policy="fifo", is_timed=True, arguments=given)), out)
    return [msgspec.json.decode(line, type=_Line) for line in out.getvalue().splitlines()]


def test_one_process_says_how_far_it_is_and_then_its_answer() -> None:
    *progress, last = say()
    assert progress[-1].progress == (5, 5)
    assert last.answer is not None
    assert last.answer["policies"]["fifo"]["cpu_s"] > 0


def test_a_wrong_request_is_refused_and_a_failure_named() -> None:
    assert "generated:200" in say(trace="generated:0")[-1].refusal
    assert "TypeError" in say(limit="many")[-1].failure


def test_answers_are_merged_around_failures() -> None:
    good = _Line(answer={"trace": "t", "policies": {"a": {"jobs": 1}}})
    merged = _merge({"b": _Line(failure="PolicyError: no"), "a": good})
    assert merged == {"trace": "t", "policies": {"a": {"jobs": 1}}, "errors": {"b": "PolicyError: no"}}
    with pytest.raises(SpringtideError, match="b: PolicyError: no"):
        _merge({"b": _Line(failure="PolicyError: no")})
    with pytest.raises(InvalidRequest, match="bad trace"):
        _merge({"a": good, "b": _Line(refusal="bad trace")})


def test_values_in_memory_stay_in_one_process() -> None:
    with pytest.raises(InvalidRequest, match="one process"):
        simulate("generated:5", "1x4", ["fifo", "edf"], num_processes=2, profiles=Profiles(name="mine", tables={}))


def test_a_timer_in_other_processes_is_their_own() -> None:
    answer = simulate("generated:5", "1x4", ["fifo", "edf"], num_processes=2, timer=time.process_time)
    assert all(figures["cpu_s"] > 0 for figures in answer["policies"].values())
