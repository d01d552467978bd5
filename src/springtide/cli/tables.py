"""Statuses as text for people: aligned tables, one-line progress, details. Pure functions of core.status."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.core.quantities import format_duration
from springtide.core.status import Explanation, JobStatus, PlatformStatus, ServiceStatus
from springtide.core.workload import JobState

UNKNOWN = "-"
_BAR_WIDTH = 16
_MAX_REASON = 60
_COLOURS = {
    "RUNNING": "green",
    "READY": "green",
    "SUCCEEDED": "green",
    "PENDING": "yellow",
    "STARTING": "yellow",
    "PREEMPTING": "yellow",
    "PAUSED": "yellow",
    "FAILED": "red",
    "REJECTED": "red",
}


def colour_of(state: str) -> str | None:
    """The colour in which a state is shown."""
    return _COLOURS.get(state)


def align(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, two spaces apart; the last one is ragged."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def shorten(text: str, length: int = _MAX_REASON) -> str:
    """At most `length` characters on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def percent(fraction: float | None) -> str:
    """57 %, or a dash while it is not known."""
    return UNKNOWN if fraction is None else f"{fraction * 100:.0f} %"


def duration(seconds: float | None) -> str:
    """3m12, or a dash while it is not known."""
    return UNKNOWN if seconds is None else format_duration(seconds)


def pause(seconds: float) -> str:
    """41 ms, or 0.13 ms: a pause of a small model is well under a millisecond, and never none."""
    return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else format_duration(seconds)


def slack(seconds: float | None) -> str:
    """+2m05 or -40.0 s: with its sign, because the sign is the message."""
    if seconds is None:
        return UNKNOWN
    return format_duration(seconds) if seconds < 0 else f"+{format_duration(seconds)}"


def number(value: float | None, digits: int = 4) -> str:
    """A few significant digits, or a dash while it is not known."""
    return UNKNOWN if value is None else f"{value:.{digits}g}"


def count(how_many: int, what: str) -> str:
    """1 worker, 2 workers."""
    return f"{how_many} {what}{'' if how_many == 1 else 's'}"


def steps(job: JobStatus) -> str:
    """120/500, or only 120 while the length is not known."""
    if job.kind == "script":
        return UNKNOWN
    return str(job.step) if job.total_steps is None else f"{job.step}/{job.total_steps}"


def bounds(minimum: int, maximum: int) -> str:
    """1..4, or 4 if both are the same."""
    return str(minimum) if minimum == maximum else f"{minimum}..{maximum}"


def jobs_table(jobs: Sequence[JobStatus]) -> str:
    """One line for each job."""
    rows = [
        (
            job.job_id,
            job.state,
            percent(job.progress_fraction),
            steps(job),
            f"{job.num_workers} of {bounds(job.min_workers, job.max_workers)}",
            number(job.loss),
            duration(job.eta_s),
            slack(job.slack_s),
            shorten(job.reason),
        )
        for job in jobs
    ]
    return align(("JOB", "STATE", "PROGRESS", "STEP", "WORKERS", "LOSS", "ETA", "SLACK", "REASON"), rows)


def services_table(services: Sequence[ServiceStatus]) -> str:
    """One line for each service."""
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
        ("SERVICE", "STATE", "REPLICAS", "ARRIVALS", "IN FLIGHT", "QUEUED", "P50", "P99", "SLO", "REASON"), rows
    )


def platform_summary(status: PlatformStatus, *, show_all: bool = False, num_ended: int = 5) -> str:
    """Devices, jobs (unfinished ones and the last ended, or all) and services."""
    held = [device for device in status.devices if device.workload_id is not None]
    parts = [f"{len(held)} of {len(status.devices)} devices held   policy {status.policy}"]
    ended = [job for job in status.jobs if JobState(job.state).is_terminal]
    hidden = 0 if show_all else max(0, len(ended) - num_ended)
    skipped = {job.job_id for job in ended[:hidden]}
    jobs = [job for job in status.jobs if job.job_id not in skipped]
    if jobs:
        parts.append(jobs_table(jobs))
    if hidden:
        parts.append(f"({hidden} more ended jobs: springtide ps --all)")
    if status.services:
        parts.append(services_table(status.services))
    if not jobs and not status.services:
        parts.append("nothing runs yet")
    return "\n\n".join(parts)


def progress_line(job: JobStatus) -> str:
    """The job on one line, as the live display and the log lines show it."""
    if job.state != JobState.RUNNING:
        return f"{job.job_id} {job.state}  {shorten(job.reason, 90)}" if job.reason else f"{job.job_id} {job.state}"
    if job.kind == "script":
        return f"{job.job_id} {job.state} {count(job.num_workers, 'worker')}"
    fraction = min(1.0, max(0.0, job.progress_fraction or 0.0))
    filled = round(fraction * _BAR_WIDTH)
    parts = [
        f"{job.job_id} {job.state} {count(job.num_workers, 'worker')} [{'#' * filled}{'-' * (_BAR_WIDTH - filled)}]"
        + (f" {percent(job.progress_fraction)}" if job.progress_fraction is not None else f" step {job.step}"),
    ]
    if job.loss is not None:
        parts.append(f"loss {job.loss:.4g}")
    if job.samples_per_s is not None:
        parts.append(f"{job.samples_per_s:.0f} samples/s")
    if job.eta_s is not None:
        parts.append(f"ETA {format_duration(job.eta_s)}")
    if job.slack_s is not None:
        parts.append(f"slack {slack(job.slack_s)}")
    return "  ".join(parts)


