"""`springtide profile FILE --shares`: measures how much of a device a service or training function needs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from springtide.cli.jobs.flags import parse_params
from springtide.cli.loading import as_typed, find_service, find_training, import_file, split_target, uses_springtide
from springtide.cli.profiles.trials import chosen_text, ms_text, rate_text, trials_table
from springtide.cli.session import Session, refuse
from springtide.cli.tables.columns import align
from springtide.core.plugins import load_from_studies
from springtide.core.quantities import parse_duration_s
from springtide.core.workload import Entrypoint

if TYPE_CHECKING:
    from springtide.backends.sharing.trials import ShareTrials
    from springtide.client.functions import ServeFunction, Task, TrainFunction
    from springtide.perf.share_profile import InferenceShareProfile, Subject, TrainingShareProfile
    from springtide.runtime.profiling.share_profiler import ShareSpec

_NOT_OF_SHARES = (
    "communication",
    "workers",
    "sizes",
    "namespaces",
    "racks",
    "nic",
    "uplink",
    "layers",
    "micro_batch",
    "iterations",
)
_NOT_OF_SURFACES = ("shares", "call", "cpus", "batch", "params", "seed", *_NOT_OF_SHARES)
_NOT_OF_SERVICES = ("batch", "seed")
_NOT_OF_TRAINING = ("slos", "call")
_MAX_INPUT_BYTES = 1 << 24
_CONTRADICTION = (
    "trials contradict each other (something else was running?): take it again on a quiet machine before you rely on it"
)


def profile_share_of(
    session: Session, target: str | None, out: str | None, limit_s: float | None, options: Mapping[str, Any]
) -> None:
    """Run the search on recorded measurements, or measure FILE. Raises InvalidRequest, BackendError."""
    if options["surfaces"]:
        profile_surfaces = load_from_studies("springtide.profiles", "surface", "profile --surface")
        _refuse(options, _NOT_OF_SURFACES, "--surface plays on what was recorded, so --{} says nothing; leave it out")
        if target is not None or out is not None or limit_s is not None:
            refuse("--surface runs nothing and writes nothing; leave out FILE, --out and --limit")
        profile_surfaces(session, options["surfaces"], options["slos"], options["execs"])
        return
    _refuse(options, (*_NOT_OF_SHARES, "execs"), "--{} says nothing about shares of FILE; leave it or --shares out")
    if target is None:
        refuse("give the file to profile: springtide profile FILE --shares")
    if options["cpus"] is not None and not (math.isfinite(options["cpus"]) and options["cpus"] > 0.0):
        refuse(f"--cpus is how many cores make a device, got {options['cpus']:g}; for example 0.5")
    path, object_name = split_target(target)
    if not uses_springtide(path):
        refuse(f"{path.name} declares nothing to profile; put @st.serve on a class, or @st.train on a function")
    found = _find(import_file(path), path, object_name)
    from springtide.client.functions import ServeFunction

    if isinstance(found, ServeFunction):
        _refuse(options, _NOT_OF_SERVICES, "--{} is for training functions, {} is a service; leave it out", found.name)
        _profile_service(session, path, found, out, limit_s, options)
    else:
        _refuse(options, _NOT_OF_TRAINING, "--{} is for services, {} is trained; leave it out", found.name)
        _profile_training(session, path, found, out, limit_s, options)


def _refuse(options: Mapping[str, Any], names: Sequence[str], sentence: str, *values: str) -> None:
    flags = {"slos": "slo", "execs": "exec", "call": "input", "params": "param", "micro_batch": "micro-batch"}
    for name in names:
        if options[name]:
            refuse(sentence.format(flags.get(name, name), *values))


def _find(module: ModuleType, path: Path, name: str) -> ServeFunction[Any] | TrainFunction | Task:
    """The function or class to profile: the one with this name, or the file's only one. Raises InvalidRequest."""
    from springtide.client.functions import ServeFunction, Task, TrainFunction

    declared = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, Task)
        or (isinstance(value, ServeFunction | TrainFunction) and value.__module__ == module.__name__)
    }
    if not name and len(declared) > 1:
        choices = " or ".join(f"`springtide profile {as_typed(path)}:{choice} --shares`" for choice in declared)
        refuse(f"{path.name} has several to choose from: {choices}")
    chosen = declared.get(name) if name else next(iter(declared.values()), None)
    if isinstance(chosen, TrainFunction | Task):
        training = find_training(module, path, name)
        assert training is not None
        return training
    return find_service(module, path, name)


