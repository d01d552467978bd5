"""Studies against a platform at the wire: one budget whatever happens, each trial's job once, also after a kill."""

from __future__ import annotations

import sys
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.client.study_double import NUM_STEPS, Course, Platform
from springtide.client.studies import Study, Trial
from springtide.client.tuning import Tuner, tune
from springtide.core.errors import BackendError, InvalidRequest

SOURCE = {"filename": "f.py", "text": "x", "object_name": "f", "kind": "function", "args": [], "import_root": ""}


class Killed(Exception):
    """What ends a tuner in the middle of something."""


class Bench:
    """A study with all that its tuner is given: time that passes only in sleeps, and a state that survives."""

    def __init__(self, platform: Platform, *, num_trials: int, budget_usd: float, **options: Any) -> None:
        self.platform = platform
        self.kept = Study(name="widths", num_trials=num_trials, budget_usd=budget_usd)
        self.options = options
        self.seconds = 0.0
        self.dies_at = -1
        self.num_kept = 0
        self.seen: list[Study] = []

    def save(self, study: Study) -> None:
        self.num_kept += 1
        if self.num_kept == self.dies_at:
            raise Killed
        self.kept = study
        # Told again and again: what the study has spent and holds never exceeds its budget.
        assert study.spent_usd <= study.budget_usd * (1 + 1e-9)
        assert study.free_usd >= -1e-9

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def request(self, trial: Trial) -> dict[str, Any]:
        options = {"params": trial.params, "budget_usd": trial.cap_usd}
        source = type("Source", (), SOURCE | {"files": {}, "library": ""})()
        return {"name": f"widths-{trial.number}", "source": source, "options": options}

    def tuner(self, **options: Any) -> Tuner:
        given = {"suggest": lambda trial: {"width": trial.suggest_int("width", 8, 64)}, "value_of": None}
        return Tuner(
            self.kept,
            client=self.platform.client(),
            request=self.request,
            save=self.save,
            sleep=self.sleep,
            now_s=lambda: self.seconds,
            on_change=self.seen.append,
            **{**given, **self.options, **options},
        )

    def run(self, **options: Any) -> Study:
        return self.tuner(**options).run()


def by_width(params: dict[str, str]) -> Course:
    """Wide ones cost more and learn more."""
    width = int(params["width"])
    return Course(step_usd=width * 1e-5, end_loss=1.0 / width)


def test_all_trials_run_and_the_best_is_named() -> None:
    platform = Platform(by_width)
    bench = Bench(platform, num_trials=12, budget_usd=1.0, num_parallel=3, prunes=False)
    study = bench.run()
    assert study.reason == "all 12 trials are over"
    assert [trial.state for trial in study.trials] == ["succeeded"] * 12
    assert platform.most_running == 3
    best = study.best
    assert best is not None
    assert int(best.params["width"]) == max(int(trial.params["width"]) for trial in study.trials)
    assert best.value == pytest.approx(1.0 / int(best.params["width"]))
    # The mean of the last tenth of the training, four steps of forty.
    assert best.losses[-1] == pytest.approx(best.value + 2.0 * (0 + 1 + 2 + 3) / 4 / NUM_STEPS)
    assert study.spent_usd == pytest.approx(platform.spent_usd)
    assert len(bench.seen) > 12


def test_what_a_trial_does_not_spend_goes_back() -> None:
    platform = Platform(lambda _: Course(step_usd=0.1 / NUM_STEPS))
    study = Bench(platform, num_trials=4, budget_usd=1.0, prunes=False).run()
    caps = [trial.cap_usd for trial in study.trials]
    assert caps == pytest.approx([1.0 / 4, 0.9 / 3, 0.8 / 2, 0.7])


def test_a_trial_that_costs_more_than_its_share_is_pruned_and_the_others_go_on() -> None:
    platform = Platform(lambda params: Course(step_usd=0.04 if params["width"] == "64" else 0.001))
    widths = iter([64, 8, 8])

    def suggest(trial: Any) -> dict[str, int]:
        return {"width": next(widths)}

    study = Bench(platform, num_trials=3, budget_usd=1.5, suggest=suggest, prunes=False).run()
    assert [trial.state for trial in study.trials] == ["pruned", "succeeded", "succeeded"]
    assert "budget" in study.trials[0].reason
    assert study.trials[0].spent_usd <= study.trials[0].cap_usd == pytest.approx(0.5)
    assert [job.status.state for job in platform.jobs.values()] == ["CANCELLED", "SUCCEEDED", "SUCCEEDED"]


