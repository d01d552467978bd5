"""`springtide quote`: ask the running platform what it would do with a job, without submitting it."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from springtide.cli.jobs.job_options import (
    JobRequest,
    asked_options,
    check_place,
    library_warning,
    read_asked,
    takes_layers,
)
from springtide.cli.jobs.offers import quote_text
from springtide.cli.jobs.profiled import check_profile, profiled_request
from springtide.cli.loading import as_typed, split_target
from springtide.cli.session import Session, common_options, refuse
from springtide.client.functions import quote_job, submit_job
from springtide.client.goals import workers_range
from springtide.client.handles import JobHandle
from springtide.core.errors import Conflict
from springtide.core.workload import JobState

# How long a job must train on a number of workers until its speed counts as measured.
MEASURE_S = 4.0
# The value of --profile without a file.
MEASURE = "-"
_POLL_S = 0.2
_START_TIMEOUT_S = 120.0
_SECOND_TIMEOUT_S = 20.0


@click.command()
@asked_options
@click.option(
    "--profile",
    is_flag=False,
    flag_value=MEASURE,
    callback=check_profile,
    metavar="[PROFILE.json]",
    help="Use this file of `springtide profile`; without one, measure: run it on 1 and on 2 workers for some seconds.",
)
@common_options
@click.pass_obj
def quote(session: Session, /, target: str, script_args: tuple[str, ...], profile: str | None, **options: Any) -> None:
    """Ask whether FILE's function would be done in time, when, for how much, and if not, what would work.

    Nothing is submitted (but with a bare --profile a short run, which is then cancelled).
    """
    asked = read_asked(target, script_args, options)
    check_place(asked)
    if warning := library_warning(asked):
        session.note(warning)
    on_functions = takes_layers(asked)
    if profile == MEASURE and not on_functions:
        measure(session, asked)
    if profile is None or profile == MEASURE or on_functions:
        answer = quote_job(
            asked.source,
            asked.options,
            asked.name,
            session.client,
            profile=None if profile == MEASURE else profile,
            on_progress=session.note,
            compares=asked.is_declared,
        )
    else:
        answer = session.client.quote(**profiled_request(session, asked, Path(profile)))
    hint = f"do it: springtide run {_as_typed(target, profile, script_args)}"
    session.answer(answer, quote_text(answer), hint if answer.verdict == "accepted" else "")


def _as_typed(target: str, profile: str | None, script_args: tuple[str, ...]) -> str:
    """The arguments with which `run` submits what was quoted."""
    path, object_name = split_target(target)
    words = [] if profile in (None, MEASURE) else ["--profile", profile]
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not (isinstance(option, click.Option) and is_given and name in context.params and name != "profile"):
            continue
        value, flag = context.params[name], option.opts[-1]
        if option.is_flag:
            words.append(flag if value else option.secondary_opts[-1])
        else:
            words += [word for each in (value if option.multiple else [value]) for word in (flag, str(each))]
    words += ["--", *script_args] if script_args else []
    return " ".join([as_typed(path) + (f":{object_name}" if object_name else ""), *map(shlex.quote, words)])


def measure(session: Session, asked: JobRequest) -> None:
    """Run the job on one worker and then on two, for some seconds each, so that the platform learns its speed."""
    if asked.source.kind != "function":
        refuse(
            f"{asked.source.filename} is a plain script, whose steps are not seen; --profile needs a training function"
        )
    bounds = workers_range(asked.options.values["workers"])
    devices = session.client.status().devices
    least, most = bounds or (1, sum(device.kind != "function" for device in devices))
    counts = [n for n in (1, 2) if least <= n <= most] or [least]
    options = asked.options.override({"deadline": None, "budget": None, "workers": counts[0]})
    handle = submit_job(asked.source, options, asked.name, session.client)
    session.note(f"measuring with {handle.id} ...")
    try:
        for count in counts:
            if count != counts[0]:
                handle.scale(count)
            # A measurement displaces no other job, so the second worker may not become available.
            if not _train_for(handle, count, _START_TIMEOUT_S if count == counts[0] else _SECOND_TIMEOUT_S):
                break
    finally:
        try:
            handle.cancel()
        except Conflict:
            # The job ended before it could be cancelled.
            pass
    end_s = time.monotonic() + _START_TIMEOUT_S
    while handle.status().replicas and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _train_for(handle: JobHandle, num_workers: int, timeout_s: float) -> bool:
    """Wait until the job has trained on `num_workers` for MEASURE_S; returns whether it still runs."""
    end_s = time.monotonic() + timeout_s
    since_s: float | None = None
    while time.monotonic() < end_s:
        job = handle.status()
        if JobState(job.state).is_terminal:
            return False
        if job.num_workers == num_workers and job.samples_per_s:
            since_s = time.monotonic() if since_s is None else since_s
            if time.monotonic() - since_s >= MEASURE_S:
                return True
        time.sleep(_POLL_S)
    return True
