"""The co-scaling study: drawn and read traces, one row for each arm, a verdict that could be no."""

from __future__ import annotations

import msgspec
import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.dilu import coscaling as dilu_coscaling
from springtide_studies.dilu.coscaling import run_study, study_text
from springtide_studies.dilu.coscaling_play import RunFigures
from springtide_studies.dilu.coscaling_world import ARMS, EAGER, OURS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of traces as published: one number a line."""
    folder = tmp_path_factory.mktemp("dilu")
    (folder / "traces").mkdir()
    rates = [1.0] * 10 + [6.0] * 12 + [1.0] * 10 + [0.0] * 3
    (folder / "traces" / "hump.txt").write_text("".join(f"{rate}\n" for rate in rates))
    return folder


@pytest.fixture(scope="module")
def answer(data):
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dilu_coscaling, "_SMALL_SECONDS", 40)
        answer = run_study(data=data, is_small=True, on_progress=lambda *what: told.append(what))
    assert told[-1][1] == told[-1][2] == 4 * len(ARMS)
    return answer


@pytest.mark.slow
def test_every_trace_has_every_arm(answer):
    assert [trace["name"] for trace in answer["traces"]] == ["bursty", "periodic", "sporadic", "hump"]
    assert [trace["is_drawn"] for trace in answer["traces"]] == [True, True, True, False]
    for trace in answer["traces"]:
        assert list(trace["arms"]) == [arm.name for arm in ARMS]
        assert trace["arms"][OURS]["saved_gpu_s"] == 0
        for row in trace["arms"].values():
            assert row["used_gpu_s"] <= row["reserved_gpu_s"] * 3
            assert row["p50_s"] is None or row["p50_s"] <= row["p95_s"] <= row["p99_s"]
    hump = answer["traces"][-1]
    assert hump["num_seconds"] == 35
    assert abs(hump["num_requests"] - 25 * 92) < 300


@pytest.mark.slow
def test_the_answer_is_plain_and_the_same_again(answer, data, monkeypatch):
    monkeypatch.setattr(dilu_coscaling, "_SMALL_SECONDS", 40)
    assert msgspec.json.encode(run_study(data=data, is_small=True)) == msgspec.json.encode(answer)


def test_the_text_shows_arms_verdicts_and_the_paper(answer):
    text = study_text(answer)
    assert "40 / 10.79 %" in text
    assert "too little for a verdict" in text
    assert all(arm.name in text for arm in ARMS)
    assert "passed" in text
    assert max(len(line) for line in text.splitlines()[:-1]) < 200


def _figures(cold_starts, late):
    return RunFigures(
        num_requests=100,
        late=late,
        refused=0,
        cold_starts=cold_starts,
        stops=0,
        latencies_s=(0.05,) * 100,
        reserved_gpu_s=10.0,
        used_gpu_s=5.0,
        replica_s=50.0,
        replicas=(1,),
    )


@pytest.mark.parametrize(
    ("ours", "eager", "passed"),
    [
        ((5, 10), (20, 20), True),
        ((6, 10), (20, 20), False),
        ((5, 11), (20, 20), False),
        ((1, 0), (1, 0), True),
        ((2, 0), (1, 0), False),
        ((1, 1), (4, 0), False),
    ],
)
def test_the_verdict_is_a_quarter_and_a_half(ours, eager, passed):
    figures = {arm.name: [_figures(1, 0)] for arm in ARMS}
    figures[OURS], figures[EAGER] = [_figures(*ours)], [_figures(*eager)]
    case = dilu_coscaling._Case("t", True, ((0, [1.0]),))
    assert dilu_coscaling._trace_row(case, figures)["passed"] is passed


def test_a_folder_without_traces_is_told(tmp_path):
    with pytest.raises(InvalidRequest, match="no traces"):
        run_study(data=tmp_path, is_small=True)


@pytest.mark.slow
def test_some_arms_alone_are_the_two_that_are_compared_and_those(monkeypatch):
    monkeypatch.setattr(dilu_coscaling, "_SMALL_SECONDS", 10)
    answer = run_study(is_small=True, only=("dilu",))
    assert list(answer["arms"]) == [OURS, "dilu", EAGER]