def test_the_median_rule_ends_what_is_worse_than_the_others() -> None:
    losses = iter([1.0, 1.1, 0.9, 1.0, 5.0, 0.5])
    platform = Platform(lambda _: Course(end_loss=next(losses), steps_a_look=2))
    study = Bench(platform, num_trials=6, budget_usd=10.0).run()
    assert [trial.state for trial in study.trials] == [*["succeeded"] * 4, "pruned", "succeeded"]
    assert study.trials[4].reason == "worse than the median after 2 tenths of the training"
    assert study.trials[4].progress_fraction < 0.5
    assert study.trials[4].spent_usd < study.trials[0].spent_usd
    assert study.best is not None
    assert study.best.number == 5


def test_refusals_failures_and_bad_parameters_are_told_with_their_reasons() -> None:
    fates = iter(["done", "refused", "fails", "no such thing", "done"])
    platform = Platform(lambda _: Course(fate=next(fates)))  # type: ignore[arg-type]
    study = Bench(platform, num_trials=5, budget_usd=1.0, prunes=False).run()
    told = [(trial.state, trial.reason) for trial in study.trials]
    assert told[0][0] == told[4][0] == "succeeded"
    assert told[1] == ("pruned", "refused: too dear")
    assert told[2] == ("failed", "its code raised ValueError")
    assert told[3] == ("failed", "options.params is no such thing")
    assert [trial.spent_usd for trial in study.trials[1:4:2]] == [0.0, 0.0]


def test_optuna_is_told_what_each_came_to() -> None:
    import optuna

    fates = iter(["done", "refused", "fails"])
    platform = Platform(lambda _: Course(fate=next(fates)))  # type: ignore[arg-type]
    bench = Bench(platform, num_trials=3, budget_usd=1.0, prunes=False)
    tuner = bench.tuner()
    tuner.run()
    states = [trial.state for trial in tuner._optuna.trials]
    told = optuna.trial.TrialState
    assert states == [told.COMPLETE, told.PRUNED, told.FAIL]
    assert len(tuner._optuna.trials[0].intermediate_values) == 10
    again = bench.tuner()
    assert [trial.state for trial in again._optuna.trials] == states
    assert [trial.params for trial in again._optuna.trials] == [trial.params for trial in tuner._optuna.trials]
    assert again._optuna.trials[0].intermediate_values == tuner._optuna.trials[0].intermediate_values


def test_a_study_that_comes_to_nothing_stops_early() -> None:
    platform = Platform(lambda _: Course(fate="refused"))
    study = Bench(platform, num_trials=50, budget_usd=1.0).run()
    assert len(study.trials) == 3
    assert study.reason == "its first 3 trials came to nothing, the last one: refused: too dear"


def test_a_lost_answer_costs_nothing_and_submits_nothing_twice() -> None:
    platform = Platform(lambda _: Course(num_lost_answers=1))
    study = Bench(platform, num_trials=3, budget_usd=1.0, prunes=False).run()
    assert [trial.state for trial in study.trials] == ["succeeded"] * 3
    assert len(platform.jobs) == 3


def test_a_platform_that_is_away_for_a_while_is_waited_for() -> None:
    platform = Platform(lambda _: Course())
    bench = Bench(platform, num_trials=2, budget_usd=1.0, prunes=False)
    platform.num_away = 20
    study = bench.run()
    assert [trial.state for trial in study.trials] == ["succeeded"] * 2
    platform.num_away = 10_000
    with pytest.raises(BackendError, match="springtide up"):
        Bench(platform, num_trials=2, budget_usd=1.0).run()


def test_a_job_that_vanished_costs_its_cap() -> None:
    platform = Platform(lambda _: Course(steps_a_look=1))
    bench = Bench(platform, num_trials=2, budget_usd=1.0)
    bench.dies_at = 4
    with pytest.raises(Killed):
        bench.run()
    platform.jobs.clear()
    study = bench.run()
    assert study.trials[0].state == "failed"
    assert "does not know its job" in study.trials[0].reason
    assert study.trials[0].spent_usd == 0.5
    assert study.trials[1].cap_usd == pytest.approx(0.5)


def test_more_trials_and_money_later() -> None:
    platform = Platform(lambda _: Course(step_usd=0.01))
    bench = Bench(platform, num_trials=2, budget_usd=1.0, prunes=False)
    assert bench.run().reason == "all 2 trials are over"
    bench.kept = changed_study(bench.kept, num_trials=4, budget_usd=2.0)
    study = bench.run()
    assert [trial.state for trial in study.trials] == ["succeeded"] * 4
    bench.kept = changed_study(bench.kept, num_trials=6, budget_usd=study.spent_usd)
    study = bench.run()
    assert len(study.trials) == 4
    assert study.reason == "its budget of $1.6 is spent"


def changed_study(study: Study, **fields: Any) -> Study:
    from msgspec.structs import replace

    return replace(study, **fields)


