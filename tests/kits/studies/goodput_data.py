"""A folder of measurements as Pollux's are, of one small application whose numbers can be reckoned by hand."""

from __future__ import annotations

from pathlib import Path


def step_s(num_nodes: int, num_workers: int, local_batch_size: int) -> tuple[float, float]:
    """A tenth of a second for each sample of the local batch, and an exchange that grows with nodes and workers."""
    sync_s = 0.1 * (num_nodes - 1) + 0.02 * (num_workers - 1)
    return round(0.1 * local_batch_size + sync_s, 6), round(sync_s, 6)


def write_application(root: Path, name: str = "toy") -> Path:
    """Rings on up to two nodes, more nodes by their number, and trainings of two epochs at 8 and at 32 samples.

    At 8 samples epochs end after 100 and 200 steps; the noise is 3 (then 1) over 1, so that 16 samples are worth 1.6
    (then 4/3) steps of 8.
    """
    folder = root / "profiles" / name
    folder.mkdir(parents=True)
    lines = ["placement,local_bsz,step_time,sync_time"]
    for placement in ("1", "2", "3", "4", "11", "12", "22", "44"):
        counts = [int(digit) for digit in placement]
        for local in (4, 8):
            step, sync = step_s(len(counts), sum(counts), local)
            lines.append(f"{placement},{local},{step},{sync}")
    (folder / "placements.csv").write_text("\n".join(lines) + "\n")
    lines = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    for num_nodes, num_workers in ((6, 6), (6, 24), (16, 16), (16, 64)):
        for local in (4, 8):
            step, sync = step_s(num_nodes, num_workers, local)
            lines.append(f"{num_nodes},{num_workers},{local},{step},{sync}")
    (folder / "scalability.csv").write_text("\n".join(lines) + "\n")
    header = "progress,iteration,metric,grad_sqr,grad_var"
    (folder / "validation-8.csv").write_text(f"{header}\n100,100,0.5,1,3\n200,200,0.6,1,1\n")
    (folder / "validation-32.csv").write_text(f"{header}\n101,40,0.5,1,3\n203,90,0.6,1,1\n")
    return root


def write_workload(root: Path, number: int = 1, num_jobs: int = 3, *, load: str = "workloads") -> Path:
    """Jobs half a minute apart whose owners ask for two workers and a batch of 16."""
    folder = root / "workloads-osdi21" / load
    folder.mkdir(parents=True, exist_ok=True)
    rows = [f"toy-{index},{10 + 30 * index},toy,2,16" for index in range(num_jobs)]
    path = folder / f"workload-{number}.csv"
    path.write_text("\n".join(["name,time,application,num_replicas,batch_size", *rows]) + "\n")
    return path
