"""One short trial of the bench of shared devices: real platform, real load, everybody where the arm says."""

from __future__ import annotations

import pytest

from springtide_studies.sharing.bench import ARMS
from springtide_studies.sharing.load import Surge
from springtide_studies.sharing.report import SharingFigures, make_report
from springtide_studies.sharing.trial import JOB, SERVICES, OfferedLoad, run_trial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("measures")]
SURGE = (Surge(from_s=1.0, until_s=3.0, factor=4.0),)
LOAD = OfferedLoad(rate_per_s=5.0, duration_s=4.0, surges=(SURGE, SURGE), slo_s=2.0, num_layers=50)
FIGURES = SharingFigures(seed=1, device_cpus=0.5, request_cpu_s=0.001, request_of_four_cpu_s=0.001, machine={})


def test_a_trial_is_played_on_one_device_and_on_devices_of_their_own():
    arms = [arm for arm in ARMS if arm.name in ("exclusive", "ours")]
    told: list[str] = []
    trials = [run_trial(arm, LOAD, 0, 1, told.append) for arm in arms]
    exclusive, ours = trials
    assert len(told) == 2
    assert set(ours.devices) == {*SERVICES, JOB}
    assert len(set(ours.devices.values())) == 1
    assert len(set(exclusive.devices.values())) == 3
    for trial in trials:
        assert all(answer.status == 200 for each in trial.answers for answer in each)
        assert [len(each) > 10 for each in trial.answers] == [True, True]
        assert trial.num_steps > 0
        assert trial.sharing.mechanism in ("cgroup-v1", "cgroup-v2", "signals", "none")
        assert {tenant.workload_id for tenant in trial.sharing.tenants} >= set(SERVICES)
    first, second = (tuple(answer.due_s for answer in trial.answers[0]) for trial in trials)
    assert first == second, "every arm gets the same arrivals"
    report = make_report(arms, LOAD, trials, FIGURES)
    assert [arm["num_devices"] for arm in report["arms"]] == [3, 1]
