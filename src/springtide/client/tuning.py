"""`st.tune`: a hyperparameter search with Optuna whose trials are jobs on functions that share one budget."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from springtide.client.functions import Task, job_request
from springtide.client.goals import TrainOptions
from springtide.client.sources.source import SourceFile, name_from
from springtide.client.studies import (
    NUM_PARTS,
    Direction,
    Study,
    Trial,
    TrialState,
    locked_study,
    losses_by_part,
    read_study,
    write_study,
)
from springtide.core.errors import BackendError, CapacityError, Conflict, InvalidRequest, NotFound, SpringtideError
from springtide.core.options.kinds import check_count, check_params
from springtide.core.options.rules import ONLY_DECLARED
from springtide.core.quantities import parse_money_usd, validate_name
from springtide.core.status.platform import JobStatus
from springtide.core.workload import JobState
from springtide.storage.state_directory import default_state_directory

if TYPE_CHECKING:
    from springtide.client.api import Client

# A search space: called with an Optuna trial, returns the job's params (None: the suggested values).
Space = Callable[[Any], Mapping[str, Any] | None]
Metric = Callable[[JobStatus], float]
_POLL_S = 0.5
# How long the tuner waits for a platform that does not answer; a restart takes less.
_PATIENCE_S = 60.0
# A study whose first trials all fail is ended: the later ones would most likely fail too.
_MAX_FAILURES = 3
_MAX_NAME_CHARS = 48
# The platform does not answer or is overloaded: the request is repeated.
_UNAVAILABLE = (BackendError, CapacityError)


def tune(
    task: Task,
    space: Space | None = None,
    *,
    trials: int,
    budget: str | float,
    parallel: int = 1,
    direction: Direction = "minimize",
    metric: str | Metric = "loss",
    study: str = "",
    prunes: bool | None = None,
    sampler: Any = None,
    client: Client | None = None,
    folder: str | Path | None = None,
    on_change: Callable[[Study], None] = lambda _: None,
    on_progress: Callable[[str], None] = lambda _: None,
    **overrides: Any,
) -> Study:
    """Search hyperparameters within a budget: each trial is a job of `task` on functions. Blocks until the study ends.

        study = st.tune(task, lambda trial: {"width": trial.suggest_int("width", 16, 128)}, trials=20, budget="$1")
        print(study.best.params, study.best.value, study.spent_usd)

    `space` gets an Optuna trial and returns the params of one job; default: `search_space` in the task's file.
    `parallel` trials run at a time. All together cost at most `budget` ("$1" or US dollars): each new one is capped at
    an even part of what is left. `metric` is "loss" (of the last step), "cost", a metric that the job reports, or a
    function of the final JobStatus. With `prunes` (default: if the loss is minimised) a trial worse than the median of
    earlier ones is cancelled. `sampler` is Optuna's (default: TPE); `overrides` are options of `task.submit`.

    The study is saved as `folder`/`study`.json (default: the task's name, in the state directory). Another call
    continues it, also with other `trials` or `budget`; after Ctrl-C running jobs go on, and another call follows them.
    `on_change` gets the study after every change, `on_progress` lines about profiling. Raises InvalidRequest (also if
    the saved study has another file, metric or direction), BackendError.
    """
    if not isinstance(task, Task):
        raise InvalidRequest(f"a study is made of declared jobs: {ONLY_DECLARED}")
    source, options = task.source(), task.options.override(overrides, "st.tune")
    suggest = space or task._namespace.get("search_space")
    if not callable(suggest):
        raise InvalidRequest(
            f"{source.filename} has no function search_space(trial); write one that returns the job's parameters, like "
            '{"width": trial.suggest_int("width", 16, 128)}'
        )
    name = validate_name(study or options.values["name"] or name_from(source.object_name), "study")[:_MAX_NAME_CHARS]
    path = (Path(folder) if folder is not None else default_state_directory() / "studies") / f"{name}.json"
    wanted = Study(
        name=name,
        num_trials=check_count(trials, "trials", 20),
        budget_usd=parse_money_usd(budget),
        direction=direction,
        metric=metric if isinstance(metric, str) else getattr(metric, "__name__", "metric"),
        source_sha256=hashlib.sha256(f"{source.object_name}\n{source.text}".encode()).hexdigest(),
    )
    with locked_study(path):
        current = _resumed_study(wanted, read_study(path))
        jobs = _TrialJobs(source, options, name, client or _connect(), on_progress)
        tuner = Tuner(
            current,
            client=jobs.client,
            suggest=suggest,
            request=jobs.request,
            value_of=None if isinstance(metric, str) else metric,
            save=lambda changed: write_study(path, changed),
            num_parallel=check_count(parallel, "parallel", 2),
            prunes=(metric == "loss" and direction == "minimize") if prunes is None else prunes,
            sampler=sampler,
            seed=options.values["seed"],
            on_change=on_change,
        )
        return tuner.run()


class _TrialJobs:
    """Makes the requests for the trials' jobs, which differ in params, budget and name."""

    def __init__(
        self, source: SourceFile, options: TrainOptions, name: str, client: Client, on_progress: Callable[[str], None]
    ) -> None:
        self.client = client
        self._source = source
        self._options = options
        self._name = name
        self._on_progress = on_progress

    def request(self, trial: Trial) -> dict[str, Any]:
        """The keyword arguments for Client.submit_job. Raises InvalidRequest."""
        changed = self._options.override(
            {"on": "functions", "budget": trial.cap_usd, "params": trial.params, "name": f"{self._name}-{trial.number}"}
        )
        request = job_request(self._source, changed, changed.values["name"], self.client, on_progress=self._on_progress)
        request["options"]["study"] = self._name
        return request


class Tuner:
    """Runs one study to its end: Optuna suggests params, this class runs the jobs and accounts for their cost.

    `request(trial)` returns the keyword arguments for Client.submit_job. `save(study)` makes each state durable before
    the action that it records, so that a killed process loses nothing and submits no trial twice.
    """

    def __init__(
        self,
        study: Study,
        *,
        client: Client,
        suggest: Space,
        request: Callable[[Trial], dict[str, Any]],
        value_of: Metric | None,
        save: Callable[[Study], None],
        num_parallel: int = 1,
        prunes: bool = True,
        sampler: Any = None,
        seed: int = 0,
        on_change: Callable[[Study], None] = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.study = study
        self._client = client
        self._suggest = suggest
        self._request = request
        self._value_of = value_of
        self._write = save
        self._num_parallel = num_parallel
        self._prunes = prunes
        self._on_change = on_change
        self._sleep = sleep
        self._now_s = now_s
        self._answered_s = now_s()
        self._num_failures = 0
        self._optuna = _optuna_study(study, sampler, seed)
        # Optuna's trials that this process began, by number: only to these can intermediate losses be reported.
        self._asked: dict[int, Any] = {}

    def run(self) -> Study:
        """Run trials until all are over, the budget is spent, or the first ones have all failed."""
        self._on_change(self.study)
        while True:
            for trial in self.study.open_trials:
                if not trial.job_id:
                    self._recover_job(trial)
            reason = self._begin_trials()
            if not self.study.open_trials:
                self._save(replace(self.study, reason=reason))
                return self.study
            self._sleep(_POLL_S)
            for trial in self.study.open_trials:
                if trial.job_id:
                    self._update(trial)

    def _begin_trials(self) -> str:
        """Begin trials up to the parallel limit; returns why no more will begin, or "" if more may."""
        while True:
            study = self.study
            if len(study.trials) >= study.num_trials:
                return f"all {study.num_trials} trials are over"
            if self._num_failures >= max(_MAX_FAILURES, self._num_parallel) and study.best is None:
                newest = [trial for trial in study.trials if trial.is_over][-1]
                return f"its first {len(study.trials)} trials came to nothing, the last one: {newest.reason}"
            share_usd = study.share_usd()
            if share_usd <= 0.0:
                return f"its budget of ${study.budget_usd:.4g} is spent"
            if len(study.open_trials) >= self._num_parallel:
                return ""
            self._begin_trial(share_usd)

    def _begin_trial(self, cap_usd: float) -> None:
        asked = self._optuna.ask()
        self._asked[asked.number] = asked
        given = self._suggest(asked)
        params = asked.params if given is None else given
        if not isinstance(params, Mapping):
            raise InvalidRequest(
                f"search_space must return the job's parameters as a dict, not {type(params).__name__}"
            )
        trial = Trial(
            number=asked.number,
            params=check_params(params),
            suggested=dict(asked.params),
            distributions=_distributions_as_text(asked.distributions),
            submit_key=secrets.token_hex(16),
            cap_usd=cap_usd,
        )
        self._save(self.study.with_trial(trial))
        self._submit(trial)

    def _recover_job(self, trial: Trial) -> None:
        """Find the job of a trial whose submission was not answered, or submit it again with the same key."""
        name = f"{self.study.name}-{trial.number}"
        try:
            known = [job for job in self._client.jobs(name) if job.budget_usd == trial.cap_usd]
        except _UNAVAILABLE:
            self._check_patience()
            return
        if known:
            self._set_running(trial, known[-1])
        else:
            self._submit(trial)

    def _submit(self, trial: Trial) -> None:
        try:
            asked = self._request(trial)
        except InvalidRequest as error:
            self._end(trial, "failed", None, str(error))
            return
        except _UNAVAILABLE as error:
            if self._is_unreachable():
                self._check_patience()
            else:
                self._end(trial, "failed", None, str(error))
            return
        try:
            self._set_running(trial, self._client.submit_job(**asked, idempotency_key=trial.submit_key))
        except Conflict as error:
            # The key was used with another body, so a job may exist: count the trial's cap as spent.
            self._end(replace(trial, spent_usd=trial.cap_usd), "failed", None, str(error))
        except InvalidRequest as error:
            self._end(trial, "failed", None, str(error))
        except _UNAVAILABLE:
            self._check_patience()

    def _set_running(self, trial: Trial, job: JobStatus) -> None:
        self._answered_s = self._now_s()
        self._save(self.study.with_trial(replace(trial, job_id=job.job_id, state="running")))
        self._on_change(self.study)

    def _is_unreachable(self) -> bool:
        try:
            self._client.status()
        except SpringtideError:
            return True
        return False

    def _check_patience(self) -> None:
        """Re-raise the current exception if the platform has not answered for too long; the study can be resumed."""
        if self._now_s() - self._answered_s > _PATIENCE_S:
            raise

    def _update(self, trial: Trial) -> None:
        """Read the state of a trial's job, and end, prune or save the trial accordingly."""
        try:
            job = self._client.job(trial.job_id)
            trial = self._with_status_of(trial, job)
        except NotFound:
            reason = f"the platform does not know its job {trial.job_id} any more"
            self._end(replace(trial, spent_usd=trial.held_usd), "failed", None, reason)
            return
        except _UNAVAILABLE:
            self._check_patience()
            return
        self._answered_s = self._now_s()
        state = JobState(job.state)
        if state is JobState.SUCCEEDED:
            self._end_with_value(trial, job)
        elif state is JobState.REJECTED:
            self._end(trial, "pruned", None, f"refused: {job.reason}")
        elif state.is_terminal:
            # A trial that this study cancelled has its reason already.
            self._end(trial, "pruned" if trial.reason else "failed", None, trial.reason or job.reason)
        elif state is JobState.PAUSED or trial.reason:
            self._cancel(trial, trial.reason or job.reason)
        elif self._prunes and self.study.is_worse_than_median(trial):
            self._cancel(trial, f"worse than the median after {len(trial.losses)} tenths of the training")
        else:
            self._save(self.study.with_trial(trial))
            self._on_change(self.study)

    def _with_status_of(self, trial: Trial, job: JobStatus) -> Trial:
        """The trial with its job's cost, progress and losses so far."""
        spent_usd = job.cost_usd if job.cost_usd is not None and math.isfinite(job.cost_usd) else None
        is_over = JobState(job.state).is_terminal
        if spent_usd is None:
            # A job that never started costs nothing; for another one without a bill assume its whole cap.
            spent_usd = trial.cap_usd if is_over and job.started_at_s is not None else 0.0
        trial = replace(
            trial,
            spent_usd=max(trial.spent_usd, spent_usd),
            progress_fraction=job.progress_fraction or 0.0,
            artifact_path=job.artifact_path,
        )
        num_parts = int(trial.progress_fraction * NUM_PARTS)
        if job.total_steps and (num_parts > len(trial.losses) or job.state == JobState.SUCCEEDED):
            points = self._client.series(trial.job_id).points
            is_done = job.state == JobState.SUCCEEDED
            trial = replace(trial, losses=losses_by_part(points, job.total_steps, is_over=is_done))
        return trial

    def _cancel(self, trial: Trial, reason: str) -> None:
        self._save(self.study.with_trial(replace(trial, reason=reason)))
        try:
            self._client.cancel(trial.job_id)
        except (Conflict, NotFound, *_UNAVAILABLE):
            # The job has ended meanwhile, or the platform does not answer: the next update finds out.
            pass
        self._on_change(self.study)

    def _end_with_value(self, trial: Trial, job: JobStatus) -> None:
        value: float | None
        try:
            value = self._value(trial, job)
        # A metric may be the user's function: whatever it raises fails only this trial.
        except Exception as error:
            self._end(trial, "failed", None, f"its metric could not be told: {type(error).__name__}: {error}")
            return
        if value is None or not math.isfinite(value):
            self._end(trial, "failed", None, f"it reported no {self.study.metric} that is a number")
        else:
            self._end(trial, "succeeded", value, job.reason)

    def _value(self, trial: Trial, job: JobStatus) -> float | None:
        if self._value_of is not None:
            return float(self._value_of(job))
        if self.study.metric == "cost":
            return trial.spent_usd
        if self.study.metric == "loss":
            # Not a mean of reported losses: reports skip steps at random, so the value would not be reproducible.
            return job.loss
        return job.metrics.get(self.study.metric)

    def _end(self, trial: Trial, state: TrialState, value: float | None, reason: str) -> None:
        trial = replace(trial, state=state, value=value, reason=reason)
        self._save(self.study.with_trial(trial))
        self._num_failures = 0 if state == "succeeded" else self._num_failures + 1
        self._tell_optuna(trial)
        self._on_change(self.study)

    def _save(self, study: Study) -> None:
        if study != self.study:
            self._write(study)
            self.study = study

    def _tell_optuna(self, trial: Trial) -> None:
        from optuna.trial import TrialState as OptunaState

        asked = self._asked.pop(trial.number, None)
        if asked is not None and self.study.metric == "loss":
            for part, loss in enumerate(trial.losses):
                asked.report(loss, part + 1)
        state = {"succeeded": OptunaState.COMPLETE, "pruned": OptunaState.PRUNED}.get(trial.state, OptunaState.FAIL)
        self._optuna.tell(trial.number, trial.value, state=state)


def _optuna_study(study: Study, sampler: Any, seed: int) -> Any:
    """The study as an Optuna study with all its trials. Raises InvalidRequest if Optuna is not installed."""
    try:
        import optuna
        from optuna.trial import TrialState as OptunaState
    except ModuleNotFoundError:
        raise InvalidRequest(
            "studies need optuna, which is not installed here: pip install 'springtide[tuning]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if sampler is None:
        # The seed depends on the number of trials, so that a resumed study does not repeat its first suggestions.
        drawn = int(np.random.SeedSequence([seed, len(study.trials)]).generate_state(1)[0])
        sampler = optuna.samplers.TPESampler(seed=drawn, constant_liar=True)
    made = optuna.create_study(direction=study.direction, sampler=sampler, study_name=study.name)
    states = {"succeeded": OptunaState.COMPLETE, "pruned": OptunaState.PRUNED, "failed": OptunaState.FAIL}
    for trial in study.trials:
        losses = dict(enumerate(trial.losses, 1)) if study.metric == "loss" else {}
        made.add_trial(
            optuna.trial.create_trial(
                state=states.get(trial.state, OptunaState.RUNNING),
                value=trial.value,
                params=trial.suggested,
                distributions=_distributions_of(trial.distributions),
                intermediate_values=losses,
            )
        )
    return made


def _distributions_as_text(distributions: Mapping[str, Any]) -> dict[str, str]:
    from optuna.distributions import distribution_to_json

    return {name: distribution_to_json(one) for name, one in distributions.items()}


def _distributions_of(texts: Mapping[str, str]) -> dict[str, Any]:
    from optuna.distributions import json_to_distribution

    return {name: json_to_distribution(text) for name, text in texts.items()}


def _resumed_study(wanted: Study, found: Study | None) -> Study:
    """The saved study with the wanted trials and budget, or `wanted` if there is none.

    Raises InvalidRequest if the saved study is of another file, direction or metric.
    """
    if found is None:
        return wanted
    for what, one, other in (
        ("file", found.source_sha256, wanted.source_sha256),
        ("direction", found.direction, wanted.direction),
        ("metric", found.metric, wanted.metric),
    ):
        if one != other:
            changed = "the file has changed since" if what == "file" else f"its {what} was {one!r}, not {other!r}"
            raise InvalidRequest(
                f"there is a study {wanted.name!r} already, and {changed}: what it found does not hold for this one; "
                f"name another with study= (--study)"
            )
    return replace(found, num_trials=wanted.num_trials, budget_usd=wanted.budget_usd, reason="")


def _connect() -> Client:
    from springtide.client.api import connect

    return connect()
