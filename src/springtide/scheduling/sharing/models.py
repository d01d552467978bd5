"""Jobs on parts in a cluster of several models of device: all workers of a job are on one model, as fast as on that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from springtide.core.decision import JobView, Snapshot
from springtide.core.resources import DeviceId
from springtide.perf.curve import curve_of
from springtide.scheduling.sharing.deadlines import is_promised


def models_for(snapshot: Snapshot, view: JobView, planned: Sequence[DeviceId]) -> tuple[str, ...]:
    """The models that a job on parts may be on: the slowest of those of its devices, if it has some; else that of the
    `planned` ones first and then the fastest, of those alone on which its speed is known, if there is one. Empty where
    all devices are of one model."""
    models, model_of = snapshot.cluster.accelerators, snapshot.cluster.accelerator_of
    if len(models) < 2:
        return ()
    known = [model for model in models if model in view.job.profiles or _measured(view, model)]
    rates = {model: curve_of(view_on(view, model)).rate(1) for model in models}
    held = snapshot.allocations.get(view.job.job_id)
    if held is not None and (here := {model_of[at] for at in held.device_ids if at in model_of}):
        return (min(sorted(here), key=rates.__getitem__),)
    first = {model_of[at] for at in planned if at in model_of}
    return tuple(sorted(known or models, key=lambda model: (model not in first, -rates[model])))


def view_on(view: JobView, model: str) -> JobView:
    """The job with what is known of its speed on this model: a promise rests on nothing else. One that is promised has
    its other profile where there is none of the model."""
    job, learnt = view.job, view.learnt
    profile = job.profiles.get(model) or (job.profile_steps_per_s if is_promised(view) else {})
    steps = tuple([step for step in learnt.step_times if step.accelerator in (model, "")])
    return replace(
        view,
        job=replace(job, profile_steps_per_s=profile),
        learnt=replace(learnt, throughput_samples_per_s=_measured(view, model), step_times=steps),
    )


def _measured(view: JobView, model: str) -> Mapping[int, float]:
    """What was measured of the job on this model; where it is not known on which, of any."""
    learnt = view.learnt
    return learnt.by_accelerator.get(model, {}) if learnt.by_accelerator else learnt.throughput_samples_per_s
