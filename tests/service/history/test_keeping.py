"""What the indexes keep at a snapshot of the state leads to the same story as all steps before it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kits.control.years import bare_controller
from kits.service.platform_double import View
from springtide.control.journal.archive import JournalSnapshot
from springtide.control.loop import begin
from springtide.control.state_data import PlatformSnapshot, data_of, encode_snapshot
from springtide.core.errors import JournalError
from springtide.core.events import ClockAnchored, JobsArchived
from springtide.core.ports import Step
from springtide.scheduling.registry import make_policy
from springtide.service.history.history import HistoryIndex, entries_of, pools_part
from springtide.service.history.keeping import Keepers
from springtide.service.history.pools import PoolHistory
from springtide.service.history.series import SeriesIndex, points_of
from springtide_studies.fault_seeds.seeds import FaultRun

EMPTY = View(seq=0, now_s=0.0, jobs={}, services={}, nodes=(), policy="")


@pytest.fixture(scope="module")
def steps() -> list[tuple[int, Step]]:
    """A day with faults, loans and reclaims."""
    run = FaultRun(8, lambda: make_policy("two-way/fifo"), has_pools=True)
    run.run()
    return list(run.journal.read())


class Story:
    def __init__(self) -> None:
        self.history, self.series, self.pools = HistoryIndex(), SeriesIndex(), PoolHistory()
        self.keepers = Keepers()
        self.keepers.keep("history", self.history)
        self.keepers.keep("series", self.series)
        self.keepers.follow("history", lambda kept: self.pools.take(pools_part(kept)))

    def add(self, steps: list[tuple[int, Step]]) -> Story:
        for seq, step in steps:
            self.history.add(seq, step)
            self.series.add(seq, step, EMPTY)
            self.pools.add(step)
        return self

    def told(self) -> Any:
        return (
            self.history.timeline(1e9),
            self.history.totals(),
            self.history.handovers(),
            self.history.pool_sizes(0.0),
            {name: (self.history.entries(name), self.series.series(name, 0.0)) for name in self.history._tracks},
            self.pools.totals(),
            self.pools.handovers(),
        )


@pytest.mark.slow
def test_an_index_that_begins_at_a_snapshot_tells_the_same(steps: list[tuple[int, Step]]) -> None:
    whole = Story().add(steps)
    assert whole.history.handovers(), "the day has no loans"
    assert whole.history.totals().num_lost_replicas
    for after in range(1, len(steps), max(1, len(steps) // 12)):
        first = Story().add(steps[:after])
        second = Story()
        second.keepers.take(first.keepers.kept())
        assert second.told() == first.told()
        assert second.add(steps[after:]).told() == whole.told(), after
        assert second.keepers.kept() == whole.keepers.kept()


@pytest.mark.parametrize("broken", ["history", "series", "anchor"])
def test_a_snapshot_with_unreadable_index_data_is_passed_over_for_the_older_one(
    steps: list[tuple[int, Step]], broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer, again = Story().add(steps[:40]), Story().add(steps[:80]), Story()
    again.keepers.follow("anchor", lambda kept: msgspec.json.decode(kept, type=ClockAnchored))
    snapshots = []
    for seq, kept in ((80, newer.keepers.kept() | {broken: b"\xc1"}), (40, older.keepers.kept())):
        controller = bare_controller()
        controller.state.num_stale_events = seq
        blob = encode_snapshot(PlatformSnapshot(state=data_of(controller.state), kept=kept))
        snapshots.append(JournalSnapshot(seq, b"", 0.0, 2, blob))
    controller = bare_controller()
    assert begin(controller, snapshots, lambda seq, found: again.keepers.take(found.kept)) == 40
    assert controller.state.num_stale_events == 40
    assert again.told() == older.told()
    assert "the snapshot of step 80 cannot be used" in caplog.text
    again = Story()
    again.keepers.follow("anchor", lambda kept: msgspec.json.decode(kept, type=ClockAnchored))
    assert begin(bare_controller(), snapshots[:1], lambda seq, found: again.keepers.take(found.kept)) == 0
    assert again.told() == Story().told(), "all steps are read from the first on"


def test_a_job_that_leaves_takes_its_story_along(steps: list[tuple[int, Step]]) -> None:
    story = Story().add(steps)
    name = next(name for name, track in story.history._tracks.items() if track.kind == "job")
    entries, series = story.history.entries(name), story.series.series(name, 0.0)
    kept = story.keepers.kept_of_job(name)
    story.add([(10**6, Step(now_s=1e6, events=(JobsArchived(job_ids=(name,)),)))])
    assert story.history.entries(name) == ()
    assert story.series.series(name, 0.0).points == ()
    assert entries_of(kept["history"]) == entries
    assert points_of(kept["series"]) == series.points


def test_what_a_later_version_keeps_besides_is_left_and_what_is_broken_is_an_error() -> None:
    story = Story()
    story.series.take(msgspec.msgpack.encode({"_seq": 7, "_unknown": 1}))
    assert story.series._seq == 7
    with pytest.raises(JournalError, match="cannot be read"):
        story.series.take(b"\xc1")
