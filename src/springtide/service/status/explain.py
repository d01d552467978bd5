"""The answer to `why`: the one dominant reason, the evidence for it, and what its owner could do."""

from __future__ import annotations

from collections.abc import Mapping

from springtide.control.records import JobRecord, ServiceRecord, ServiceState
from springtide.control.watches import stall_timeout_s
from springtide.core.quantities import format_bytes, format_duration
from springtide.core.status.admission import AdmissionStatus
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.platform import DeviceStatus, Explanation, HistoryEntry, JobStatus
from springtide.core.status.pools import PoolsReport
from springtide.core.status.search import SearchStatus
from springtide.core.status.shares import SharingStatus
from springtide.core.workload import JobState
from springtide.scheduling.functions.plan_text import words
from springtide.service.ports import ViewLike
from springtide.service.status.environment_evidence import environment_evidence, making_reason
from springtide.service.status.function_evidence import function_evidence, function_next_steps
from springtide.service.status.outlook import JobForecast
from springtide.service.status.pool_evidence import graces_by_node, job_pool_evidence, service_pool_evidence
from springtide.service.status.search_evidence import search_evidence, stream_evidence
from springtide.service.status.share_evidence import share_evidence
from springtide.service.status.status import (
    device_statuses,
    function_run,
    job_status,
    name_of,
    told_reason,
    working_directory,
)

MAX_HISTORY = 30
MAX_DEVICES_SEEN = 8
_RESIZES = ("grow", "shrink", "replace", "recover")


def explain(
    record: JobRecord | ServiceRecord,
    view: ViewLike,
    history: tuple[HistoryEntry, ...],
    now_s: float,
    outlook: JobForecast | None = None,
    pools: PoolsReport | None = None,
    live: FunctionRunStatus | None = None,
    search: SearchStatus | None = None,
    sharing: SharingStatus | None = None,
    admission: AdmissionStatus | None = None,
    next_request: str = "",
) -> Explanation:
    """Return why a workload is in its state, what is expected of it (`outlook`), and how `pools` affect it.

    `live` is what the coordinator of a job on functions reports, `search` the search for its workers and memory,
    `sharing` what is granted on shared devices, `admission` what a service's gateway says of requests,
    `next_request` what the next one would wait for.
    """
    if isinstance(record, JobRecord):
        is_priced = not (record.job.is_on_functions or record.lifecycle.state.is_terminal)
        price_s, prices_s = (view.price_s, view.prices_s) if is_priced else (None, {})
        run = function_run(record, live)
        evidence = [*_job_evidence(record, view, now_s, run, search), *_last_changes(record, history, now_s)]
        if pools is not None:
            planned = view.future.get(record.workload_id, ())
            evidence += job_pool_evidence(record, pools, planned, now_s, graces_by_node(view))
        evidence += [*_expectations(record, outlook, now_s), *_folder_evidence(record)]
        next_steps = (function_next_steps(record, run) if run is not None else None) or _job_next_steps(
            record, len(_machine_devices(view))
        )
    else:
        evidence = [*_service_evidence(record, view, now_s), *filter(None, [next_request])]
        next_steps = _service_next_steps(record, may_have_one=not next_request)
        evidence += [] if admission is None else admission.notes
        evidence += _folder_evidence(record)
        if pools is not None:
            evidence += service_pool_evidence(record, pools, now_s, graces_by_node(view))
        price_s, prices_s = None, {}
    evidence += [*environment_evidence(record), *_held_up(record), *_worth(price_s, prices_s), *_devices_seen(record)]
    if sharing is not None:
        evidence += share_evidence(record, view, sharing)
    return Explanation(
        workload_id=record.workload_id,
        name=name_of(record),
        state=record.state.value,
        reason=_reason(record),
        evidence=tuple(evidence),
        next_steps=tuple(next_steps),
        history=history[-MAX_HISTORY:],
        expected_start_at_s=None if outlook is None or record.replicas else outlook.start_at_s,
        expected_finish_at_s=None if outlook is None else outlook.finish_at_s,
        device_second_worth_s=price_s,
    )


def _worth(price_s: float | None, prices_s: Mapping[str, float]) -> list[str]:
    if prices_s:
        told = ", ".join(f"{worth_s:.2g} s on {model or 'other devices'}" for model, worth_s in prices_s.items())
        return [
            f"a device-second is worth {told} now: so much the last device given of a model saves all jobs together"
        ]
    if price_s is None:
        return []
    if price_s == 0.0:
        return ["a device-second is worth nothing more now: by all that is known no job gains by another device"]
    return [f"a device-second is worth {price_s:.2g} s now: so much the last device given saves all jobs together"]


