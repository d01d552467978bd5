"""A job's request with a profile: the speed and dataset length that `springtide profile` measured are sent with it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from springtide.cli.jobs.job_options import JobRequest
from springtide.cli.session import Session, refuse
from springtide.client.folders.choice import FolderWish, with_code
from springtide.client.requirements import with_packages
from springtide.client.shares import is_auto
from springtide.core.quantities import validate_name


def check_profile(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Reject a Python file as the value: a bare --profile before the file would take it as its value."""
    if value is not None and value.endswith(".py"):
        refuse(f"--profile took {value} as its file; write them the other way round: {value} --profile")
    return value


def profiled_request(session: Session, asked: JobRequest, path: Path, folder: FolderWish = None) -> dict[str, Any]:
    """The keyword arguments for Client.quote and Client.submit_job.

    The speeds are predicted from the profile's timeline for this platform's runtime and the requested global batch.
    Raises InvalidRequest if the profile is of another file or function.
    """
    from springtide.runtime.profiling.step_profiling import platform_steps_per_s, read_profile

    profile = read_profile(path)
    source = asked.source
    if source.kind != "function" or source.object_name != profile.object_name:
        found = source.object_name or "a plain script"
        refuse(f"{path} is a profile of {profile.object_name!r}, {source.filename} has {found!r}; profile that one")
    if hashlib.sha256(source.text.encode()).hexdigest() != profile.source_sha256:
        session.note(f"{source.filename} has changed since it was profiled; its speed may be another")
    if is_auto(asked.options.values["share"]):
        from springtide.client.share_profiles import job_as_profiled

        settled = job_as_profiled(asked.options, source, session.note, session.client.sharing())
        asked = replace(asked, options=settled)
    status = session.client.status()
    num_machines = sum(device.kind != "function" for device in status.devices)
    options = asked.options.as_request(num_machines, datetime.now())
    if options["params"] != profile.params:
        session.note(f"{path} was taken with the parameters {profile.params}; with others its speed may be another")
    rates = platform_steps_per_s(profile, options["global_batch_size"], options.get("num_virtual_shards"))
    options["profile_steps_per_s"] = {str(count): rate for count, rate in rates.items()}
    options["step_profile"] = msgspec.to_builtins(profile.step)
    options.setdefault("num_samples", profile.num_samples)
    has_pods = status.cluster is not None
    wanted = asked.options.values["requirements"]
    options = with_packages(options, wanted, source, has_pods=has_pods, folder=folder)
    sent = with_code(source, folder, has_pods=has_pods)
    return {"name": validate_name(asked.options.values["name"] or asked.name), "source": sent, "options": options}
