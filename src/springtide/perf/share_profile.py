"""Share profiles: the measured share of a device that a function needs, and the file beside the user's source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest, StorageError
from springtide.core.shares import Share
from springtide.solvers.search.share_bisection import SharePair, ThroughputTrial
from springtide.solvers.search.share_search import EfficacyOptimum, ShareTrial, limit_of, make_trial
from springtide.solvers.search.share_surface import LatencyModel

_MAX_FILE_BYTES = 1 << 20
_MAX_PROFILES = 64
# The fraction of an SLO for execution; the rest is for waiting, batching and transfers (Dilu, footnote 2).
EXECUTION_FRACTION = 0.5
# Efficacies that differ by no more than this count as equal; then the smaller request is better.
NEAR_FRACTION = 0.05
# Contradictions between latencies up to this fraction count as noise.
_NOISE = 0.1


class _Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The common part of both kinds of profile: their subject, and where and how they were measured.

    `mechanism` is what enforced the shares (core/status/shares.py), `device_cpus` the number of cores of a device.
    """

    name: str
    object_name: str
    source_sha256: str
    share: Share
    mechanism: str
    device_cpus: float


class InferenceShareProfile(_Profile, frozen=True, kw_only=True, tag_field="kind", tag="inference"):
    """The profile of an inference function: its share is the cheapest that meets its SLO, at `batch_size`.

    `latency_s` and `request_capacity_per_s` are the latency of a batch and the samples a second of one replica at the
    request, `limit_latency_s` and `capacity_per_s` at the limit. `trials` are the measurements of the search, without
    the one at the limit; `left_fraction` bounds how much better an untried setting is expected to be. `model` predicts
    latencies. `is_consistent`: no trial with a larger share or a smaller batch was slower beyond noise.
    """

    slo_s: float
    batch_size: int
    latency_s: float
    limit_latency_s: float
    request_capacity_per_s: float
    capacity_per_s: float
    trials: tuple[ShareTrial, ...]
    left_fraction: float
    model: LatencyModel | None = None
    is_consistent: bool = True


class TrainingShareProfile(_Profile, frozen=True, kw_only=True, tag_field="kind", tag="training"):
    """The profile of a training function: its request gives 80 % of the throughput of a whole device, its limit 98 %.

    Throughputs are samples a second of one worker. `is_consistent`: no two trials contradict each other.
    """

    throughput_per_s: float
    request_throughput_per_s: float
    limit_throughput_per_s: float
    trials: tuple[ThroughputTrial, ...]
    is_consistent: bool


ShareProfile = InferenceShareProfile | TrainingShareProfile