def _reason(record: JobRecord | ServiceRecord) -> str:
    told = told_reason(record) if isinstance(record, JobRecord) else making_reason(record) or record.reason
    if told:
        return told
    if isinstance(record, JobRecord) and record.lifecycle.state is JobState.RUNNING:
        if record.runs_as.plan is not None:
            return f"trains as {words(record.runs_as.plan)}"
        return f"trains with {_count(record.world_size, 'worker')}"
    return f"it is {record.state.value}"


def _held_up(record: JobRecord | ServiceRecord) -> list[str]:
    """What only a person can end that keeps replicas from starting, and for how long they wait for that."""
    stuck = [each for each in record.replicas if each.is_stuck]
    if not stuck:
        return []
    timeout_s = (record.job if isinstance(record, JobRecord) else record.service).start_timeout_s
    limit = (
        f"it has {format_duration(timeout_s)} for that" if timeout_s else "nothing limits how long it waits for that"
    )
    others = f" (and {len(stuck) - 1} more)" if len(stuck) > 1 else ""
    return [
        f"{stuck[0].replica_id}{others} cannot start: {stuck[0].held_up_by}; only a person can mend that, and {limit} "
        f"(start_timeout={format_duration(timeout_s) if timeout_s else 'none'})"
    ]


def _devices_seen(record: JobRecord | ServiceRecord) -> list[str]:
    """Which GPUs its replicas have found on their devices' places: there a device plugin chooses."""
    seen = [each for each in record.replicas if each.device_seen]
    found = [f"{each.replica_id} on {', '.join(each.device_ids)}: {each.device_seen}" for each in seen]
    more = f"; and {len(found) - MAX_DEVICES_SEEN} more" if len(found) > MAX_DEVICES_SEEN else ""
    return [f"what its workers see as their GPU: {'; '.join(found[:MAX_DEVICES_SEEN])}{more}"] if found else []


def _folder_evidence(record: JobRecord | ServiceRecord) -> list[str]:
    if isinstance(record, JobRecord):
        folder, where, each = record.job.entrypoint.folder, working_directory(record.job), "worker"
    else:
        folder, where, each = record.service.entrypoint.folder, "", "replica"
    if folder is None:
        return []
    size = f"{_count(folder.num_files, 'file')}, {format_bytes(folder.num_bytes)}"
    told = f"copy of {folder.origin or 'the folder that was sent'} ({size})"
    if where:
        return [f"it runs in {where}, its {told}"]
    return [f"each {each} runs in its own {told}" + (f", in {folder.directory}" if folder.directory else "")]


def _job_evidence(
    record: JobRecord, view: ViewLike, now_s: float, run: FunctionRunStatus | None, search: SearchStatus | None
) -> list[str]:
    status = job_status(record, now_s)
    evidence: list[str] = [record.job.place_reason] if record.job.place_reason else []
    if run is not None:
        evidence += function_evidence(record, run, has_search=search is not None)
        if search is not None:
            evidence += search_evidence(record, search)
        evidence += stream_evidence(record, run)
    elif not record.lifecycle.state.is_terminal:
        low, high = record.bounds.min_workers, record.bounds.max_workers
        bounds = _count(low, "worker") if low == high else f"{low}..{high} workers"
        each, held = record.job.devices_each, sum(len(replica.device_ids) for replica in record.replicas)
        parts = f" of {each} devices each" if each > 1 else ""
        evidence.append(f"asks for {bounds}{parts}, holds {_count(held, 'device')}")
    evidence += _fixed_size(record)
    if run is None and record.lifecycle.state in (JobState.PENDING, JobState.PAUSED, JobState.REJECTED):
        evidence.append(_occupancy(view))
    if record.lifecycle.state is JobState.PENDING and record.restarts.starts_at_s > now_s:
        evidence.append(f"waits out a back-off for {format_duration(record.restarts.starts_at_s - now_s)} more")
    if record.progress.total_steps:
        done = 100 * (status.progress_fraction or 0.0)
        evidence.append(f"step {record.progress.step} of {record.progress.total_steps} ({done:.0f} %)")
    if record.progress.is_diverged:
        first = record.progress.diverged_at_step
        evidence.append(
            f"its loss is not a finite number{f' since step {first}' if first else ''}, it has diverged; a lower "
            "learning rate or clipped gradients may help"
        )
    evidence += _stall_evidence(record, status, now_s)
    evidence += [*_batch_evidence(status), *filter(None, [status.exact_passes])]
    if status.eta_s is not None:
        # After a start or a change nothing has been measured yet: then the prediction uses an earlier speed.
        speed = "as it went before" if not status.samples_per_s else f"at {status.samples_per_s:.0f} samples/s"
        evidence.append(f"{speed} it ends in {format_duration(status.eta_s)}")
    if status.deadline_at_s is not None and not record.lifecycle.state.is_terminal:
        left_s = status.deadline_at_s - now_s
        sentence = (
            f"the deadline is in {format_duration(left_s)}"
            if left_s >= 0
            else (f"the deadline passed {format_duration(-left_s)} ago")
        )
        if status.slack_s is not None:
            sentence += f", slack {format_duration(status.slack_s)}"
        evidence.append(sentence)
        condition = view.conditions.get(record.workload_id)
        evidence += [] if condition is None or left_s < 0 else [condition.text()]
    if record.changes.num_resizes or record.restarts.num_restarts or record.changes.num_preemptions:
        evidence.append(
            f"resized {record.changes.num_resizes}, preempted {record.changes.num_preemptions}, "
            f"restarted {record.restarts.num_restarts} of {record.job.max_restarts} times"
        )
    if record.saved.checkpoint is not None:
        evidence.append(f"the newest checkpoint holds step {record.saved.checkpoint.step}")
    return evidence