def _profile_service(
    session: Session,
    path: Path,
    found: ServeFunction[Any],
    out: str | None,
    limit_s: float | None,
    options: Mapping[str, Any],
) -> None:
    from springtide.core.options.kinds import check_params, objective_s
    from springtide.perf.share_profile import EXECUTION_FRACTION, chosen_trial, inference_profile
    from springtide.runtime.profiling.share_profiler import ShareSpec
    from springtide.solvers.search.share_search import BATCH_SIZES, limit_of, search_efficacy

    declared = found.options.values["slo"]
    if len(options["slos"]) > 1:
        refuse("a service has one SLO; give --slo once")
    if not options["slos"] and declared is None:
        refuse(f"{found.name} has no SLO to keep; give one: --slo 200ms, or @st.serve(slo='p99 < 200ms')")
    slo_s = parse_duration_s(options["slos"][0], "slo") if options["slos"] else objective_s(declared or 0.0)
    bound_s = slo_s * EXECUTION_FRACTION
    source = found.source()
    chosen = _out_path(path, out)
    spec = ShareSpec(
        entrypoint=Entrypoint(
            source_path=str(path), object_name=source.object_name, kind="class", import_root=source.import_root
        ),
        kind="inference",
        params={**check_params(found.options.values["params"]), **parse_params(options["params"])},
        call=_call(options["call"]),
        directory="",
        name="",
        orders_fd=-1,
        answers_fd=-1,
    )
    with _trials(session, spec, limit_s, options) as trials:
        batch_sizes = BATCH_SIZES if trials.is_batchable else BATCH_SIZES[:1]
        optimum = search_efficacy(lambda size, share: trials.latency_s(size, share, bound_s), bound_s, batch_sizes)
        best = chosen_trial(optimum)
        at_limit_s = trials.latency_s(best.batch_size, limit_of(best.share), bound_s) if best else 0.0
        subject = _subject(path, found.name, source.object_name, trials, options)
        profile = inference_profile(subject, slo_s, optimum, at_limit_s)
        enforced = trials.enforced
    _finish(session, path, chosen, profile, f"{service_text(profile)}\n\n{enforced}", "deploy", out)


def _profile_training(
    session: Session,
    path: Path,
    found: TrainFunction | Task,
    out: str | None,
    limit_s: float | None,
    options: Mapping[str, Any],
) -> None:
    import msgspec

    from springtide.perf.share_profile import training_profile
    from springtide.runtime.profiling.share_profiler import ShareSpec
    from springtide.solvers.search.share_bisection import search_shares

    source = found.source()
    chosen = _out_path(path, out)
    name = found.name or source.object_name
    job = found.options.as_local_job(name)
    job = msgspec.structs.replace(
        job,
        seed=job.seed if options["seed"] is None else options["seed"],
        global_batch_size=options["batch"] or job.global_batch_size,
    )
    spec = ShareSpec(
        entrypoint=Entrypoint(source_path=str(path), object_name=source.object_name, import_root=source.import_root),
        kind="training",
        params={**job.params, **parse_params(options["params"])},
        job=job,
        directory="",
        name="",
        orders_fd=-1,
        answers_fd=-1,
    )
    with _trials(session, spec, limit_s, options) as trials:
        pair = search_shares(trials.throughput_per_s)
        profile = training_profile(_subject(path, name, source.object_name, trials, options), pair)
        enforced = trials.enforced
    _finish(session, path, chosen, profile, f"{training_text(profile)}\n\n{enforced}", "run", out)