class ShareProfileFile(msgspec.Struct, frozen=True, kw_only=True):
    """The profiles of one source file, one for each of its functions."""

    format: Literal["springtide-shares-1"] = "springtide-shares-1"
    profiles: tuple[ShareProfile, ...]


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What was profiled, and where; `memory_mb` is its peak memory."""

    name: str
    object_name: str
    source_sha256: str
    mechanism: str
    device_cpus: float
    memory_mb: int = 0


def chosen_trial(optimum: EfficacyOptimum) -> ShareTrial | None:
    """The result of a measured search: the trial with the smallest share among those within NEAR_FRACTION of the best.

    On a CPU, for example, many shares are equally efficient; of these the smallest is easiest to pack.
    """
    if optimum.best is None:
        return None
    least = optimum.best.efficacy * (1.0 - NEAR_FRACTION)
    near = [trial for trial in optimum.trials if trial.is_within and trial.efficacy >= least]
    return min(near, key=lambda trial: (trial.share, -trial.efficacy))


def inference_profile(
    subject: Subject, slo_s: float, optimum: EfficacyOptimum, limit_latency_s: float
) -> InferenceShareProfile:
    """Build the profile from a measured search (see `chosen_trial`).

    `limit_latency_s` is the latency of the same batch at the limit, which is twice the request.

    Raises InvalidRequest if no setting meets the SLO, with an SLO that can be met.
    """
    best = chosen_trial(optimum)
    if best is None or best.latency_s is None:
        raise InvalidRequest(unreachable(optimum, slo_s))
    limit = limit_of(best.share)
    return InferenceShareProfile(
        name=subject.name,
        object_name=subject.object_name,
        source_sha256=subject.source_sha256,
        share=Share(request=best.share, limit=limit, memory_mb=subject.memory_mb),
        mechanism=subject.mechanism,
        device_cpus=subject.device_cpus,
        slo_s=slo_s,
        batch_size=best.batch_size,
        latency_s=best.latency_s,
        limit_latency_s=limit_latency_s,
        request_capacity_per_s=best.batch_size / best.latency_s,
        capacity_per_s=best.batch_size / limit_latency_s,
        trials=optimum.trials,
        left_fraction=optimum.left_fraction,
        model=optimum.model,
        is_consistent=_is_consistent(
            [*optimum.trials, make_trial(best.batch_size, limit, limit_latency_s, optimum.bound_s)]
        ),
    )


def _is_consistent(trials: Sequence[ShareTrial]) -> bool:
    for one in trials:
        for other in trials:
            is_easier = other.batch_size <= one.batch_size and other.share >= one.share
            if is_easier and one.latency_s and other.latency_s and other.latency_s > one.latency_s * (1 + _NOISE):
                return False
    return True


def training_profile(subject: Subject, pair: SharePair) -> TrainingShareProfile:
    return TrainingShareProfile(
        name=subject.name,
        object_name=subject.object_name,
        source_sha256=subject.source_sha256,
        share=Share(request=pair.request, limit=pair.limit, memory_mb=subject.memory_mb),
        mechanism=subject.mechanism,
        device_cpus=subject.device_cpus,
        throughput_per_s=pair.whole_per_s,
        request_throughput_per_s=pair.request_per_s,
        limit_throughput_per_s=pair.limit_per_s,
        trials=pair.trials,
        is_consistent=pair.is_consistent,
    )


def unreachable(optimum: EfficacyOptimum, slo_s: float) -> str:
    """The message for an SLO that no setting meets, with one that the fastest trial would meet."""
    smallest_s = optimum.smallest_latency_s
    if smallest_s is None:
        return "not one batch could be run, on any share; see what the function wrote, then profile again"
    enough_ms = int(smallest_s * 1e3 / EXECUTION_FRACTION) + 1
    return (
        f"an SLO of {slo_s * 1e3:.4g} ms is out of reach: a batch may take half of it, {optimum.bound_s * 1e3:.4g} ms, "
        f"and the fastest of {len(optimum.trials)} trials took {smallest_s * 1e3:.4g} ms; {enough_ms} ms would do"
    )


def shares_path(source: Path) -> Path:
    """The file of share profiles beside a source file: digits.py has digits.shares.json."""
    return source.with_name(f"{source.stem}.shares.json")


def read_share_profiles(path: Path) -> tuple[ShareProfile, ...]:
    """Read a file of profiles. Raises InvalidRequest if it is missing, too large or invalid."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from error
    again = "take it again: springtide profile FILE --shares"
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidRequest(f"{path} is over {_MAX_FILE_BYTES >> 20} MiB, which no share profile is; {again}")
    try:
        profiles = decode_json(data, ShareProfileFile).profiles
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is no share profile ({error}); {again}") from None
    for profile in profiles:
        share = profile.share
        if not 0.0 < share.request <= share.limit <= 1.0 or share.memory_mb < 0:
            raise InvalidRequest(
                f"{path}: the share of {profile.object_name!r}, {share.request:g} to {share.limit:g}, is none; {again}"
            )
        if isinstance(profile, InferenceShareProfile) and not (profile.capacity_per_s > 0 and profile.batch_size > 0):
            raise InvalidRequest(f"{path}: {profile.object_name!r} has no capacity or no batch size; {again}")
    return profiles


def find_share_profile(source: Path, object_name: str) -> ShareProfile | None:
    """The profile of one function of a source file, or None. Raises InvalidRequest."""
    path = shares_path(source)
    if not path.exists():
        return None
    return next((profile for profile in read_share_profiles(path) if profile.object_name == object_name), None)


def write_share_profile(path: Path, profile: ShareProfile) -> None:
    """Write a profile into its file, in place of an older one of the same function.

    Raises InvalidRequest if the existing file is not a file of share profiles, which is then not changed; StorageError.
    """
    others = read_share_profiles(path) if path.exists() else ()
    kept = tuple(other for other in others if other.object_name != profile.object_name)[-(_MAX_PROFILES - 1) :]
    file = ShareProfileFile(profiles=(*kept, profile))
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
