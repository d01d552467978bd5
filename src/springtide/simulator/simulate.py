"""`simulate`: what each policy would do with a trace on a cluster, as an answer of plain values."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from springtide.core.decision import Policy
from springtide.core.errors import InvalidRequest
from springtide.core.plugins import load_from_studies
from springtide.core.ports import Journal
from springtide.core.workload import WorkloadId
from springtide.scheduling.registry import make_policy
from springtide.scheduling.sharing.policy import Sharing
from springtide.simulator.fluid.faults import NodeFaults
from springtide.simulator.fluid.figures import RunSetting, figures_of, met_deadlines
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import OverheadRule, ProfiledSpeeds, Speeds, overhead_rule
from springtide.simulator.fluid.trace import TraceJobs, read_jobs
from springtide.simulator.parallel_runs import Progress, play_in_processes
from springtide.workloads.cluster import cluster_nodes
from springtide.workloads.profiles import Profiles
from springtide.workloads.trace import Trace

# What springtide-studies offers for `adaptive`: (trace, profiles, limit) -> the jobs, and what makes a run's speeds.
AdaptiveReader = Callable[[object, object, int | None], tuple[TraceJobs, Callable[[], Speeds]]]


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `simulate` that a run of one policy depends on, apart from trace and cluster."""

    overhead: str = "elasticflow"
    seed: int = 0
    limit: int | None = None
    format: str = "auto"
    draws: bool = False
    error_fraction: float = 0.0
    mtbf_hours: float | None = None
    repair_hours: float = 1.0
    feels_placement: bool = True
    strict: bool = True
    with_series: bool = False
    with_rows: bool = False
    adaptive: bool = False

    @property
    def is_as_predicted(self) -> bool:
        """Whether the truth is as policies are told: no error, no faults."""
        return self.error_fraction == 0.0 and self.mtbf_hours is None


def simulate(
    trace: str | Trace,
    cluster: str | tuple[int, int],
    policies: Sequence[str] | Mapping[str, Policy],
    *,
    overhead: str = "elasticflow",
    seed: int = 0,
    limit: int | None = None,
    profiles: str | Path | Profiles | None = None,
    format: str = "auto",
    draws: bool = False,
    error_fraction: float = 0.0,
    mtbf_hours: float | None = None,
    repair_hours: float = 1.0,
    feels_placement: bool = True,
    strict: bool = True,
    timer: Callable[[], float] | None = None,
    on_progress: Progress | None = None,
    journal: Callable[[str], Journal] | None = None,
    with_series: bool = False,
    with_rows: bool = False,
    num_processes: int = 1,
    adaptive: bool = False,
) -> dict[str, Any]:
    """Play a trace under each policy and return the figures by policy.

    `policies` are names of the registry, or policies by any name. With `draws`, fields that the trace's format lacks
    are drawn from the scaling tables and the seed. `error_fraction` is the spread of true speeds around the profiles,
    `mtbf_hours` the mean time between failures of a node; with either, each policy is also played without it, to find
    the cause of every missed deadline. With `strict` a promise that is broken though everything was as predicted raises
    InvariantViolation; without, it is counted. `timer` (CPU seconds) measures decisions and runs; without one those
    figures are None. `on_progress` is called with the policy and how many jobs have ended, of how many. `journal` makes
    the journal of a policy's run. With `num_processes` above 1 that many policies are played at a time, each in its own
    process and timed by its own CPU time; a policy that fails is then named under `errors`. With `adaptive`, which
    springtide[studies] brings, the trace is a workload of Pollux whose jobs change their batch, and `profiles` the
    folder of measurements (near the trace, if not given). Raises InvalidRequest on a bad trace or setting.
    """
    options = SimulationOptions(
        overhead=overhead,
        seed=seed,
        limit=limit,
        format=format,
        draws=draws,
        error_fraction=error_fraction,
        mtbf_hours=mtbf_hours,
        repair_hours=repair_hours,
        feels_placement=feels_placement,
        strict=strict,
        with_series=with_series,
        with_rows=with_rows,
        adaptive=adaptive,
    )
    named = cluster if isinstance(cluster, str) else f"{cluster[0]}x{cluster[1]}"
    makers = _makers(policies)
    if num_processes > 1 and len(policies) > 1:
        arguments = _plain_arguments(trace, policies, profiles, journal)
        arguments |= {"cluster": named, **msgspec.structs.asdict(options)}
        return play_in_processes(
            "springtide.simulator.simulate:simulate_policy",
            dict.fromkeys(policies, arguments),
            num_processes=num_processes,
            is_timed=timer is not None,
            on_progress=on_progress,
        )
    simulation = _Simulation(trace, named, options, profiles)
    for name, make in makers.items():
        on_jobs = None if on_progress is None else _with_name(on_progress, name)
        simulation.play(name, make, timer, on_jobs, None if journal is None else journal(name))
    return simulation.answer


