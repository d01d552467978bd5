"""The evidence on a job's search, its batch schedule and its stream, for `springtide why`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from springtide.control.records import JobRecord
from springtide.core.quantities import format_duration
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.status.search import SearchStatus
from springtide.scheduling.functions.plan_text import money
from springtide.service.status.search_reports import stream_status


def search_evidence(record: JobRecord, search: SearchStatus) -> Iterator[str]:
    """Why it has this number of workers and this memory, one sentence each."""
    low, high = search.sizes_mb[0], search.sizes_mb[-1]
    yield f"searched for: {search.goal}, among 1..{search.max_workers} workers of {low}..{high} MB"
    if not record.state.is_terminal and search.reason and search.reason != record.reason:
        yield f"{'settled' if search.phase == 'settled' else 'the search'}: {search.reason}"
    if search.tried:
        yield _tried(search)
        yield _cost(search)
    yield from _errors(search)
    yield from _schedule(record)


def _tried(search: SearchStatus) -> str:
    shown = search.tried[-3:]
    sentence = ", ".join(
        f"{one.num_workers} x {one.memory_mb} MB {format_duration(one.step_s)} and {_usd(one.step_usd)} a step"
        + (" (now)" if one.is_running else "")
        for one in shown
    )
    return f"measured {_count(len(search.tried), 'configuration')}" + (
        f", the newest {sentence}" if len(shown) < len(search.tried) else f": {sentence}"
    )


def _cost(search: SearchStatus) -> str:
    if not search.num_left:
        return "searching has cost nothing beyond training itself so far"
    return (
        f"searching has cost {format_duration(search.search_s)} and {_usd(search.search_usd)} so far: by so much the "
        f"steps of {_count(search.num_left, 'configuration')} that it left were slower or dearer than the best one's"
    )


def _errors(search: SearchStatus) -> Iterator[str]:
    if search.model_error_fraction is not None and search.error_fraction is not None:
        yield (
            f"the model alone was off by {100 * search.model_error_fraction:.0f} % where it was measured; what is "
            f"believed now is expected to be off by {100 * search.error_fraction:.0f} %"
        )
    if search.num_earlier:
        yield f"it began with {_count(search.num_earlier, 'measurement')} of earlier runs of the same function"


def _schedule(record: JobRecord) -> Iterator[str]:
    phases = record.job.batch_schedule
    if not phases:
        return
    coming = next((phase for phase in phases if phase.from_epoch > record.progress.epoch), None)
    sentence = f"a step has {record.batch_size} samples in epoch {record.progress.epoch}"
    if coming is not None:
        sentence += f", {coming.global_batch_size} from epoch {coming.from_epoch} on: the search has reckoned with it"
    yield sentence


def stream_evidence(record: JobRecord, run: FunctionRunStatus) -> Iterator[str]:
    """How far it is behind its growing dataset, and whether it waits for samples."""
    stream = stream_status(record, run)
    if stream is None or record.state.is_terminal:
        return
    sentence = f"{_count(stream.num_waiting, 'sample')} of {stream.name!r} wait, {stream.num_used:,} were used"
    if stream.is_closed:
        yield f"{sentence}; it is closed: the rest is trained, then the job ends"
        return
    yield f"{sentence}, {stream.arrivals_per_s:.3g} a second arrive"
    if stream.is_idle:
        yield f"idle: no function runs and nothing is charged{f' ({run.idle_reason})' if run.idle_reason else ''}"


def _usd(amount: float) -> str:
    """Like `money`, but without an exponent however little a step costs."""
    if amount >= 1e-4 or amount <= 0:
        return money(amount)
    return f"${amount:.{1 - math.floor(math.log10(amount))}f}"


def _count(number: int, singular: str) -> str:
    return f"{number} {singular if number == 1 else singular + 's'}"