def _trials(session: Session, spec: ShareSpec, limit_s: float | None, options: Mapping[str, Any]) -> ShareTrials:
    from springtide.backends.local.devices import discover_gpus
    from springtide.backends.sharing.trials import DEADLINE_S, ShareTrials

    if discover_gpus():
        session.note("trials are held to parts of a processor's time: of a GPU, as here, what they find says nothing")
    return ShareTrials(spec, device_cpus=options["cpus"] or 1.0, deadline_s=limit_s or DEADLINE_S, tell=session.note)


def _subject(path: Path, name: str, object_name: str, trials: ShareTrials, options: Mapping[str, Any]) -> Subject:
    from springtide.perf.share_profile import Subject

    return Subject(
        name=name,
        object_name=object_name,
        source_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        mechanism=trials.mechanism,
        device_cpus=options["cpus"] or 1.0,
        memory_mb=trials.peak_mb,
    )


def _out_path(path: Path, out: str | None) -> Path:
    from springtide.perf.share_profile import shares_path

    chosen = shares_path(path) if out is None else Path(out).expanduser()
    if not chosen.absolute().parent.is_dir():
        refuse(f"{chosen} cannot be written: there is no folder {chosen.parent}")
    return chosen


def _call(given: str | None) -> str:
    """The request given on the command line, or the content of the file @NAME."""
    if given is None or not given.startswith("@"):
        return given or ""
    try:
        with Path(given[1:]).expanduser().open("rb") as file:
            data = file.read(_MAX_INPUT_BYTES + 1)
        if len(data) > _MAX_INPUT_BYTES:
            refuse(f"{given[1:]} is over {_MAX_INPUT_BYTES >> 20} MiB; give a request with one item")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        _unreadable(given[1:], error)


def _unreadable(name: str, error: Exception) -> NoReturn:
    refuse(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}; --input @FILE is a request as JSON")


def _finish(
    session: Session,
    path: Path,
    chosen: Path,
    profile: InferenceShareProfile | TrainingShareProfile,
    text: str,
    verb: str,
    out: str | None,
) -> None:
    from springtide.perf.share_profile import write_share_profile

    write_share_profile(chosen, profile)
    use = f"springtide {verb} {as_typed(path)} --share auto" if out is None else "move it beside FILE to use it"
    session.answer(profile, text, f"written to {chosen}; {'use it: ' if out is None else ''}{use}")


def service_text(profile: InferenceShareProfile) -> str:
    """A service's trials and the chosen share, as text."""
    best = next(
        trial
        for trial in profile.trials
        if (trial.batch_size, trial.share) == (profile.batch_size, profile.share.request)
    )
    lines = [
        f"{profile.name}: SLO {ms_text(profile.slo_s)}, of which a batch may take half",
        "",
        trials_table(profile.trials, best),
        "",
        f"after {len(profile.trials)} trials: {chosen_text(best)}",
        f"a replica answers {rate_text(profile.request_capacity_per_s)} samples a second on the request and "
        f"{rate_text(profile.capacity_per_s)} on the limit (one trial more, {ms_text(profile.limit_latency_s)} "
        f"a batch); it holds {profile.share.memory_mb} MB",
    ]
    return "\n".join(lines if profile.is_consistent else [*lines, _CONTRADICTION])


def training_text(profile: TrainingShareProfile) -> str:
    """A training function's trials and the chosen share, as text."""
    whole = profile.throughput_per_s
    rows = [
        (
            f"{trial.share:.1%}",
            rate_text(trial.throughput_per_s),
            f"{trial.throughput_per_s / whole:.1%}",
            {profile.share.request: "request", profile.share.limit: "limit"}.get(trial.share, ""),
        )
        for trial in profile.trials
    ]
    num_runs = sum(trial.num_runs for trial in profile.trials)
    lines = [
        f"{profile.name}: {num_runs} trials",
        "",
        align(("SHARE", "SAMPLES/S", "OF THE WHOLE", ""), rows),
        "",
        f"request {profile.share.request:.1%} keeps {profile.request_throughput_per_s / whole:.1%} of the throughput "
        f"on a whole device, limit {profile.share.limit:.1%} keeps {profile.limit_throughput_per_s / whole:.1%}",
        f"a worker holds {profile.share.memory_mb} MB",
    ]
    if not profile.is_consistent:
        lines.append(_CONTRADICTION)
    return "\n".join(lines)