def _fixed_size(record: JobRecord) -> list[str]:
    """Why it has one worker although more were allowed."""
    reason = record.bounds.fixed_reason
    return [f"submitted for a range of workers, held to one: {reason}"] if reason else []


def _stall_evidence(record: JobRecord, status: JobStatus, now_s: float) -> list[str]:
    """For how long a stalled job has gone without a step, and what is done about it."""
    if status.stalled_since_s is None:
        return []
    limit = format_duration(stall_timeout_s(record))
    return [
        f"no step for {format_duration(now_s - status.stalled_since_s)}; {limit} is what it may go without one "
        "(stall_timeout), and it is let run on (on_stall=report)"
    ]


def _batch_evidence(status: JobStatus) -> list[str]:
    """The batch, and how much a sample brings at this batch by the gradient's noise."""
    if status.batch_bounds is None:
        return []
    low, high = status.batch_bounds
    lines = [f"batch {status.global_batch_size} of {low}..{high}, {status.initial_batch_size} at first"]
    if status.learning_rate_factor is not None and status.learning_rate_factor != 1.0:
        lines[0] += f", learning rate x{status.learning_rate_factor:.3g}"
    if status.noise_scale is not None and status.efficiency_fraction is not None:
        lines.append(
            f"gradient noise scale {status.noise_scale:.0f} samples: at this batch a sample brings "
            f"{100 * status.efficiency_fraction:.0f} % of what it did at first"
        )
    return lines


def _last_changes(record: JobRecord, history: tuple[HistoryEntry, ...], now_s: float) -> list[str]:
    """The newest resize and the newest preemption, with what they were for, from the journal."""
    if record.lifecycle.state.is_terminal:
        return []
    lines = []
    for kinds, verb in ((_RESIZES, "last change"), (("preempt",), "last time it gave way")):
        entry = next((entry for entry in reversed(history) if entry.kind in kinds), None)
        if entry is not None:
            lines.append(f"{verb}, {format_duration(max(0.0, now_s - entry.at_s))} ago: {entry.text}")
    return lines


def _expectations(record: JobRecord, outlook: JobForecast | None, now_s: float) -> list[str]:
    """What was promised, and when it is expected to start and to end."""
    lines = []
    if record.promise.admitted_at_s is not None and not record.lifecycle.state.is_terminal:
        told = f"its deadline was promised {format_duration(max(0.0, now_s - record.promise.admitted_at_s))} ago"
        given_up_at_s = record.lifecycle.given_up_at_s
        if given_up_at_s is not None:
            told += f"; its plan misses it for {format_duration(max(0.0, now_s - given_up_at_s))}"
        lines.append(told)
    if outlook is None:
        return lines
    basis = "as planned" if outlook.is_planned else "if no other job comes"
    if not record.replicas and outlook.start_at_s is not None:
        lines.append(f"expected start {_when(outlook.start_at_s, now_s)}, {basis}")
    elif not record.replicas:
        names = ", ".join(repr(name) for name in outlook.unknown[:3])
        lines.append(
            f"expected start: not known{f', because it is not known how long {names} will take' if names else ''}"
        )
    if outlook.finish_at_s is not None:
        lines.append(f"expected end {_when(outlook.finish_at_s, now_s)}, {basis}")
    return lines


def _when(at_s: float, now_s: float) -> str:
    return "now" if at_s <= now_s else f"in {format_duration(at_s - now_s)}"


