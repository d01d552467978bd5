"""Golden traces: short scenarios under each policy as text. Run as a program with `--write DIR`, it writes them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from springtide.core.events import (
    CancelRequested,
    JobSubmitted,
    PauseRequested,
    ResumeRequested,
    ScaleRequested,
    ServiceDeployed,
)
from springtide.core.resources import make_node
from springtide.core.shares import make_share
from springtide.core.workload import WorkloadId
from springtide.scheduling.registry import make_policy
from springtide_studies.fault_seeds.seeds import FaultRun, write_step
from springtide_studies.fault_seeds.workload import LoadProfile, OwnerRequest, Workload, make_job, make_service


def _deadlines() -> Workload:
    """Three elastic jobs of which the last to arrive is the most urgent."""
    jobs = (
        (0.0, make_job("patient", num_samples=3200, samples_per_s=100.0, workers=(1, 4))),
        (4.0, make_job("steady", num_samples=1600, samples_per_s=100.0, workers=(1, 2), deadline_s=60.0)),
        (8.0, make_job("urgent", num_samples=3200, samples_per_s=100.0, workers=(1, 4), deadline_s=28.0)),
    )
    return Workload(requests=tuple(OwnerRequest(at_s=at_s, event=JobSubmitted(job=job)) for at_s, job in jobs))


def _service() -> Workload:
    """A service wakes up, needs devices that a job has, and goes back to sleep."""
    service = make_service("answers", max_replicas=2)
    job = make_job("fits-around", num_samples=2400, samples_per_s=100.0, workers=(1, 3))
    requests = (
        OwnerRequest(at_s=0.0, event=JobSubmitted(job=job)),
        OwnerRequest(at_s=1.0, event=ServiceDeployed(service=service)),
        OwnerRequest(at_s=40.0, event=CancelRequested(workload_id=service.service_id)),
    )
    load = LoadProfile(
        service_id=service.service_id,
        start_s=2.0,
        end_s=14.0,
        base_per_s=40.0,
        wave_per_s=0.0,
        period_s=60.0,
        service_time_s=0.15,
    )
    return Workload(requests=requests, loads=(load,))


def _owners() -> Workload:
    """Owners pause, resume and cancel; one job's code raises."""
    paused = make_job("paused", num_samples=1600, samples_per_s=100.0, workers=(1, 2))
    cancelled = make_job("cancelled", num_samples=6400, samples_per_s=100.0)
    broken = make_job("broken", num_samples=800, samples_per_s=100.0, poison="raise")
    return Workload(
        requests=(
            OwnerRequest(at_s=0.0, event=JobSubmitted(job=paused)),
            OwnerRequest(at_s=0.5, event=JobSubmitted(job=cancelled)),
            OwnerRequest(at_s=1.0, event=JobSubmitted(job=broken)),
            OwnerRequest(at_s=4.0, event=PauseRequested(job_id=paused.job_id)),
            OwnerRequest(at_s=9.0, event=CancelRequested(workload_id=WorkloadId("cancelled"))),
            OwnerRequest(at_s=12.0, event=ResumeRequested(job_id=paused.job_id)),
        )
    )


def _loans() -> Workload:
    """By night both servers of inference are loaned; the morning takes them back from a rigid and an elastic job."""
    rigid = make_job("rigid", num_samples=1200, samples_per_s=50.0, workers=(2, 2), elastic=False, grace_s=3.0)
    elastic = make_job("elastic", num_samples=3200, samples_per_s=50.0, workers=(1, 4), grace_s=2.0)
    service = make_service("answers", max_replicas=1, idle_s=2.0, grace_s=2.0)
    bounds = ((8.0, 1, 2), (13.0, 3, 4), (20.0, 0, 1))
    return Workload(
        requests=(
            OwnerRequest(at_s=0.0, event=JobSubmitted(job=rigid)),
            OwnerRequest(at_s=1.0, event=JobSubmitted(job=elastic)),
            OwnerRequest(at_s=2.0, event=ServiceDeployed(service=service)),
            *(
                OwnerRequest(
                    at_s=at_s, event=ScaleRequested(workload_id=service.service_id, minimum=least, maximum=most)
                )
                for at_s, least, most in bounds
            ),
            OwnerRequest(at_s=45.0, event=CancelRequested(workload_id=service.service_id)),
        ),
        day_s=30.0,
    )


