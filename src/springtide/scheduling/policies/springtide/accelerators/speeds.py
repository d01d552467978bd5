"""How fast a job is on each model of device: as measured there, else by the ratios of families that ran on both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from springtide.core.decision import JobView
from springtide.core.workload import TrainingJob
from springtide.perf.curve import interpolate
from springtide.scheduling.families.family import family_key
from springtide.scheduling.policies.springtide.rows import SURE_FRACTION

# A measurement that differs by less than this fraction from what is known of its family tells nothing new.
SAME_FRACTION = 0.05
# How many families are remembered; the ones that came first are forgotten first.
NUM_FAMILIES = 64

Speeds = Mapping[int, float]


class KnownSpeeds:
    """Samples a second of each family by model of device and number of workers, and the ratios that follow."""

    def __init__(self, families: Mapping[str, Mapping[str, Speeds]]) -> None:
        self.families = families
        self._ratios: dict[tuple[str, str], float] = {}

    @classmethod
    def read(cls, kept: Mapping[str, Mapping[str, Sequence[Sequence[Any]]]]) -> KnownSpeeds:
        """From plain values."""
        return cls(
            {key: {model: dict(pairs) for model, pairs in found.items()} for key, found in kept.items()}  # type: ignore[arg-type]
        )

    def write(self) -> dict[str, dict[str, list[list[float]]]]:
        """As plain values."""
        return {
            key: {model: [[n, rate] for n, rate in speeds.items()] for model, speeds in found.items()}
            for key, found in self.families.items()
        }

    def learn(self, views: Sequence[JobView]) -> KnownSpeeds:
        """What is known with the measurements of these jobs, too; the same object if they tell nothing new."""
        changed: dict[str, dict[str, dict[int, float]]] = {}
        for view in views:
            key = family_key(view.job)
            for model, speeds in view.learnt.by_accelerator.items():
                for n, rate in speeds.items():
                    seen = changed.get(key, self.families.get(key, {})).get(model, {})
                    before = seen.get(n)
                    if rate <= 0.0 or (before is not None and abs(rate - before) <= SAME_FRACTION * before):
                        continue
                    if key not in changed:
                        known = self.families.get(key, {})
                        changed[key] = {each: dict(found) for each, found in known.items()}
                    # Jobs of a family may differ a little: what is known is the middle of what they tell.
                    changed[key].setdefault(model, {})[n] = rate if before is None else math.sqrt(rate * before)
        if not changed:
            return self
        families = {**self.families, **changed}
        return KnownSpeeds({key: families[key] for key in list(families)[-NUM_FAMILIES:]})

    def ratio(self, of: str, to: str) -> float:
        """The speed on the model `of` over that on `to`: the geometric mean of the families that ran on both, and of
        one more whose speed is the same on each."""
        key = (of, to)
        if key not in self._ratios:
            logs = []
            for found in self.families.values():
                one, other = found.get(of, {}), found.get(to, {})
                common = [math.log(one[n] / other[n]) for n in one if n in other]
                if common:
                    logs.append(sum(common) / len(common))
            self._ratios[key] = math.exp(sum(logs) / (len(logs) + 1))
        return self._ratios[key]

    def is_sure(self, view: JobView, model: str) -> bool:
        """Whether a promise may rest on the job's speed on this model: there is a profile of it, or another job of its
        family has run on it before this one started."""
        return bool(self._sure_speeds(view, model)) or (view.job.batch is not None and self._has_run(view, model))

    def view_on(self, view: JobView, model: str) -> JobView:
        """The job as it is on devices of this model: speeds that are not sure are no profile, but as if measured."""
        job, learnt = view.job, view.learnt
        sure, measured = self._sure_speeds(view, model), learnt.by_accelerator.get(model, {})
        profile: Speeds = sure
        if not sure:
            guess = self._guess(view, model)
            if view.promise.admitted_at_s is not None:
                # What was promised stays so, on the best that is known.
                profile, measured = guess, {}
            else:
                measured = {**{n: rate * job.global_batch_size for n, rate in guess.items()}, **measured}
        steps = learnt.step_times
        if any(step.accelerator not in (model, "") for step in steps):
            steps = tuple(step for step in steps if step.accelerator in (model, ""))
        return replace(
            view,
            job=job if job.profile_steps_per_s == profile else replace(job, profile_steps_per_s=dict(profile)),
            learnt=replace(learnt, throughput_samples_per_s=measured, step_times=steps),
        )

    def _has_run(self, view: JobView, model: str) -> bool:
        is_new = view.started_at_s is None or view.promise.admitted_at_s is not None
        return bool(view.job.family) and is_new and bool(self.families.get(family_key(view.job), {}).get(model))

    def _sure_speeds(self, view: JobView, model: str) -> Speeds:
        """Steps a second that a promise may rest on: by the job's own profile, or by runs of its family."""
        job = view.job
        if told := job.profiles.get(model):
            return told
        if job.batch is not None or not self._has_run(view, model):
            return {}
        rates = {n: rate * SURE_FRACTION / job.global_batch_size for n, rate in self._of_family(job, model).items()}
        least = min(rates)
        # On fewer devices than any job of it had, each of them does at least as much as there.
        fewer = {1 << power: rates[least] * (1 << power) / least for power in range(least.bit_length())}
        return dict(sorted({**{n: rate for n, rate in fewer.items() if n < least}, **rates}.items()))

    def _of_family(self, job: TrainingJob, model: str) -> Speeds:
        return self.families.get(family_key(job), {}).get(model, {})

    def _guess(self, view: JobView, model: str) -> dict[int, float]:
        """Steps a second by what is known of other models, or by a profile that does not name its model."""
        job, own = view.job, view.learnt.by_accelerator
        family = self.families.get(family_key(job), {})
        known = [each for each in (model, *own, *job.profiles, *family) if each in {**own, **job.profiles, **family}]
        if not known:
            return dict(job.profile_steps_per_s)
        source = known[0]
        batch = job.global_batch_size
        shape = dict(job.profiles.get(source) or job.profile_steps_per_s)
        if not shape:
            shape = {n: rate / batch for n, rate in family.get(source, {}).items()}
        measured = {n: rate / batch for n, rate in own.get(source, {}).items() if rate > 0.0}
        curve = interpolate(shape, max(shape, default=1))
        logs = [math.log(rate / curve[n]) for n, rate in measured.items() if n < len(curve) and curve[n] > 0.0]
        scale = math.exp(sum(logs) / len(logs)) if logs else 1.0
        found = {n: rate * scale for n, rate in shape.items()} or measured
        factor = self.ratio(model, source)
        return {n: rate * factor for n, rate in found.items()}