def _job_next_steps(record: JobRecord, num_devices: int) -> list[str]:
    job_id, low, high = record.workload_id, record.bounds.min_workers, record.bounds.max_workers
    # What its owner asked for at first, as far as the machines have so many.
    most = min(record.job.max_workers, num_devices // record.job.devices_each)
    match record.lifecycle.state:
        case JobState.PENDING:
            return [
                "springtide ps",
                *(
                    [f"springtide scale {job_id} 1..{max(1, min(high, most))}"]
                    if record.job.elastic and low > 1 and not record.job.is_on_functions
                    else []
                ),
                f"springtide cancel {job_id}",
            ]
        case JobState.STARTING | JobState.PREEMPTING:
            return [f"springtide logs {job_id} -f"]
        case JobState.RUNNING:
            return [
                f"springtide logs {job_id} -f",
                *([f"springtide cancel {job_id}"] if record.progress.stalled_since_s is not None else []),
                *(
                    [f"springtide scale {job_id} {low}..{most}"]
                    if record.job.elastic and high < most and not _is_held_down(record)
                    else []
                ),
                f"springtide pause {job_id}",
            ]
        case JobState.PAUSED:
            return [f"springtide resume {job_id}", f"springtide cancel {job_id}"]
        case JobState.FAILED:
            return [f"springtide logs {job_id}"]
        case JobState.REJECTED:
            return list(record.lifecycle.alternatives) or ["springtide ps"]
        case _:
            return [f"springtide logs {job_id}"]


def _is_held_down(record: JobRecord) -> bool:
    """Whether something else than its owner keeps it from more workers: a wider range would be refused, or in vain."""
    return bool(record.bounds.fixed_reason or record.bounds.limit_reason)


def _service_evidence(record: ServiceRecord, view: ViewLike, now_s: float) -> list[str]:
    each = record.service.devices_each
    parts = f" on {each} devices each" if each > 1 else ""
    evidence = [
        f"{_count(len(record.replicas), 'replica')} of {record.min_replicas}..{record.max_replicas}{parts}, "
        f"revision {record.service.revision}"
    ]
    if record.load_at_s is not None:
        evidence.append(
            f"{record.arrivals_per_s:.1f} requests/s arrive, {record.in_flight} in flight, {record.queued} queued"
        )
        if record.latency_p99_s is not None:
            objective = f", the objective is {format_duration(record.service.slo_s)}" if record.service.slo_s else ""
            evidence.append(f"p99 latency {format_duration(record.latency_p99_s)}{objective}")
        if record.idle_s > 0:
            evidence.append(
                f"idle for {format_duration(record.idle_s)}; without requests, replicas above the minimum go after "
                f"{format_duration(record.service.idle_s)}"
            )
    if record.crashes_at_s:
        evidence.append(f"{_count(len(record.crashes_at_s), 'crash', 'crashes')} lately")
    if not record.replicas:
        evidence.append(_occupancy(view))
    claim = view.claims.get(record.workload_id)
    if claim is not None and claim.at_s is not None:
        evidence.append(
            f"it can have a device in {format_duration(max(1.0, claim.at_s - now_s))} if nothing else changes"
        )
    return evidence


def _service_next_steps(record: ServiceRecord, *, may_have_one: bool) -> list[str]:
    name = record.workload_id
    match record.state:
        case ServiceState.FAILED:
            return [f"springtide logs {name}", "springtide deploy FILE"]
        case ServiceState.REMOVED:
            return ["springtide deploy FILE"]
        case ServiceState.IDLE if may_have_one:
            return [f"springtide scale {name} 1..{max(1, record.max_replicas)}"]
        case ServiceState.IDLE:
            # A guaranteed minimum would be refused.
            return ["springtide ps"]
        case ServiceState.STARTING:
            return [f"springtide logs {name} -f"]
        case _:
            return [f"springtide logs {name} -f", f"springtide scale {name} {record.min_replicas}..MAX"]


def _machine_devices(view: ViewLike) -> list[DeviceStatus]:
    """The devices without the places for jobs on functions."""
    return [device for device in device_statuses(view) if device.kind != "function"]


def _occupancy(view: ViewLike) -> str:
    devices = _machine_devices(view)
    held: dict[str, int] = {}
    shared: dict[str, int] = {}
    for device in devices:
        if device.workload_id is None:
            continue
        if not device.holders:
            held[device.workload_id] = held.get(device.workload_id, 0) + 1
        for holder in device.holders:
            shared[holder.workload_id] = shared.get(holder.workload_id, 0) + 1
    num_free = sum(device.workload_id is None for device in devices)
    sentence = f"{num_free} of {_count(len(devices), 'device')} free"
    for label, counts in (("held", held), ("held in part", shared)):
        holders = ", ".join(f"{workload_id} {count}" for workload_id, count in list(counts.items())[:5])
        sentence += f"; {label}: {holders}" if holders else ""
    return sentence


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
