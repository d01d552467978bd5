"""A policy plays a workload of Pollux on the cluster of the published runs, with their cost of changing a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from springtide.core.decision import Policy
from springtide.core.errors import InvalidRequest
from springtide.core.ports import Journal
from springtide.core.resources import Node, make_node
from springtide.simulator.fluid.play import FluidRunResult, play
from springtide.simulator.fluid.rules import overhead_rule
from springtide.simulator.fluid.trace import TraceJobs
from springtide.workloads.formats.pollux import read
from springtide.workloads.trace import Trace
from springtide_studies.adaptive.jobs import BatchRule, find_measurements_near, goodput_arrivals
from springtide_studies.adaptive.speeds import GoodputSpeeds
from springtide_studies.adaptive.truth import DEVICES_PER_NODE, MAX_NODES, AppTruth, make_truths
from springtide_studies.workloads.pollux_tables import read_applications


class GoodputSetting(msgspec.Struct, frozen=True, kw_only=True):
    """How a workload is played; see `goodput_arrivals`, `GoodputSpeeds` and `overhead_rule`."""

    overhead: str = "pollux"
    batch: BatchRule = "adaptive"
    knows_length: bool = True
    whole_seconds: bool = False
    num_nodes: int = MAX_NODES


def play_workload(
    policy: Policy,
    workload: Path | Trace,
    truths: Path | Mapping[str, AppTruth],
    setting: GoodputSetting | None = None,
    *,
    timer: Callable[[], float] | None = None,
    journal: Journal | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    command: str = "",
) -> FluidRunResult:
    """Let a policy play a workload to its end. `truths` are tables, or the folder of all applications' measurements.

    Raises InvalidRequest on a bad file, InvariantViolation if the run breaks an invariant.
    """
    chosen = setting or GoodputSetting()
    trace = read(workload) if isinstance(workload, Path) else workload
    known = make_truths(read_applications(truths)) if isinstance(truths, Path) else truths
    return play(
        policy,
        goodput_arrivals(trace, known, batch=chosen.batch, knows_length=chosen.knows_length),
        make_nodes(chosen.num_nodes),
        rule=overhead_rule(chosen.overhead, chosen.num_nodes * DEVICES_PER_NODE),
        speeds=GoodputSpeeds(known, whole_seconds=chosen.whole_seconds),
        reports_progress=True,
        command=command,
        journal=journal,
        timer=timer,
        on_progress=on_progress,
    )


def read_goodput_jobs(
    workload: object, profiles: object, limit: int | None
) -> tuple[TraceJobs, Callable[[], GoodputSpeeds]]:
    """The first `limit` jobs of a workload's file on its own clock, and what makes the speeds of a run of them.

    Speeds follow from the measurements in `profiles`, without it from those near the file. `springtide simulate
    --adaptive` loads this by its entry point. Raises InvalidRequest on a bad file, or if these are no paths.
    """
    if not isinstance(workload, str | Path) or not isinstance(profiles, str | Path | None):
        raise InvalidRequest("jobs that change their batch are read from files; name the workload and the folder")
    path = Path(workload)
    folder = find_measurements_near(path) if profiles is None else Path(profiles)
    truths = make_truths(read_applications(folder))
    arrivals = goodput_arrivals(read(path, limit), truths)
    return TraceJobs(name=path.stem, arrivals=arrivals, profiles=folder.name), lambda: GoodputSpeeds(truths)


def make_nodes(num_nodes: int = MAX_NODES) -> list[Node]:
    """The nodes of the published runs: four devices each, on one switch."""
    return [make_node(f"node-{index:03d}", DEVICES_PER_NODE, kind="gpu") for index in range(num_nodes)]