def _shares() -> Workload:
    """A service and a job on parts of one device, a job that has the other one whole, and a share that is changed."""
    service = make_service("answers", min_replicas=1, max_replicas=2, share=make_share(0.3, 0.6, 300))
    beside = make_job("beside", num_samples=1200, samples_per_s=100.0, share=make_share(0.4, 0.8, 400))
    whole = make_job("whole", num_samples=1600, samples_per_s=100.0, workers=(1, 2))
    late = make_job("late", num_samples=400, samples_per_s=100.0, share=make_share(0.5, 0.5, 500))
    larger = replace(service, share=make_share(0.4, 0.6, 300))
    return Workload(
        requests=(
            OwnerRequest(at_s=0.0, event=ServiceDeployed(service=service)),
            OwnerRequest(at_s=1.0, event=JobSubmitted(job=beside)),
            OwnerRequest(at_s=2.0, event=JobSubmitted(job=whole)),
            OwnerRequest(at_s=6.0, event=JobSubmitted(job=late)),
            OwnerRequest(at_s=10.0, event=ServiceDeployed(service=larger)),
            OwnerRequest(at_s=45.0, event=CancelRequested(workload_id=service.service_id)),
        ),
        loads=(
            LoadProfile(
                service_id=service.service_id,
                start_s=2.0,
                end_s=40.0,
                base_per_s=10.0,
                wave_per_s=8.0,
                period_s=20.0,
                service_time_s=0.15,
            ),
        ),
    )


# The policies that people run platforms with; rivals of these are looked at in figures, not line by line.
GOLDEN_POLICIES = ("edf", "elastic", "elasticflow", "fifo", "springtide")
# Those under which servers change hands.
LOANING_POLICIES = ("tide/springtide", "two-way/fifo")
# Those under which devices are held in parts.
SHARING_POLICIES = ("dilu/springtide",)
SCENARIOS: Mapping[str, Workload] = MappingProxyType(
    {"deadlines": _deadlines(), "service": _service(), "owners": _owners(), "loans": _loans(), "shares": _shares()}
)
_PLAIN = (make_node("node", 4),)
_PAIR = (make_node("node", 2, memory_mb=1000),)
_POOLED = (
    make_node("lent-0", 2, pool="inference"),
    make_node("lent-1", 2, pool="inference"),
    make_node("own", 2, pool="training"),
)


def golden_trace(scenario: str, policy: str) -> str:
    """The whole journal of a scenario under a policy, a line for each event and action."""
    nodes = {"loans": _POOLED, "shares": _PAIR}.get(scenario, _PLAIN)
    run = FaultRun(0, lambda: make_policy(policy), num_faults=0.0, workload=SCENARIOS[scenario], nodes=nodes)
    run.run()
    lines = [f"# {scenario} under {policy}"]
    for _, step in run.journal.read():
        lines.append(f"{step.now_s:.3f} s")
        write_step(step, lines.append)
    return "\n".join(lines) + "\n"


def golden_names() -> list[tuple[str, str]]:
    """Every scenario with every policy that it is about."""
    special = {"loans": LOANING_POLICIES, "shares": SHARING_POLICIES}
    return [(scenario, policy) for scenario in SCENARIOS for policy in special.get(scenario, GOLDEN_POLICIES)]


def golden_file(scenario: str, policy: str) -> str:
    """The name of the file that holds a trace."""
    return f"{scenario}.{policy.replace('/', '-')}.txt"


def main(arguments: list[str] | None = None) -> int:
    """Write the traces anew, or print where they differ; 1 if they do."""
    parser = argparse.ArgumentParser(prog="python -m springtide_studies.fault_seeds.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write them anew")
    parser.add_argument("directory", type=Path, nargs="?", default=Path("tests/golden"))
    chosen = parser.parse_args(arguments)
    changed = []
    for scenario, policy in golden_names():
        path, text = chosen.directory / golden_file(scenario, policy), golden_trace(scenario, policy)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        changed.append(path.name)
        if chosen.write:
            path.write_text(text, encoding="utf-8")
    for name in changed:
        sys.stdout.write(f"{'wrote' if chosen.write else 'differs:'} {name}\n")
    return 1 if changed and not chosen.write else 0


if __name__ == "__main__":
    sys.exit(main())
