"""A workload's history as people read it."""

from __future__ import annotations

from springtide.cli.tables.story import explanation, num_workers_over_time, workers_text
from springtide.core.status.platform import Explanation, HistoryEntry


def _entries(*pairs: tuple[str, str]) -> list[HistoryEntry]:
    return [HistoryEntry(seq=n, at_s=n * 0.1, kind=kind, text=text) for n, (kind, text) in enumerate(pairs)]


def test_the_number_of_workers_over_time() -> None:
    counts = {"submitted": None, "start": 1, "grow": 4, "replace": 4, "recover": 3, "preempt": None, "resume": 2}
    history = [
        HistoryEntry(seq=n, at_s=n * 0.1, kind=kind, text="9 workers in its text", num_workers=num_workers)
        for n, (kind, num_workers) in enumerate(counts.items())
    ]
    assert num_workers_over_time(history) == [1, 4, 3, 0, 2]
    assert workers_text([1, 4, 3, 0, 2]) == "1 -> 4 -> 3 -> 0 -> 2"
    assert num_workers_over_time([]) == []
    assert workers_text([]) == ""


def test_a_long_story_is_shortened() -> None:
    assert workers_text(range(1, 21)) == "1 -> ... -> 15 -> 16 -> 17 -> 18 -> 19 -> 20"


def test_what_several_workers_do_together_is_one_line() -> None:
    answer = Explanation(
        workload_id="fit-1",
        name="fit",
        state="SUCCEEDED",
        reason="it returned",
        evidence=(),
        next_steps=(),
        history=tuple(
            _entries(
                ("start", "started on 2 workers at step 1"),
                ("stopped", "fit-1.0 left"),
                ("stopped", "fit-1.1 left"),
                ("ended", "SUCCEEDED"),
            )
        ),
    )
    lines = explanation(answer, 0.0).splitlines()
    assert [line.split("  ", 3)[-1] for line in lines[2:]] == [
        "started on 2 workers at step 1",
        "fit-1.0 left  (and 1 more like it)",
        "SUCCEEDED",
    ]
