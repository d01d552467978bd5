"""Share profiles: what of a device a function needs, as it was measured; their file beside the user's file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from springtide.core.errors import InvalidRequest, StorageError
from springtide.core.shares import Share
from springtide.solvers.search.share_bisection import SharePair, ThroughputTrial
from springtide.solvers.search.share_search import EfficacyOptimum, ShareTrial, limit_of, make_trial
from springtide.solvers.search.share_surface import LatencyModel

_MAX_FILE_BYTES = 1 << 20
_MAX_PROFILES = 64
# Of an SLO, execution has half: the rest is for waiting, batching and the way there and back (Dilu, footnote 2).
EXECUTION_FRACTION = 0.5
# Efficacies that differ by no more than this are the same to a measurement: the smaller request is the better one then.
NEAR_FRACTION = 0.05
# Latencies that contradict each other by no more than this are noise.
_NOISE = 0.1


class _Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of profile have in common: their subject, and where and how they were taken.

    `mechanism` is what held the function to its shares (core/share_status.py), `device_cpus` how many cores a device
    had.
    """

    name: str
    object_name: str
    source_sha256: str
    share: Share
    mechanism: str
    device_cpus: float


class InferenceShareProfile(_Profile, frozen=True, kw_only=True, tag_field="kind", tag="inference"):
    """An inference function: its share is the cheapest that keeps its SLO, at `batch_size`.

    `latency_s` is a batch's on the request, `limit_latency_s` on the limit; `request_capacity_per_s` and
    `capacity_per_s` are samples a second on them, of one replica. `trials` were run to find it, that at the limit not
    among them; `left_fraction` is how much better an untried setting is expected to be at most. `model` predicts.
    `is_consistent`: no trial on more of a device, or with a smaller batch, was slower beyond noise.
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
    """A training function: its request keeps 80 % of the throughput on a whole device, its limit all of it, within 2 %.

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
    """What a profile is of, and where it was taken; `memory_mb` is the most that it held."""

    name: str
    object_name: str
    source_sha256: str
    mechanism: str
    device_cpus: float
    memory_mb: int = 0


def settled_trial(optimum: EfficacyOptimum) -> ShareTrial | None:
    """The trial that a measured search comes to: on the smallest share, of those within NEAR_FRACTION of the best.

    Where the work is divided evenly, as on a CPU, many shares are equally efficient, and a small one is packed best.
    """
    if optimum.best is None:
        return None
    least = optimum.best.efficacy * (1.0 - NEAR_FRACTION)
    near = [trial for trial in optimum.trials if trial.is_within and trial.efficacy >= least]
    return min(near, key=lambda trial: (trial.share, -trial.efficacy))


def inference_profile(
    subject: Subject, slo_s: float, optimum: EfficacyOptimum, limit_latency_s: float
) -> InferenceShareProfile:
    """The profile that follows from a measured search and what it comes to (`settled_trial`).

    `limit_latency_s` is that of the same batch on the limit, twice the request.

    Raises InvalidRequest where no setting keeps the SLO, with one that would do.
    """
    best = settled_trial(optimum)
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
    """The sentence for an SLO that no setting keeps: which one would do, by the smallest latency of all trials."""
    smallest_s = optimum.smallest_latency_s
    if smallest_s is None:
        return "not one batch could be run, on any share; see what the function wrote, then profile again"
    enough_ms = int(smallest_s * 1e3 / EXECUTION_FRACTION) + 1
    return (
        f"an SLO of {slo_s * 1e3:.4g} ms is out of reach: a batch may take half of it, {optimum.bound_s * 1e3:.4g} ms, "
        f"and the fastest of {len(optimum.trials)} trials took {smallest_s * 1e3:.4g} ms; {enough_ms} ms would do"
    )


def shares_path(source: Path) -> Path:
    """Where the share profiles of a source file are: beside it, digits.py has digits.shares.json."""
    return source.with_name(f"{source.stem}.shares.json")


def read_share_profiles(path: Path) -> tuple[ShareProfile, ...]:
    """Read a file of profiles. Raises InvalidRequest for one that is missing, too large, or not as it was written."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from error
    again = "take it again: springtide profile FILE --shares"
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidRequest(f"{path} is over {_MAX_FILE_BYTES >> 20} MiB, which no share profile is; {again}")
    try:
        profiles = msgspec.json.decode(data, type=ShareProfileFile).profiles
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
    """The profile of one function of a source file; None where none was taken. Raises InvalidRequest."""
    path = shares_path(source)
    if not path.exists():
        return None
    return next((profile for profile in read_share_profiles(path) if profile.object_name == object_name), None)


def write_share_profile(path: Path, profile: ShareProfile) -> None:
    """Put a profile into its file, in place of an older one of the same function; the others stay.

    A file that is there and is no share profile is left alone. Raises InvalidRequest, StorageError.
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
