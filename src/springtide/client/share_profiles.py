"""Replacing `share="auto"` by the share, batch and capacity that `springtide profile FILE --shares` measured."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from springtide.client.goals import TrainOptions
from springtide.client.serving_goals import ServeOptions
from springtide.client.shares import NO_PROFILE, is_auto, share_text
from springtide.client.sources.source import SourceFile
from springtide.core.errors import InvalidRequest
from springtide.core.options.kinds import objective_s
from springtide.core.options.services import DEFAULT_MAX_BATCH
from springtide.core.quantities import format_duration
from springtide.core.status.shares import SharingStatus
from springtide.perf.share_profile import (
    InferenceShareProfile,
    ShareProfile,
    TrainingShareProfile,
    find_share_profile,
)

OnLine = Callable[[str], None]
ProfileT = TypeVar("ProfileT", InferenceShareProfile, TrainingShareProfile)
UNKNOWN = SharingStatus()
# Relative difference in cores up to which a profile counts as taken on such a device.
_SAME_DEVICE = 0.05


def service_as_profiled(
    options: ServeOptions, source: SourceFile, on_progress: OnLine = lambda _: None, sharing: SharingStatus = UNKNOWN
) -> ServeOptions:
    """The options with the values of the file's profile if the share is "auto"; else unchanged.

    An objective, batch size or capacity that the user gave takes precedence. `on_progress` gets what was chosen, and
    warnings if the profile is of another file or device; `sharing` describes the platform's devices. Raises
    InvalidRequest if there is no profile.
    """
    if not is_auto(options.values["share"]):
        return options
    profile = _profile_of(source, InferenceShareProfile, "a service")
    on_progress(
        f"as profiled: {share_text(profile.share)} of a device, batches of {profile.batch_size}, "
        f"{profile.capacity_per_s:.4g} samples/s of one replica at its limit"
    )
    for line in _differences(profile, source, sharing):
        on_progress(line)
    values = options.values
    slo = values["slo"]
    if slo is not None and objective_s(slo) < profile.slo_s * (1.0 - 1e-9):
        on_progress(
            f"{source.object_name} was profiled for {format_duration(profile.slo_s)}, longer than its "
            f"objective of {format_duration(objective_s(slo))}; profile it anew with --slo "
            f"{objective_s(slo) * 1000:g}ms"
        )
    is_free = values["max_batch"] == DEFAULT_MAX_BATCH
    if not is_free and values["max_batch"] != profile.batch_size:
        on_progress(
            f"its share was profiled in batches of {profile.batch_size}, and max_batch says {values['max_batch']}"
        )
    return options.override(
        {
            "share": (profile.share.request, profile.share.limit),
            "memory": _memory(profile, sharing) if values["memory"] is None else values["memory"],
            "slo": profile.slo_s if slo is None else slo,
            "max_batch": profile.batch_size if is_free else values["max_batch"],
            "capacity": profile.capacity_per_s if values["capacity"] is None else values["capacity"],
        }
    )


def job_as_profiled(
    options: TrainOptions, source: SourceFile, on_progress: OnLine = lambda _: None, sharing: SharingStatus = UNKNOWN
) -> TrainOptions:
    """Like `service_as_profiled`, for a training job."""
    if not is_auto(options.values["share"]):
        return options
    profile = _profile_of(source, TrainingShareProfile, "a training job")
    on_progress(
        f"as profiled: {share_text(profile.share)} of a device, {profile.request_throughput_per_s:.4g} to "
        f"{profile.limit_throughput_per_s:.4g} samples/s of one worker"
    )
    for line in _differences(profile, source, sharing):
        on_progress(line)
    memory = options.values["memory"]
    return options.override(
        {
            "share": (profile.share.request, profile.share.limit),
            "memory": _memory(profile, sharing) if memory is None else memory,
        }
    )


def _profile_of(source: SourceFile, kind: type[ProfileT], what: str) -> ProfileT:
    found = find_share_profile(Path(source.import_root) / source.filename, source.object_name)
    if found is None:
        raise InvalidRequest(NO_PROFILE.replace("FILE", source.filename))
    if not isinstance(found, kind):
        raise InvalidRequest(
            f"the share profile of {source.object_name} in {source.filename} is not one of {what}; "
            f"`springtide profile {source.filename} --shares` takes it anew"
        )
    return found


def _memory(profile: ShareProfile, sharing: SharingStatus) -> str | None:
    """The profile's memory limit as an option; None on GPUs, because profiles are taken on CPUs."""
    if _is_on_gpu(sharing):
        return None
    return f"{profile.share.memory_mb}MB" if profile.share.memory_mb else None


def _is_on_gpu(sharing: SharingStatus) -> bool:
    return any(mechanism in sharing.mechanism for mechanism in ("cuda-preload", "mps"))


def _differences(profile: ShareProfile, source: SourceFile, sharing: SharingStatus) -> list[str]:
    """Warnings if the profile is of another version of the file or another device."""
    warnings = []
    if hashlib.sha256(source.text.encode()).hexdigest() != profile.source_sha256:
        warnings.append(f"{source.filename} has changed since its share was profiled; another share may be right now")
    if _is_on_gpu(sharing):
        warnings.append(
            "its share was profiled on processors, and the devices here are GPUs: try it, and change it while it runs; "
            "the memory of the profile is left out, name --memory"
        )
        return warnings
    device_cpus = sharing.device_cpus
    is_known = device_cpus > 0.0 and profile.device_cpus > 0.0
    if is_known and not math.isclose(device_cpus, profile.device_cpus, rel_tol=_SAME_DEVICE):
        warnings.append(
            f"its share was profiled on a device of {profile.device_cpus:.3g} cores, and one has {device_cpus:.3g} "
            "here; profile it anew on such a device"
        )
    return warnings
