"""`springtide profile`: measures a step's timeline, a model's layers, a function's share, or all-reduces."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from springtide.cli.jobs.flags import parse_params
from springtide.cli.loading import as_typed, find_training, import_file, split_target, uses_springtide
from springtide.cli.session import Session, common_options, refuse
from springtide.cli.tables.columns import count
from springtide.core.errors import BackendError
from springtide.core.quantities import parse_duration_s, parse_size_bytes
from springtide.core.workload import Entrypoint

COMMUNICATION = "communication"
_WORKER_COUNTS = (1, 2, 4, 8)
_NUM_ITERATIONS = 10
_NUM_SAMPLED_WORKERS = 4
_MAX_NODES = 8
# The options of `profile FILE` and of `profile communication`.
_OF_FUNCTIONS = ("batch", "iterations", "params", "communication", "seed")
_OF_COMMUNICATION = ("workers", "sizes")
_OF_SHARES = ("shares", "slos", "execs", "call", "cpus", "surfaces")
_NOT_OF_LAYERS = ("batch", "iterations", "params", "communication", "namespaces", "racks", "nic", "uplink")


@click.command()
@click.argument("target", metavar="FILE[:FUNCTION]|communication", required=False)
@click.option("--batch", type=click.IntRange(min=2), metavar="N", help="The global batch size, over both workers.")
@click.option("--iterations", type=click.IntRange(min=1), metavar="N", help="Measure so many. [default: 10]")
@click.option("--param", "params", multiple=True, metavar="K=V", help="For the function: ctx.params[K]. Repeatable.")
@click.option("--seed", type=click.IntRange(min=0), help="Where all chance comes from.")
@click.option(
    "--communication", metavar="FILE", help="Predict with these samples of `springtide profile communication`."
)
@click.option("--workers", type=click.IntRange(min=2), metavar="N", help="communication: up to so many. [default: 4]")
@click.option("--sizes", metavar="SIZE,SIZE", help="communication: of these sizes, as 64KiB,1MiB.")
@click.option(
    "--namespaces", is_flag=True, help="Over links of limited rates, between network namespaces of this machine."
)
@click.option("--racks", metavar="N,N", help="With --namespaces: so many nodes in each rack. [default: 2,2]")
@click.option("--nic", metavar="SIZE", help="With --namespaces: a node's link, bytes a second. [default: 50MB]")
@click.option("--uplink", metavar="SIZE", help="With --namespaces: a rack's link, bytes a second. [default: 25MB]")
@click.option("--layers", is_flag=True, help="The model's layers, for a pipeline of functions. FILE has an st.Task.")
@click.option("--micro-batch", type=click.IntRange(min=1), metavar="N", help="--layers: so many samples. [default: 4]")
@click.option("--shares", is_flag=True, help="The share of a device that the function, or the service, needs.")
@click.option("--slo", "slos", multiple=True, metavar="TIME", help="--shares, --surface: a request's latency to keep.")
@click.option(
    "--exec", "execs", multiple=True, metavar="TIME", help="--surface: what a batch may take, in place of --slo."
)
@click.option("--input", "call", metavar="JSON", help="--shares: a request of the service, as it is sent to it.")
@click.option("--cpus", type=float, metavar="N", help="--shares: so many cores are a device. [default: 1]")
@click.option(
    "--surface", "surfaces", multiple=True, metavar="CSV", help="Search a recorded surface instead. Repeatable."
)
@click.option("--limit", metavar="TIME", help="End it after this long. [default: 10m, communication: 1h]")
@click.option(
    "--out",
    metavar="FILE",
    help="Where the result goes. [default: FILE's name with .profile.json, .layers.json or .shares.json]",
)
@common_options
@click.pass_obj
def profile(session: Session, /, target: str | None, limit: str | None, out: str | None, **options: Any) -> None:
    """Measure one step of FILE's function on two workers: its operators, gradient buckets and exchanges.

    With --layers, what each layer of a task's model takes and holds, for a pipeline of functions. With --shares, how
    much of a device a training function or a service needs. `springtide profile communication` measures all-reduces
    instead. None of them needs a running platform.
    """
    if options["surfaces"] or options["shares"]:
        from springtide.cli.profiles.shares import profile_share_of

        profile_share_of(session, target, out, None if limit is None else parse_duration_s(limit, "limit"), options)
        return
    _refuse_of_shares(options)
    if target is None:
        refuse("give the file to profile: springtide profile FILE")
    if importlib.util.find_spec("torch") is None:
        raise BackendError("measuring needs torch, which is not installed here: pip install 'springtide[runtime]'")
    limit_s = None if limit is None else parse_duration_s(limit, "limit")
    is_communication = target == COMMUNICATION
    _check_options(options, is_communication=is_communication)
    if options["layers"]:
        from springtide.cli.profiles.layers import profile_layers

        profile_layers(session, target, out, limit_s, options["micro_batch"], options["seed"] or 0)
    elif is_communication:
        _profile_communication(session, Path(out or f"{COMMUNICATION}.json"), limit_s, options)
    else:
        _profile_function(session, target, out, limit_s, options)


def _refuse_of_shares(options: Mapping[str, Any]) -> None:
    flags = MappingProxyType({"slos": "slo", "execs": "exec", "call": "input"})
    for option in _OF_SHARES:
        if options[option]:
            refuse(f"--{flags.get(option, option)} is about shares of a device; add --shares, or leave it out")


def _check_options(options: Mapping[str, Any], *, is_communication: bool) -> None:
    wrong = _OF_FUNCTIONS if is_communication else _OF_COMMUNICATION
    flags = MappingProxyType({"params": "param"})
    if options["layers"]:
        for option in (*_NOT_OF_LAYERS, *_OF_COMMUNICATION):
            if options[option]:
                refuse(f"--{flags.get(option, option)} says nothing about layers; leave it or --layers out")
    if options["micro_batch"] and not options["layers"]:
        refuse("--micro-batch is the size of what layers are measured with; add --layers")
    for option in wrong:
        if options[option]:
            owner = "FILE[:FUNCTION]" if is_communication else "communication"
            refuse(f"--{flags.get(option, option)} is for `springtide profile {owner}`; leave it out here")


def _profile_function(
    session: Session, target: str, out: str | None, limit_s: float | None, options: Mapping[str, Any]
) -> None:
    from springtide.cli.profiles.text import profile_text
    from springtide.perf.communication.query import read_samples
    from springtide.perf.timeline import exchange_intervals
    from springtide.runtime.profiling.step_profiling import DEADLINE_S, profile_function, with_speed_curve

    path, object_name = split_target(target)
    found = find_training(import_file(path), path, object_name) if uses_springtide(path) else None
    if found is None:
        refuse(f"{path.name} has no training function; decorate one with @st.train, a plain script cannot be profiled")
    source = found.source()
    chosen = Path(out or f"{path.stem}.profile.json")
    _check_folder(chosen)
    samples = read_samples(Path(options["communication"])) if options["communication"] else None
    declared = found.options.as_local_job(found.name or source.object_name)
    measured = profile_function(
        Entrypoint(source_path=str(path), object_name=source.object_name, import_root=source.import_root),
        name=declared.name,
        params={**declared.params, **parse_params(options["params"])},
        seed=declared.seed if options["seed"] is None else options["seed"],
        global_batch_size=options["batch"] or declared.global_batch_size,
        num_iterations=options["iterations"] or _NUM_ITERATIONS,
        network=_network(session, options),
        deadline_s=limit_s or DEADLINE_S,
        on_progress=session.note,
    )
    answer = with_speed_curve(measured, _WORKER_COUNTS, samples, options["communication"] or "")
    _write(chosen, answer)
    width = shutil.get_terminal_size((100, 24)).columns
    text = profile_text(answer, exchange_intervals(answer.step, answer.exchange_s), min(width, 120))
    hint = f"written to {chosen}; use it: springtide quote {as_typed(path)} --profile {chosen}"
    session.answer(answer, text, hint)


def _profile_communication(session: Session, out: Path, limit_s: float | None, options: Mapping[str, Any]) -> None:
    from springtide.cli.profiles.text import samples_text
    from springtide.perf.communication.query import write_samples
    from springtide.runtime.profiling.collective_sampler import DEADLINE_S, SIZES_BYTES, sample_here, sample_namespaces

    _check_folder(out)
    sizes = [parse_size_bytes(size, "sizes") for size in (options["sizes"] or "").split(",") if size.strip()]
    session.note("measuring; other work on this machine makes the numbers worse ...")
    network = _network(session, options)
    if network is not None:
        num_slots = -(-(options["workers"] or 2 * network.num_nodes) // network.num_nodes)
        samples = sample_namespaces(
            network, num_slots, sizes or SIZES_BYTES, deadline_s=limit_s or DEADLINE_S, on_progress=session.note
        )
    else:
        num_workers = options["workers"] or _NUM_SAMPLED_WORKERS
        samples = sample_here(
            num_workers, sizes or SIZES_BYTES, deadline_s=limit_s or DEADLINE_S, on_progress=session.note
        )
    write_samples(out, samples)
    told = count(len(samples.samples), "sample")
    hint = f"{told} written to {out}; use them: springtide profile FILE --communication {out}"
    session.answer(samples, f"{samples.source}\n\n{samples_text(samples)}", hint)


def _network(session: Session, options: Mapping[str, Any]) -> Any:
    """The network to measure over; None for this machine as it is, with a note if it allows no namespaces."""
    from springtide.runtime.profiling.namespaces import RackNetwork, why_not_here

    if not options["namespaces"]:
        for option in ("racks", "nic", "uplink"):
            if options[option]:
                refuse(f"--{option} says what the network of --namespaces is to be; add --namespaces")
        return None
    if refusal := why_not_here():
        session.note(refusal)
        return None
    usual = RackNetwork()
    racks = tuple(int(size) if size.strip().isdecimal() else 0 for size in (options["racks"] or "2,2").split(","))
    if min(racks) < 1 or not 2 <= sum(racks) <= _MAX_NODES:
        refuse(f"--racks {options['racks']!r} is no network; give 2 to {_MAX_NODES} nodes by rack, as 2,2")
    return RackNetwork(
        racks=racks,
        nic_bytes_per_s=_rate(options["nic"], usual.nic_bytes_per_s),
        uplink_bytes_per_s=_rate(options["uplink"], usual.uplink_bytes_per_s),
    )


def _rate(given: str | None, usual: float) -> float:
    return usual if given is None else float(parse_size_bytes(given, "rate"))


def _check_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        refuse(f"{path} cannot be written: there is no folder {path.parent}")


def _write(path: Path, answer: Any) -> None:
    import msgspec

    path.write_bytes(msgspec.json.format(msgspec.json.encode(answer), indent=1) + b"\n")