def simulate_policy(
    name: str,
    arguments: Mapping[str, Any],
    *,
    timer: Callable[[], float] | None,
    on_progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """`simulate` with one policy, in a process of its own."""
    return simulate(
        policies=[name],
        timer=timer,
        on_progress=lambda _, num_ended, num_jobs: on_progress(num_ended, num_jobs),
        **arguments,
    )


class _Simulation:
    """One trace on one cluster, on which policies play one after the other."""

    def __init__(
        self,
        trace: str | Trace,
        cluster: str,
        options: SimulationOptions,
        profiles: str | Path | Profiles | None,
    ) -> None:
        self._nodes = cluster_nodes(cluster)
        num_devices = sum(len(node.devices) for node in self._nodes)
        devices_per_node = max(len(node.devices) for node in self._nodes)
        self._options = options
        self._profiles = profiles
        self._rule = overhead_rule(options.overhead, num_devices)
        self._setting = RunSetting(
            num_devices=num_devices,
            devices_per_node=devices_per_node,
            rule=self._rule,
        )
        self._adaptive_speeds: Callable[[], Speeds] | None = None
        if options.adaptive:
            read_adaptive: AdaptiveReader = load_from_studies("springtide.traces", "adaptive", "--adaptive")
            jobs, self._adaptive_speeds = read_adaptive(trace, profiles, options.limit)
        else:
            jobs = read_jobs(
                trace,
                num_devices,
                seed=options.seed,
                limit=options.limit,
                profiles=profiles,
                format=options.format,
                draws=options.draws,
            )
        self._arrivals = jobs.arrivals
        self._has_shares = any(job.share is not None for _, job in jobs.arrivals)
        self.answer = _header(trace, cluster, num_devices, options, self._rule, jobs)

    def play(
        self,
        name: str,
        make: Callable[[], Policy],
        timer: Callable[[], float] | None,
        on_progress: Callable[[int, int], None] | None,
        journal: Journal | None,
    ) -> None:
        """Let one policy play and add its figures to the answer."""
        options = self._options
        began_s = 0.0 if timer is None else timer()
        played = self._play(make(), name, options, timer, on_progress, journal)
        played.cpu_s = None if timer is None else timer() - began_s
        # A cause is found by the same run without it: a job that meets its deadline there missed it for that cause.
        met_without: dict[str, frozenset[WorkloadId]] = {}
        for cause, without in _without_causes(options).items():
            met_without[cause] = met_deadlines(self._play(make(), name, without, None, on_progress, None))
        self.answer["policies"][name] = figures_of(
            played,
            self._setting,
            met_without=met_without,
            with_series=options.with_series,
            with_rows=options.with_rows,
        )

    def _play(
        self,
        policy: Policy,
        name: str,
        options: SimulationOptions,
        timer: Callable[[], float] | None,
        on_progress: Callable[[int, int], None] | None,
        journal: Journal | None,
    ) -> FluidRunResult:
        faults = None
        if options.mtbf_hours is not None:
            faults = NodeFaults(
                [node.node_id for node in self._nodes],
                seed=options.seed,
                mtbf_hours=options.mtbf_hours,
                repair_hours=options.repair_hours,
            )
        return play(
            Sharing(inner=policy) if self._has_shares and not isinstance(policy, Sharing) else policy,
            self._arrivals,
            self._nodes,
            rule=self._rule,
            speeds=self._speeds(options),
            faults=faults,
            reports_progress=options.adaptive or not options.is_as_predicted,
            keeps_promises=self._options.strict and self._options.is_as_predicted,
            command=self._command(name),
            journal=journal,
            timer=timer,
            on_progress=on_progress,
        )

    def _speeds(self, options: SimulationOptions) -> Speeds:
        if self._adaptive_speeds is not None:
            return self._adaptive_speeds()
        return ProfiledSpeeds(
            devices_per_node=self._setting.devices_per_node,
            error_fraction=options.error_fraction,
            seed=options.seed,
            feels_placement=options.feels_placement,
            node_sizes={node.devices[0].accelerator: len(node.devices) for node in self._nodes},
        )

    def _command(self, policy: str) -> str:
        """The command that plays the same run again."""
        answer, options = self.answer, self._options
        words = ["springtide", "simulate", "--trace", str(answer["trace"]), "--cluster", str(answer["cluster"])]
        words += ["--policy", policy, "--overhead", options.overhead, "--seed", str(options.seed)]
        words += [] if options.limit is None else ["--jobs", str(options.limit)]
        words += ["--profiles", str(self._profiles)] if isinstance(self._profiles, str | Path) else []
        words += [] if options.format == "auto" else ["--format", options.format]
        words += ["--draw"] if options.draws else []
        words += [] if options.error_fraction == 0.0 else ["--error", str(options.error_fraction)]
        if options.mtbf_hours is not None:
            words += ["--mtbf", str(options.mtbf_hours), "--repair", str(options.repair_hours)]
        words += [] if options.feels_placement else ["--no-placement"]
        words += ["--adaptive"] if options.adaptive else []
        return shlex.join(words)


def _without_causes(options: SimulationOptions) -> dict[str, SimulationOptions]:
    """By cause of a miss, the options of a run without it: without faults, then without faults and error."""
    found: dict[str, SimulationOptions] = {}
    if options.mtbf_hours is not None:
        found["fault"] = msgspec.structs.replace(options, mtbf_hours=None)
    if options.error_fraction > 0.0:
        found["misprediction"] = msgspec.structs.replace(options, mtbf_hours=None, error_fraction=0.0)
    return found


def _makers(policies: Sequence[str] | Mapping[str, Policy]) -> dict[str, Callable[[], Policy]]:
    """What makes each policy by name. Raises InvalidRequest on an unknown name, before anything runs."""
    if isinstance(policies, Mapping):
        return {name: (lambda policy=policy: policy) for name, policy in policies.items()}  # type: ignore[misc]
    if not policies:
        raise InvalidRequest("no policy is named; `springtide policies` lists them")
    for name in policies:
        make_policy(name)
    return {name: (lambda name=name: make_policy(name)) for name in policies}  # type: ignore[misc]


def _plain_arguments(trace: object, policies: object, profiles: object, journal: object) -> dict[str, Any]:
    """The arguments that another process can be given as text. Raises InvalidRequest if one is a value in memory."""
    if not isinstance(trace, str) or isinstance(policies, Mapping) or isinstance(profiles, Profiles) or journal:
        raise InvalidRequest(
            "values in memory cannot go to other processes; name files and policies, or use one process"
        )
    return {"trace": trace, "profiles": None if profiles is None else str(profiles)}


def _with_name(on_progress: Progress, name: str) -> Callable[[int, int], None]:
    return lambda num_ended, num_jobs: on_progress(name, num_ended, num_jobs)


def _header(
    trace: str | Trace, cluster: str, num_devices: int, options: SimulationOptions, rule: OverheadRule, jobs: TraceJobs
) -> dict[str, Any]:
    header = {
        "trace": trace if isinstance(trace, str) else trace.name,
        "cluster": cluster,
        "seed": options.seed,
        "overhead": rule.name,
        "overheads_s": {**msgspec.structs.asdict(rule.pause), "cold_start_s": rule.cold_start_s},
        "profiles": jobs.profiles or None,
        "num_jobs": len(jobs.arrivals),
        "num_devices": num_devices,
        "skipped": sum(jobs.skipped.values()),
        "skipped_by_reason": jobs.skipped,
        "drawn": list(jobs.drawn),
        "policies": {},
    }
    if not options.is_as_predicted:
        header["error_fraction"] = options.error_fraction
        header["mtbf_hours"], header["repair_hours"] = options.mtbf_hours, options.repair_hours
    return header
