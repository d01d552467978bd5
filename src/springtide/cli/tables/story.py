"""A workload's history as text: lines with the time of day, and the number of workers over time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from springtide.core.status.platform import Explanation, HistoryEntry

_NUM_SHOWN = 12
_NUM_COUNTS_SHOWN = 8
# Events that all workers of a group have at about the same time; they are folded into one line.
_FOLDED_KINDS = frozenset({"starting", "held-up", "begun", "ready", "stopping", "stopped"})
_FOLDED_WITHIN_S = 2.0


def num_workers_over_time(history: Sequence[HistoryEntry]) -> list[int]:
    """The number of training workers after each change; 0 during a pause."""
    counts: list[int] = []
    for entry in history:
        if entry.num_workers is None:
            continue
        if entry.kind in ("start", "resume") and counts:
            counts.append(0)
        if not counts or counts[-1] != entry.num_workers:
            counts.append(entry.num_workers)
    return counts


def workers_text(counts: Sequence[int]) -> str:
    """Like 1 -> 4 -> 2; the middle of a long history is left out. Empty if unknown."""
    texts = [str(count) for count in counts]
    if len(texts) > _NUM_COUNTS_SHOWN:
        texts = [texts[0], "...", *texts[-(_NUM_COUNTS_SHOWN - 2) :]]
    return " -> ".join(texts)


def _folded(history: Sequence[HistoryEntry]) -> list[tuple[float, str]]:
    """Times and texts, with one line for events that several workers have together."""
    groups: list[list[HistoryEntry]] = []
    for entry in history:
        last = groups[-1][-1] if groups else None
        is_near = last is not None and entry.kind == last.kind and entry.at_s - last.at_s < _FOLDED_WITHIN_S
        if is_near and last is not None and (entry.kind in _FOLDED_KINDS or entry.text == last.text):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return [
        (group[0].at_s, group[0].text + (f"  (and {len(group) - 1} more like it)" if len(group) > 1 else ""))
        for group in groups
    ]


def explanation(answer: Explanation, wall_clock_offset_s: float) -> str:
    """The reason, its facts, possible remedies, and the newest part of the history in local time."""
    lines = [f"{answer.workload_id} {answer.state}: {answer.reason}"]
    lines += [f"  because {line}" for line in answer.evidence]
    if answer.next_steps:
        lines.append("  you could:")
        lines += [f"    {line}" for line in answer.next_steps]
    if answer.history:
        lines.append("  what happened:")
        for at_s, text in _folded(answer.history)[-_NUM_SHOWN:]:
            moment = datetime.fromtimestamp(at_s + wall_clock_offset_s)
            lines.append(f"    {moment:%H:%M:%S}  {text}")
    return "\n".join(lines)
