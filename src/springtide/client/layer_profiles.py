"""Layer profiles for jobs on functions: measured on this machine in a child process, and cached by the file's text."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from springtide.client.sources.source import SourceFile
from springtide.core.errors import InvalidRequest
from springtide.core.workload import Entrypoint


def cache_folder() -> Path:
    """The folder of cached profiles: `springtide/layers` in XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "springtide" / "layers"


def with_layers(
    request: dict[str, Any],
    source: SourceFile,
    name: str,
    *,
    micro_batch: int,
    largest_micro_batch: int = 0,
    state_dir: str = "",
    profile: str | Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The options of POST /v1/jobs completed by the layer profile, and the dataset's length or the stream's name.

    The profile is read from the file `profile` (made by `springtide profile FILE --layers`), or else measured with the
    request's params, or taken from the cache. A model that is not cut into layers is measured with micro-batches of up
    to `largest_micro_batch` samples (0: of `micro_batch`). `state_dir` is the state directory of the platform whose
    datasets the task names. `on_progress` gets lines about the measurement. Raises InvalidRequest, BackendError.
    """
    # Imported here, because most submissions need no profile.
    from springtide.runtime.profiling.layer_profiling import cached_source_layers, read_layer_profile

    params = dict(request.get("params", {}))
    if profile is not None:
        taken = read_layer_profile(Path(profile))
        if taken.object_name != source.object_name:
            raise InvalidRequest(
                f"{profile} is a profile of {taken.object_name!r}, {source.filename} has {source.object_name!r}; "
                "profile that one"
            )
        if taken.source_sha256 != hashlib.sha256(source.text.encode()).hexdigest():
            on_progress(f"{source.filename} has changed since its layers were profiled; their times may be others")
        if taken.params != params:
            on_progress(
                f"{profile} was taken with params {taken.params}, the job has {params}; its layers may be others"
            )
    else:
        entrypoint = Entrypoint(
            source_path=str(Path(source.import_root) / source.filename),
            object_name=source.object_name,
            import_root=source.import_root,
        )
        taken = cached_source_layers(
            entrypoint,
            cache_folder(),
            name=name,
            micro_batch_size=micro_batch,
            largest_micro_batch=largest_micro_batch,
            params=params,
            state_dir=state_dir,
            on_progress=on_progress,
        )
    completed = {**request, "layer_profile": msgspec.to_builtins(taken.profile)}
    if taken.stream and completed.get("on") in ("functions", "auto"):
        completed["stream"] = taken.stream
    elif taken.num_samples is not None:
        completed.setdefault("num_samples", taken.num_samples)
    return completed


def read_layers(path: str | Path | None) -> dict[str, Any] | None:
    """The layers in a file of `springtide profile FILE --layers`, as requests send them; None without a path.

    Raises InvalidRequest.
    """
    if path is None:
        return None
    from springtide.runtime.profiling.layer_profiling import read_layer_profile

    layers: dict[str, Any] = msgspec.to_builtins(read_layer_profile(Path(path)).profile)
    return layers
