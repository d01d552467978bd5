"""`st.model_path`: what the newest successful job of a name saved."""

from __future__ import annotations

import sys
from pathlib import Path

from springtide.client.sources.source import state_directory_around
from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.core.quantities import validate_name
from springtide.storage.state_directory import default_state_directory


def model_path(name: str) -> str:
    """The path of the safetensors file that the newest successful job named `name` saved.

    Raises InvalidRequest if there is no such job yet.
    """
    validate_name(name, "job name")
    state_directory = _state_directory(str(sys._getframe(1).f_globals.get("__file__", "")))
    found = _newest_by_platform(name) if state_directory is None else None
    if found is None:
        found = _newest_on_disk(state_directory or default_state_directory(), name)
    if found is None:
        raise InvalidRequest(
            f"no job named {name!r} has saved a model yet; run one whose function calls ctx.save(), then try again"
        )
    return found


def _state_directory(calling_file: str) -> Path | None:
    """The state directory of the platform whose replica imports the calling file; None outside a replica."""
    return state_directory_around(calling_file) if calling_file else None


def _newest_by_platform(name: str) -> str | None:
    from springtide.client.api import connect

    try:
        with connect() as client:
            jobs = client.jobs(name)
    except SpringtideError:
        return None
    saved = [job for job in jobs if job.state == "SUCCEEDED" and job.artifact_path]
    newest = max(saved, key=lambda job: job.ended_at_s or 0.0, default=None)
    return newest.artifact_path if newest is not None and Path(newest.artifact_path).is_file() else None


def _newest_on_disk(state_directory: Path, name: str) -> str | None:
    models = list((state_directory / "workloads").glob(f"{name}-*/artifacts/model.safetensors"))
    # The pattern also matches longer names: an id is the name, a dash, and a part without dashes.
    mine = [model for model in models if model.parent.parent.name.rpartition("-")[0] == name]
    newest = max(mine, key=lambda model: model.stat().st_mtime, default=None)
    return None if newest is None else str(newest)
