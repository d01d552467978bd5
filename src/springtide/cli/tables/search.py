"""A job's search, batch schedule and stream as text. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.cli.tables.columns import UNKNOWN, align, count, number
from springtide.cli.tables.functions import change_text, usd
from springtide.core.function_search import batch_at
from springtide.core.quantities import format_duration
from springtide.core.status.platform import JobStatus
from springtide.core.status.search import SearchQuote, SearchStatus, StreamStatus, TriedConfiguration

# Only the newest trials of a long search are shown; `--json` has all.
MAX_TRIED = 12


def configuration_text(num_workers: int, memory_mb: int) -> str:
    """Like 8 x 1024 MB: the number of workers and the memory of each."""
    return f"{num_workers} x {memory_mb} MB"


def search_pairs(job: JobStatus) -> list[tuple[str, str]]:
    """The rows of a job's details about its search, batch schedule and stream."""
    pairs = []
    if job.search is not None:
        pairs += [
            ("goal", job.search.goal),
            ("search", _phase(job.search)),
            ("searching cost", _cost(job.search)),
            ("prediction", _errors(job.search)),
        ]
    pairs.append(("batch schedule", schedule_text(job)))
    if job.stream is not None:
        pairs.append(("stream", stream_text(job.stream)))
    if job.study:
        pairs.append(("study", job.study))
    return pairs


def _phase(search: SearchStatus) -> str:
    now = configuration_text(search.num_workers, search.memory_mb)
    told = {
        "waiting": f"begins with {now}",
        "searching": f"searching, now {now}",
        "settled": f"settled on {now}",
        "over": f"ended with {now}",
    }[search.phase]
    return f"{told}: {search.reason}" if search.reason and search.phase != "over" else told


def _cost(search: SearchStatus) -> str:
    """The cost of the search so far, compared with its best configuration."""
    if not search.tried:
        return ""
    if not search.num_left:
        return "nothing beyond training itself"
    told = f"{format_duration(search.search_s)} and {usd(search.search_usd)} beyond the best one known"
    return f"{told}, in steps of {count(search.num_left, 'configuration')} left again"


def _errors(search: SearchStatus) -> str:
    told = []
    if search.model_error_fraction is not None:
        told.append(f"the model alone was off by {search.model_error_fraction:.0%}")
    if search.error_fraction is not None:
        told.append(f"{search.error_fraction:.0%} after correction by what was measured")
    if search.num_earlier:
        told.append(f"{count(search.num_earlier, 'measurement')} known from earlier runs")
    return ", ".join(told)


def schedule_text(job: JobStatus) -> str:
    """64 from epoch 0, 256 from epoch 4; now 64, 128 from epoch 6 on."""
    if not job.batch_schedule:
        return ""
    told = ", ".join(f"{phase.global_batch_size} from epoch {phase.from_epoch}" for phase in job.batch_schedule)
    coming = next((phase for phase in job.batch_schedule if phase.from_epoch > job.epoch), None)
    now = batch_at(job.batch_schedule, job.epoch, job.global_batch_size)
    following = "" if coming is None else f", next {coming.global_batch_size} from epoch {coming.from_epoch} on"
    return f"{told}; now {now}{following}"


def stream_text(stream: StreamStatus) -> str:
    """How many samples arrived, how many wait, and the stream's state."""
    told = (
        f"{stream.name!r}: {count(stream.num_waiting, 'sample')} waiting of {stream.num_samples:,} that came, "
        f"{stream.num_used:,} used"
    )
    if stream.is_closed:
        return f"{told}; closed: the rest is trained, then the job ends"
    told += f", {number(stream.arrivals_per_s, 3)} a second arrive"
    return f"{told}; idle: no function runs, nothing is charged" if stream.is_idle else told


def search_quote_text(search: SearchQuote) -> str:
    """What a search would do, and what it may cost."""
    beside = f"{format_duration(search.trial_s)} and {usd(search.trial_usd)}"
    return (
        f"up to {search.num_trials} more configurations are tried while it trains, each for some steps that count; one "
        f"costs at most {beside} more than going on, and only what is expected to save more than that is tried"
    )


