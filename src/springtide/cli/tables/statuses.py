"""Statuses as text: aligned tables, progress lines, details. Pure functions of core.status."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.cli.tables.columns import (
    UNKNOWN,
    align,
    bounds,
    count,
    duration,
    number,
    pause,
    percent,
    shorten,
    slack,
)
from springtide.cli.tables.deadlines import deadline_text, promise_text
from springtide.cli.tables.environment import environment_pairs
from springtide.cli.tables.functions import (
    function_details,
    function_pairs,
    functions_cell,
    usd,
)
from springtide.cli.tables.search import search_cell, search_details, search_pairs
from springtide.cli.tables.shares import scaling_pairs, share_pairs, share_range, start_pairs
from springtide.core.quantities import format_duration
from springtide.core.status.platform import JobStatus, PlatformStatus, ServiceStatus
from springtide.core.status.pods import ClusterStatus, PodStatus
from springtide.core.workload import JobState

# Layouts of the progress line, from the widest on: the bar's width, and the parts that are shown.
_LAYOUTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (16, ("loss", "metrics", "speed", "eta", "slack", "cost")),
    (16, ("loss", "metrics", "speed", "eta", "slack")),
    (16, ("loss", "metrics", "eta", "slack")),
    (8, ("loss", "metrics", "eta", "slack")),
    (8, ("loss", "eta", "slack")),
    (8, ("loss", "eta")),
    (8, ("eta",)),
    (0, ("loss", "eta")),
    (0, ("eta",)),
    (0, ()),
)

# The API server sends something about once a minute, also without changes.
_SILENT_S = 150.0


def steps(job: JobStatus) -> str:
    """Like 120/500, or 120 while the length is unknown."""
    if not job.has_steps:
        return UNKNOWN
    return str(job.step) if job.total_steps is None else f"{job.step}/{job.total_steps}"


def jobs_table(jobs: Sequence[JobStatus], width: int | None = None, now_s: float | None = None) -> str:
    """One line for each job; with `now_s`, waiting jobs show their planned start."""
    has_batches = any(job.batch_bounds is not None for job in jobs)
    # Columns for place and cost are shown only if a job runs on functions.
    has_functions = any(job.on for job in jobs)
    rows = [
        (
            job.job_id,
            job.state,
            *((job.on or "cluster",) if has_functions else ()),
            percent(job.progress_fraction),
            steps(job),
            _workers_cell(job),
            *((_batch_cell(job), number(job.noise_scale, 3)) if has_batches else ()),
            loss_text(job) or UNKNOWN,
            _eta_cell(job, now_s),
            _slack_cell(job),
            *((UNKNOWN if job.cost_usd is None else usd(job.cost_usd),) if has_functions else ()),
            shorten(_reason_cell(job, now_s)),
        )
        for job in jobs
    ]
    place = ("ON",) if has_functions else ()
    batch = ("BATCH", "NOISE") if has_batches else ()
    cost = ("COST",) if has_functions else ()
    header = ("JOB", "STATE", *place, "PROGRESS", "STEP", "WORKERS", *batch, "LOSS", "ETA", "SLACK", *cost, "REASON")
    return align(header, rows, width)


def _reason_cell(job: JobStatus, now_s: float | None) -> str:
    """The reason of its state; while it is stalled, for how long."""
    if job.stalled_since_s is None or now_s is None:
        return job.reason
    return f"STALLED: no step for {format_duration(now_s - job.stalled_since_s)}, the last was {steps(job)}"


def _batch_cell(job: JobStatus) -> str:
    if job.batch_bounds is None:
        return str(job.global_batch_size)
    return f"{job.global_batch_size} of {bounds(*job.batch_bounds)}"


def _batch_pairs(job: JobStatus) -> list[tuple[str, str]]:
    """The rows about the global batch: its fixed size, or its present size and the gradient noise."""
    if job.batch_schedule:
        return []
    if job.batch_bounds is None:
        return [("global batch", f"{job.global_batch_size} (whatever the number of workers)")]
    batch = f"{job.global_batch_size} of {bounds(*job.batch_bounds)}, {job.initial_batch_size} at first"
    if job.learning_rate_factor is not None:
        batch += f", learning rate x{number(job.learning_rate_factor, 3)}"
    noise = goodput = ""
    if job.noise_scale is not None:
        noise = f"scale {number(job.noise_scale, 3)} samples, a sample brings {percent(job.efficiency_fraction)}"
    if job.goodput_samples_per_s is not None and not JobState(job.state).is_terminal:
        goodput = f"{job.goodput_samples_per_s:.0f} samples/s as of the first batch"
    return [("global batch", batch), ("noise", noise), ("goodput", goodput)]


def _eta_cell(job: JobStatus, now_s: float | None) -> str:
    starts_s = job.planned_start_at_s
    if job.eta_s is None and starts_s is not None and now_s is not None and starts_s > now_s:
        return f"starts in {format_duration(starts_s - now_s)}"
    return duration(job.eta_s)


def _workers_cell(job: JobStatus) -> str:
    if job.search is not None and not JobState(job.state).is_terminal:
        return search_cell(job)
    if job.functions is not None and not JobState(job.state).is_terminal:
        return functions_cell(job)
    return UNKNOWN if JobState(job.state).is_terminal else f"{job.num_workers} of {_allowed(job)}"


def _allowed(job: JobStatus) -> str:
    return bounds(job.min_workers, job.max_workers)


def _slack_cell(job: JobStatus) -> str:
    """The slack; for an ended job the time left before its deadline, empty unless it succeeded."""
    if not JobState(job.state).is_terminal:
        return slack(job.slack_s)
    if job.state != JobState.SUCCEEDED or job.deadline_at_s is None or job.ended_at_s is None:
        return UNKNOWN
    return slack(job.deadline_at_s - job.ended_at_s)


def services_table(services: Sequence[ServiceStatus], width: int | None = None) -> str:
    rows = [
        (
            service.name,
            service.state,
            f"{service.num_ready} of {bounds(service.min_replicas, service.max_replicas)}",
            f"{service.arrivals_per_s:.1f}/s",
            str(service.in_flight),
            str(service.queued),
            duration(service.latency_p50_s),
            duration(service.latency_p99_s),
            duration(service.slo_s),
            shorten(service.reason),
        )
        for service in services
    ]
    return align(
        ("SERVICE", "STATE", "REPLICAS", "ARRIVALS", "IN FLIGHT", "QUEUED", "P50", "P99", "SLO", "REASON"), rows, width
    )


def platform_summary(
    status: PlatformStatus,
    *,
    show_all: bool = False,
    num_ended: int = 5,
    width: int | None = None,
    pools: str = "",
) -> str:
    """Devices, `pools`, jobs (unfinished and recently ended, or all) and services; lines are cut at `width`."""
    machines = [device for device in status.devices if device.kind != "function"]
    held = [device for device in machines if device.workload_id is not None]
    num_shared = sum(bool(device.holders) for device in machines)
    shared = f", {num_shared} in shares" if num_shared else ""
    parts = [f"{len(held)} of {len(machines)} devices held{shared}   policy {status.policy}"]
    places = [device for device in status.devices if device.kind == "function"]
    if places:
        taken = sum(device.workload_id is not None for device in places)
        parts[0] += f"   functions at {places[0].node_id}: {taken} of {count(len(places), 'place')} for jobs taken"
    if status.trouble:
        parts[0] += f"\nNO DECISIONS ARE MADE: {shorten(status.trouble, 200)}"
    if status.restarted:
        parts[0] += f"\nthe control plane was started again: the one before {shorten(status.restarted, 200)}"
    if status.clock:
        parts[0] += f"\n{shorten(status.clock, 200)}"
    if status.cluster is not None:
        parts[0] += f"\n{cluster_line(status.cluster)}"
    if pools:
        parts[0] += f"\n{pools}"
    ended = [job for job in status.jobs if JobState(job.state).is_terminal]
    hidden = 0 if show_all else max(0, len(ended) - num_ended)
    skipped = {job.job_id for job in ended[:hidden]}
    jobs = [job for job in status.jobs if job.job_id not in skipped]
    if jobs:
        parts.append(jobs_table(jobs, width, status.now_s))
    if hidden:
        parts.append(f"({hidden + status.num_older} more ended jobs: springtide ps --all)")
    if status.services:
        parts.append(services_table(status.services, width))
    if not jobs and not status.services:
        parts.append("nothing runs yet")
    return "\n\n".join(parts)


def loss_text(job: JobStatus) -> str:
    """0.4124, or that it is no finite number; empty if unknown."""
    if job.is_diverged:
        return "not finite"
    return "" if job.loss is None else number(job.loss)


def metrics_text(job: JobStatus) -> str:
    """accuracy 0.981  recall 0.9; empty if the function reports none."""
    return "  ".join(f"{name} {number(value)}" for name, value in job.metrics.items())


def progress_line(job: JobStatus, width: int | None = None) -> str:
    """The job on one line of at most `width` characters, for the live display and plain lines."""
    if job.state != JobState.RUNNING:
        line = f"{job.job_id} {job.state}  {shorten(job.reason, 90)}" if job.reason else f"{job.job_id} {job.state}"
        return line if width is None else shorten(line, width)
    if not job.has_steps:
        return f"{job.job_id} {job.state} {count(job.num_workers, 'worker')}"
    line = ""
    for bar_width, parts in _LAYOUTS:
        line = _progress_line(job, bar_width, parts)
        if width is None or len(line) <= width:
            return line
    return shorten(line, width or len(line))


def _progress_line(job: JobStatus, bar_width: int, parts: Sequence[str]) -> str:
    filled = round(min(1.0, max(0.0, job.progress_fraction or 0.0)) * bar_width)
    bar = f" [{'#' * filled}{'-' * (bar_width - filled)}]" if bar_width else ""
    done = percent(job.progress_fraction) if job.progress_fraction is not None else f"step {job.step}"
    texts = {
        "loss": f"loss {loss_text(job)}" if loss_text(job) else "",
        "metrics": metrics_text(job),
        "speed": _speed_text(job),
        "eta": "" if job.eta_s is None else f"ETA {format_duration(job.eta_s)}",
        "slack": "" if job.slack_s is None else f"slack {slack(job.slack_s)}",
        "cost": _progress_cost(job),
    }
    state = job.state if job.stalled_since_s is None else "STALLED"
    head = f"{job.job_id} {state} {_staff(job)}{bar} {done}"
    return "  ".join([head, *[texts[part] for part in parts if texts[part]]])


def _staff(job: JobStatus) -> str:
    """The workers or functions of a job: "2 workers" or "6 functions"."""
    if job.functions is not None:
        return count(job.functions.plan.num_functions, "function")
    return count(job.num_workers, "worker")


def _progress_cost(job: JobStatus) -> str:
    if job.cost_usd is None:
        return ""
    if job.functions is not None:
        budget = "" if job.budget_usd is None else f" of {usd(job.budget_usd)}"
        return f"{usd(job.cost_usd)}{budget}" if job.cost_usd else ""
    return "" if job.cost_usd < 0.005 else f"${job.cost_usd:.2f}"


def final_line(job: JobStatus, workers: str = "", pauses_s: Sequence[float] = ()) -> str:
    """How a job ended: time, deadline, workers over time with the pauses of resizes, artifact."""
    took = (
        f" in {format_duration(job.ended_at_s - job.started_at_s)}"
        if job.ended_at_s is not None and job.started_at_s is not None
        else ""
    )
    parts = [f"{job.job_id} {job.state}{took}"]
    if job.has_steps:
        parts.append(f"step {steps(job)}")
        loss = loss_text(job)
        parts += [text for text in (f"loss {loss}" if loss else "", metrics_text(job)) if text]
    lines = ["  ".join(parts)]
    is_early = job.batch_bounds is None and job.step < (job.total_steps or 0)
    if job.reason and (job.state != JobState.SUCCEEDED or job.is_diverged or is_early):
        lines.append(f"  {job.reason}")
    if job.state == JobState.SUCCEEDED and job.deadline_at_s is not None:
        lines.append(f"  deadline {deadline_text(job)}")
    if job.functions is not None:
        pairs = [*function_pairs(job.functions, says_step=False), *search_pairs(job)]
        lines += [f"  {name} {value}" for name, value in pairs if value]
        if job.artifact_path:
            lines.append(f"  model {job.artifact_path}")
        return "\n".join(lines)
    paused = ", pause ".join(pause(pause_s) for pause_s in pauses_s)
    changes = [
        f"workers {workers}" if workers else "",
        count(job.num_resizes, "resize") + (f" (pause {paused})" if paused else ""),
        count(job.num_restarts, "restart"),
        f"{job.device_seconds:.0f} device-seconds",
    ]
    lines.append("  " + ", ".join(change for change in changes if change))
    if job.artifact_path:
        lines.append(f"  model {job.artifact_path}")
    return "\n".join(lines)


def _details(pairs: Sequence[tuple[str, str]]) -> str:
    width = max(len(label) for label, _ in pairs)
    return "\n".join(f"  {label.ljust(width)}  {value}" for label, value in pairs if value)


def _replicas(status: JobStatus | ServiceStatus) -> str:
    """The replicas, and their pods on Kubernetes."""
    rows: list[tuple[str, ...]] = [
        (
            replica.replica_id,
            replica.state,
            ", ".join([replica.device_id, *replica.more_devices]),
            UNKNOWN if replica.rank is None else str(replica.rank),
        )
        for replica in status.replicas
    ]
    header: tuple[str, ...] = ("REPLICA", "STATE", "DEVICE", "RANK")
    if any(replica.device_seen for replica in status.replicas):
        header = (*header, "SEES")
        rows = [(*row, replica.device_seen or UNKNOWN) for row, replica in zip(rows, status.replicas, strict=True)]
    if any(replica.share is not None for replica in status.replicas):
        header = (*header, "SHARE")
        rows = [(*row, share_range(replica.share)) for row, replica in zip(rows, status.replicas, strict=True)]
    tables = [align(header, rows)] if rows else []
    if status.pods:
        tables.append(pods_table(status.pods))
    return "".join("\n\n" + "\n".join(f"  {line}" for line in table.splitlines()) for table in tables)


def job_details(job: JobStatus, now_s: float, workers: str = "") -> str:
    """The details of one job; `workers` is the text of its numbers of workers over time."""
    has_ended = JobState(job.state).is_terminal
    epoch = min(job.num_epochs, job.epoch + (job.step > 0 or not has_ended))
    pairs = []
    if job.has_steps:
        # The epochs of a script are its own.
        passes = f"  epoch {epoch} of {job.num_epochs}" if job.kind != "script" else ""
        pairs.append(("progress", f"{percent(job.progress_fraction)}  step {steps(job)}{passes}"))
    if job.functions is None:
        pairs.append(("workers", _workers_text(job, workers)))
    else:
        # A job on functions has one coordinator as its only worker, so rows about workers and devices would mislead.
        pairs += [*function_pairs(job.functions), *search_pairs(job)]
    pairs += [
        ("place", job.place_reason),
        *environment_pairs(job),
        ("folder", f"{job.directory or 'in each worker'}, a copy of {job.folder}" if job.folder else ""),
        *share_pairs(job),
        *(_batch_pairs(job) if job.kind != "script" else []),
        ("loss", loss_text(job)),
        ("metrics", metrics_text(job)),
        ("exact", job.exact_passes),
        ("speed", "" if has_ended else _speed_text(job)),
        ("time left", "" if job.eta_s is None or has_ended else duration(job.eta_s)),
        ("deadline", " ".join(filter(None, (deadline_text(job, now_s), promise_text(job, now_s))))),
        ("promise", "" if job.promised_if is None else job.promised_if.text()),
        ("planned", _planned_text(job, now_s)),
        ("slack", "" if job.slack_s is None or has_ended else slack(job.slack_s)),
    ]
    if job.functions is None:
        last = "" if job.last_pause_s is None else f", last pause {pause(job.last_pause_s)}"
        pairs.append(("budget", "" if job.budget_usd is None else f"${job.budget_usd:.2f}"))
        pairs.append(("resizes", f"{job.num_resizes}{last}"))
    pairs.append(("restarts", f"{job.num_restarts}  preemptions {job.num_preemptions}"))
    if not job.is_plain_script:
        pairs.append(("checkpoint", _checkpoint_text(job)))
    pairs.append(("model", job.artifact_path))
    if job.functions is None:
        cost = "" if not job.cost_usd else f", {_cost(job.cost_usd)}"
        pairs.append(("used", f"{job.device_seconds:.0f} device-seconds{cost}"))
    text = f"{job.job_id} {job.state}: {job.reason or 'no reason given'}\n{_details(pairs)}"
    if job.alternatives:
        text += "\n  would work:\n" + "\n".join(f"    {alternative}" for alternative in job.alternatives)
    if job.functions is None:
        return text + _replicas(job)
    return text + search_details(job.search) + function_details(job.functions)


def _speed_text(job: JobStatus) -> str:
    if job.samples_per_s is None:
        return ""
    if job.kind == "script":
        # How many samples its steps have is not known.
        return f"{number(job.samples_per_s / job.global_batch_size)} steps/s"
    return f"{job.samples_per_s:.0f} samples/s"


def _workers_text(job: JobStatus, workers: str) -> str:
    """How many workers a job has now and had before (`workers`), and how many it may have."""
    allowed = _allowed(job)
    if JobState(job.state).is_terminal:
        return f"{workers or '-'}  ({allowed} allowed)"
    each = f", {job.devices_each} devices each" if job.devices_each > 1 else ""
    now = f"{job.num_workers} of {allowed}{each}  generation {job.generation}"
    return f"{now}  ({workers})" if workers else now


def _planned_text(job: JobStatus, now_s: float) -> str:
    """Like start in 3m12, end in 9m40: what the policy has planned."""
    moments = (("start", job.planned_start_at_s), ("end", job.planned_finish_at_s))
    return ", ".join(
        f"{what} in {format_duration(at_s - now_s)}" for what, at_s in moments if at_s is not None and at_s > now_s
    )


def _cost(usd: float) -> str:
    return "less than $0.01" if usd < 0.01 else f"${usd:.2f}"


def _checkpoint_text(job: JobStatus) -> str:
    if job.checkpoint_step is not None:
        return f"step {job.checkpoint_step}"
    return "" if JobState(job.state).is_terminal else "none yet"


def service_details(service: ServiceStatus) -> str:
    allowed = bounds(service.min_replicas, service.max_replicas)
    notes = () if service.admission is None else service.admission.notes
    pairs = [
        ("url", service.url),
        ("replicas", f"{service.num_ready} ready, {service.num_starting} starting, {allowed} allowed"),
        *environment_pairs(service),
        ("folder", f"in each replica, a copy of {service.folder}" if service.folder else ""),
        *share_pairs(service),
        *scaling_pairs(service),
        ("load", f"{service.arrivals_per_s:.1f} requests/s, {service.in_flight} in flight, {service.queued} queued"),
        ("latency", f"p50 {duration(service.latency_p50_s)}, p99 {duration(service.latency_p99_s)}"),
        ("objective", "" if service.slo_s is None else f"p99 < {duration(service.slo_s)}"),
        ("requests", "; ".join(filter(None, [service.next_request, *notes]))),
        *start_pairs(service.cold_start_s),
        ("revision", str(service.revision) + ("" if service.releasing is None else f", {service.releasing} comes")),
        ("used", f"{service.device_seconds:.0f} device-seconds"),
    ]
    return f"{service.name} {service.state}: {service.reason or 'no reason given'}\n{_details(pairs)}" + _replicas(
        service
    )


def cluster_line(cluster: ClusterStatus) -> str:
    """The leader and the state of the platform's cluster, as one line."""
    parts = [
        f"kubernetes {cluster.server}",
        f"{count(cluster.num_nodes, 'node')}, {count(cluster.num_pods, 'pod')}",
        f"led by {cluster.leader} in term {cluster.term}",
    ]
    if cluster.pending_writes:
        parts.append(f"{count(cluster.pending_writes, 'write')} under way")
    problem = cluster.problem or silence(cluster)
    return "   ".join(parts) + (f"\nkubernetes: {problem}" if problem else "")


def pods_table(pods: Sequence[PodStatus]) -> str:
    """One line for each pod, with the reason of those that wait."""
    rows = [
        (pod.replica_id, f"{pod.namespace}/{pod.pod}", pod.node_id, pod.phase, format_duration(pod.since_s), pod.reason)
        for pod in pods
    ]
    return align(("REPLICA", "POD", "NODE", "PHASE", "SINCE", "REASON"), rows)


def silence(cluster: ClusterStatus) -> str:
    """A sentence about how long the API server has sent nothing; empty if that is not unusual."""
    if cluster.watch_age_s <= _SILENT_S:
        return ""
    return f"nothing has been heard of the API server for {format_duration(cluster.watch_age_s)}"
