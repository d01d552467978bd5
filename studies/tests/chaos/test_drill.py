"""What a run of faults refuses to begin, and which lost requests it forgives; tests/end_to_end plays whole runs."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from springtide.core.errors import BackendError, InvalidRequest
from springtide_studies.chaos.drill import ChaosOptions, ChaosRun, FaultTimes, run_chaos
from springtide_studies.chaos.load import ChaosRequest
from springtide_studies.chaos.platform import ChaosPlatform

OPTIONS = ChaosOptions(minutes=0.5, seed=7)


def test_an_unknown_fault_is_named():
    with pytest.raises(InvalidRequest, match="no fault 'rain'; known are control plane killed"):
        run_chaos({"minutes": 1.0, "seed": 1, "only": ("rain",)}, print)


def test_what_cannot_be_injected_here_is_said(tmp_path):
    only = ChaosOptions(minutes=0.5, seed=7, only=("full disk",))
    with pytest.raises(BackendError, match="none of these faults can be injected here: needs root"):
        ChaosRun(only, ChaosPlatform(tmp_path, "springtide"), {"full disk": "needs root"}, print).play()


def test_the_command_repeats_the_run():
    assert OPTIONS.command == "springtide chaos --minutes 0.5 --seed 7"
    other = ChaosOptions(minutes=2, seed=7, policy="edf", only=("full disk",))
    assert other.command == "springtide chaos --minutes 2 --seed 7 --policy edf --only 'full disk'"


@pytest.mark.parametrize("interrupted", ["faults", "end"])
def test_an_interrupt_ends_the_faults_and_the_work_is_judged(tmp_path, monkeypatch, interrupted):
    run = ChaosRun(OPTIONS, ChaosPlatform(tmp_path, "springtide"), {}, (told := []).append)
    done = []

    def interrupt(*_):
        raise KeyboardInterrupt

    def close(limit_s):
        done.append("close")
        if interrupted == "end":
            interrupt()
        return True

    monkeypatch.setattr(run.platform, "up", lambda: None)
    monkeypatch.setattr(run.platform, "connect", lambda: contextlib.nullcontext(SimpleNamespace(remove_service=str)))
    monkeypatch.setattr(run.platform, "figures", dict)
    monkeypatch.setattr(run.platform, "workers", list)
    monkeypatch.setattr(run, "_work_undisturbed", lambda client: None)
    monkeypatch.setattr(run, "_inject", interrupt)
    monkeypatch.setattr(run, "_judge", lambda: done.append("judged"))
    run.load = SimpleNamespace(start=lambda: None, close=close, jobs=[])
    if interrupted == "end":
        with pytest.raises(KeyboardInterrupt):
            run.play()
        assert done == ["close"]
    else:
        run.play()
        assert done == ["close", "judged"]
        assert run.report.minutes < 0.5
    assert any("interrupted after 0 minutes" in line for line in told)


@pytest.mark.parametrize(
    ("kind", "outcome", "sent_at", "is_excused"),
    [
        ("control plane killed", "lost", 11.0, True),
        ("control plane killed", "lost", 13.0, False),
        ("control plane killed", "wrong", 11.0, False),
        ("worker killed", "lost", 11.0, False),
    ],
)
def test_only_a_death_of_the_control_plane_may_lose_requests(tmp_path, kind, outcome, sent_at, is_excused):
    run = ChaosRun(OPTIONS, ChaosPlatform(tmp_path, "springtide"), {}, print)
    times = FaultTimes(kind=kind)
    run._windows = [(10.0, 12.0, times)]
    run.load.requests = [ChaosRequest(sent_at=sent_at, ended_at=sent_at + 0.1, outcome=outcome)]
    run._judge_requests()
    assert bool(run.report.violations) is not is_excused
    assert times.num_lost == is_excused