def search_details(search: SearchStatus | None) -> str:
    """A table of the tried configurations; empty before the first measurement."""
    if search is None or not search.tried:
        return ""
    shown = search.tried[-MAX_TRIED:]
    lines = [f"what was tried, in order ({_legend(shown)})", *_table(shown).splitlines()]
    if len(shown) < len(search.tried):
        lines.append(f"({len(search.tried) - len(shown)} earlier ones: --json)")
    return "\n\n" + "\n".join(f"  {line}" for line in lines)


def _legend(tried: Sequence[TriedConfiguration]) -> str:
    signs = ["left: tried and left again"] if any(one.is_left for one in tried) else []
    return "; ".join([*signs, "model: what the model alone said of a step"])


def _table(tried: Sequence[TriedConfiguration]) -> str:
    rows = [
        (
            str(one.num_workers),
            f"{one.memory_mb} MB",
            str(one.global_batch_size),
            str(one.num_steps),
            format_duration(one.step_s),
            _model(one),
            usd(one.step_usd),
            f"{one.sync_s / one.step_s:.0%}" if one.step_s > 0 else UNKNOWN,
            one.collective or UNKNOWN,
            " ".join(["runs now"] * one.is_running + ["left"] * one.is_left),
        )
        for one in tried
    ]
    header = ("WORKERS", "MEMORY", "BATCH", "STEPS", "STEP", "MODEL", "$/STEP", "EXCHANGE", "BY", "")
    return align(header, rows)


def _model(one: TriedConfiguration) -> str:
    """Like 1.81 s (-6%): the model's prediction, and its error."""
    if one.model_step_s is None or one.step_s <= 0:
        return UNKNOWN
    return f"{format_duration(one.model_step_s)} ({one.model_step_s / one.step_s - 1:+.0%})"


def search_cell(job: JobStatus) -> str:
    """Like 8 x 1024 MB?: the running configuration, with a question mark while the search goes on."""
    assert job.search is not None
    text = configuration_text(job.search.num_workers, job.search.memory_mb)
    return f"{text}?" if job.search.phase in ("waiting", "searching") else text


def _since(job: JobStatus) -> str:
    """The epoch from which the schedule's present batch size applies."""
    begun = [phase for phase in job.batch_schedule if phase.from_epoch <= job.epoch]
    if not begun or begun[-1].global_batch_size != job.global_batch_size:
        return f" at step {job.step}"
    return f", as scheduled from epoch {begun[-1].from_epoch} on"


def search_changes(last: JobStatus, job: JobStatus) -> list[str]:
    """Lines about what changed in a job's search, batch size and stream between two statuses."""
    lines = []
    before, now = last.search, job.search
    if before is not None and now is not None:
        was, is_now = (before.num_workers, before.memory_mb), (now.num_workers, now.memory_mb)
        if is_now != was and last.step > 0:
            lines.append(f"{configuration_text(*was)} -> {configuration_text(*is_now)}: {now.reason}")
        if now.phase == "settled" and before.phase == "searching":
            lines.append(f"settled on {configuration_text(*is_now)}: {now.reason}")
        elif now.phase == "searching" and before.phase == "settled":
            lines.append(f"searches again: {now.reason}")
    if last.functions is not None and job.functions is not None:
        # A change is complete once the first step of the new plan is committed.
        made = len(job.functions.changes) - len(last.functions.changes)
        lines += [f"now {change_text(change)}" for change in job.functions.changes[-made:] if made > 0 and change.step]
    if job.global_batch_size != last.global_batch_size and (job.batch_schedule or job.search is not None):
        lines.append(f"batch {last.global_batch_size} -> {job.global_batch_size}{_since(job)}")
    if last.stream is not None and job.stream is not None:
        if job.stream.is_idle and not last.stream.is_idle:
            lines.append(
                f"idle: {count(job.stream.num_waiting, 'sample')} of {job.stream.name!r} are fewer than a batch; no "
                "function runs, nothing is charged"
            )
        elif last.stream.is_idle and not job.stream.is_idle:
            lines.append(f"goes on: {count(job.stream.num_waiting, 'sample')} of {job.stream.name!r} have come")
        if job.stream.is_closed and not last.stream.is_closed:
            lines.append(f"{job.stream.name!r} is closed: {count(job.stream.num_waiting, 'sample')} left to train")
    return lines