def final_line(job: JobStatus) -> str:
    """How a job ended: time, pauses and what it left behind."""
    took = (
        f" in {format_duration(job.ended_at_s - job.started_at_s)}"
        if job.ended_at_s is not None and job.started_at_s is not None
        else ""
    )
    progress = "" if job.kind == "script" else f"  step {steps(job)}"
    parts = [f"{job.job_id} {job.state}{took}{progress}"]
    if job.loss is not None:
        parts.append(f"loss {job.loss:.4g}")
    if job.deadline_at_s is not None and job.ended_at_s is not None and job.state == JobState.SUCCEEDED:
        parts.append("deadline met" if job.ended_at_s <= job.deadline_at_s else "deadline missed")
    parts.append(f"{count(job.num_resizes, 'resize')}, {count(job.num_restarts, 'restart')}")
    parts.append(f"{job.device_seconds:.0f} device-seconds")
    lines = ["  ".join(parts)]
    if job.state != JobState.SUCCEEDED and job.reason:
        lines.append(f"  {job.reason}")
    if job.artifact_path:
        lines.append(f"  model {job.artifact_path}")
    return "\n".join(lines)


def _details(pairs: Sequence[tuple[str, str]]) -> str:
    width = max(len(label) for label, _ in pairs)
    return "\n".join(f"  {label.ljust(width)}  {value}" for label, value in pairs if value)


def _replicas(status: JobStatus | ServiceStatus) -> str:
    if not status.replicas:
        return ""
    rows = [
        (
            replica.replica_id,
            replica.state,
            replica.device_id,
            UNKNOWN if replica.rank is None else str(replica.rank),
        )
        for replica in status.replicas
    ]
    table = align(("REPLICA", "STATE", "DEVICE", "RANK"), rows)
    return "\n\n" + "\n".join(f"  {line}" for line in table.splitlines())


def job_details(job: JobStatus, now_s: float) -> str:
    """Everything that is worth knowing of one job."""
    deadline = "" if job.deadline_at_s is None else f"in {format_duration(job.deadline_at_s - now_s)}"
    if job.deadline_at_s is not None and job.deadline_at_s < now_s:
        deadline = f"{format_duration(now_s - job.deadline_at_s)} ago"
    pairs = [
        ("progress", f"{percent(job.progress_fraction)}  step {steps(job)}  epoch {job.epoch} of {job.num_epochs}"),
        ("workers", f"{job.num_workers} of {bounds(job.min_workers, job.max_workers)}  generation {job.generation}"),
        ("global batch", f"{job.global_batch_size} (whatever the number of workers)"),
        ("loss", "" if job.loss is None else number(job.loss)),
        ("speed", "" if job.samples_per_s is None else f"{job.samples_per_s:.0f} samples/s"),
        ("time left", "" if job.eta_s is None else duration(job.eta_s)),
        ("deadline", deadline),
        ("slack", "" if job.slack_s is None else slack(job.slack_s)),
        ("budget", "" if job.budget_usd is None else f"${job.budget_usd:.2f}"),
        (
            "resizes",
            f"{job.num_resizes}" + ("" if job.last_pause_s is None else f", last pause {pause(job.last_pause_s)}"),
        ),
        ("restarts", f"{job.num_restarts}  preemptions {job.num_preemptions}"),
        ("checkpoint", "none yet" if job.checkpoint_step is None else f"step {job.checkpoint_step}"),
        ("model", job.artifact_path),
        ("used", f"{job.device_seconds:.0f} device-seconds"),
    ]
    text = f"{job.job_id} {job.state}: {job.reason or 'no reason given'}\n{_details(pairs)}"
    if job.alternatives:
        text += "\n  would work:\n" + "\n".join(f"    {alternative}" for alternative in job.alternatives)
    return text + _replicas(job)


def service_details(service: ServiceStatus) -> str:
    """Everything that is worth knowing of one service."""
    allowed = bounds(service.min_replicas, service.max_replicas)
    pairs = [
        ("url", service.url),
        (
            "replicas",
            f"{service.num_ready} ready, {service.num_starting} starting, {allowed} allowed",
        ),
        ("load", f"{service.arrivals_per_s:.1f} requests/s, {service.in_flight} in flight, {service.queued} queued"),
        ("latency", f"p50 {duration(service.latency_p50_s)}, p99 {duration(service.latency_p99_s)}"),
        ("objective", "" if service.slo_s is None else f"p99 < {duration(service.slo_s)}"),
        ("revision", str(service.revision)),
        ("used", f"{service.device_seconds:.0f} device-seconds"),
    ]
    return f"{service.name} {service.state}: {service.reason or 'no reason given'}\n{_details(pairs)}" + _replicas(
        service
    )


def explanation(answer: Explanation) -> str:
    """The reason, what it rests on, what could be done, and the story."""
    lines = [f"{answer.workload_id} {answer.state}: {answer.reason}"]
    lines += [f"  because {line}" for line in answer.evidence]
    if answer.next_steps:
        lines.append("  you could:")
        lines += [f"    {line}" for line in answer.next_steps]
    if answer.history:
        lines.append("  what happened:")
        lines += [f"    {format_duration(entry.at_s):>8}  {entry.text}" for entry in answer.history[-12:]]
    return "\n".join(lines)