courses = st.builds(
    Course,
    step_usd=st.sampled_from([0.0, 1e-6, 1e-4, 1e-3, 0.01, 0.3]),
    end_loss=st.floats(0.0, 5.0),
    fate=st.sampled_from(["done", "done", "done", "fails", "refused", "no such thing"]),
    steps_a_look=st.integers(1, 30),
    num_lost_answers=st.sampled_from([0, 0, 1, 2]),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    drawn=st.lists(courses, min_size=1, max_size=12),
    num_trials=st.integers(1, 12),
    num_parallel=st.integers(1, 5),
    budget_usd=st.sampled_from([1e-5, 0.01, 0.2, 3.0]),
    deaths=st.lists(st.integers(1, 40), max_size=4),
)
def test_never_more_than_the_budget_and_each_job_once_whatever_happens(
    drawn: list[Course], num_trials: int, num_parallel: int, budget_usd: float, deaths: list[int]
) -> None:
    waiting = iter(drawn * 12)
    platform = Platform(lambda _: changed(next(waiting)))
    bench = Bench(platform, num_trials=num_trials, budget_usd=budget_usd, num_parallel=num_parallel)
    for death in [*deaths, -1]:
        bench.dies_at = bench.num_kept + death if death > 0 else -1
        try:
            study = bench.run()
        except Killed:
            continue
    assert platform.spent_usd <= budget_usd * (1 + 1e-9)
    assert study.spent_usd >= platform.spent_usd - 1e-12
    assert platform.most_running <= num_parallel
    names = [job.status.name for job in platform.jobs.values()]
    assert len(names) == len(set(names)), "a trial was submitted twice"
    assert {job.status.state for job in platform.jobs.values()} <= {"SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"}
    assert all(trial.is_over for trial in study.trials)
    assert [trial.number for trial in study.trials] == list(range(len(study.trials)))
    assert study.reason


FILE = """
import springtide as st

def search_space(trial):
    return {"width": trial.suggest_int("width", 8, 64)}

task = st.Task(model=dict, dataset=[1], loss=max, optimizer=list, name="digits", global_batch=8)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import importlib.util

    path = tmp_path / "study_file.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("study_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def asked(source: Any, options: Any, name: str, client: Any, **_: Any) -> dict[str, Any]:
        request = options.as_request(1, None)
        return {"name": options.values["name"] or name, "source": source, "options": request}

    monkeypatch.setattr("springtide.client.tuning.job_request", asked)
    return module.task


def test_tune_keeps_its_study_and_goes_on_with_it(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.client.tuning._POLL_S", 0.0)
    platform = Platform(by_width)
    folder = tmp_path / "studies"
    given: dict[str, Any] = {"client": platform.client(), "folder": folder, "budget": "$1"}
    study = tune(task, trials=2, **given)
    assert study.name == "digits"
    assert [trial.state for trial in study.trials] == ["succeeded"] * 2
    more = tune(task, trials=3, parallel=2, **given)
    assert more.trials[:2] == study.trials
    assert len(more.trials) == 3
    assert [job.status.name for job in platform.jobs.values()] == ["digits-0", "digits-1", "digits-2"]
    assert all('"study":"digits"' in job.body.decode() for job in platform.jobs.values())
    assert all('"on":"functions"' in job.body.decode() for job in platform.jobs.values())
    with pytest.raises(InvalidRequest, match="name another with"):
        tune(task, trials=3, direction="maximize", **given)
    other = tune(task, trials=1, study="other", metric=lambda job: job.step * 1.0, direction="maximize", **given)
    assert other.best is not None
    assert other.best.value == NUM_STEPS


def test_what_cannot_be_a_study_is_said(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Platform(by_width).client()
    given: dict[str, Any] = {"client": client, "folder": tmp_path / "studies"}
    with pytest.raises(InvalidRequest, match=r"st\.Task"):
        tune(lambda ctx: None, trials=1, budget=1, **given)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="trials"):
        tune(task, trials=0, budget=1, **given)
    with pytest.raises(InvalidRequest, match="budget"):
        tune(task, trials=1, budget="lots", **given)
    with pytest.raises(InvalidRequest, match="'epoch'"):
        tune(task, trials=1, budget=1, epoch=3, **given)
    with pytest.raises(InvalidRequest, match="must return"):
        tune(task, lambda trial: [1], trials=1, budget=1, **given)  # type: ignore[arg-type, return-value]
    del task._namespace["search_space"]
    with pytest.raises(InvalidRequest, match="search_space"):
        tune(task, trials=1, budget=1, **given)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InvalidRequest, match=r"springtide\[tuning\]"):
        tune(task, lambda trial: {}, trials=1, budget=1, study="new", **given)
