"""Compacting the journal of a platform that is down: as at its snapshots, but of all steps at once."""

from __future__ import annotations

import msgspec

from springtide.control.controller import Controller
from springtide.control.journal.chain import JournalMark
from springtide.control.journal.journal import DurableJournal
from springtide.control.journal.retention import Retention
from springtide.control.loop import replay
from springtide.control.state_data import PlatformSnapshot, data_of, encode_snapshot
from springtide.core.events import ClockAnchored
from springtide.core.ports import Step
from springtide.scheduling.policies.fifo import Fifo
from springtide.service.history.history import HistoryIndex
from springtide.service.history.keeping import ANCHOR, Keepers
from springtide.service.history.series import SeriesIndex
from springtide.service.platform import PlatformView


def compact(journal: DurableJournal, keep: Retention) -> None:
    """Have two snapshots at the journal's end and all steps before them in segments, as far as `keep` keeps them.

    Raises JournalError.
    """
    newest = journal.newest
    # Nothing is decided: the policy is not asked.
    controller = Controller(Fifo())
    keepers, history, series = Keepers(), HistoryIndex(), SeriesIndex()
    keepers.keep("history", history)
    keepers.keep("series", series)
    anchors: dict[str, bytes] = {}
    keepers.follow(ANCHOR, lambda kept: anchors.update({ANCHOR: kept}))
    view = PlatformView(seq=0, now_s=0.0, jobs={}, services={}, nodes=(), policy="")

    def cut(mark: JournalMark, now_s: float) -> None:
        snapshot = PlatformSnapshot(state=data_of(controller.state), kept=anchors | keepers.kept())
        journal.archive.cut(mark, now_s, encode_snapshot(snapshot), keep)

    def note(seq: int, step: Step) -> None:
        history.add(seq, step)
        series.add(seq, step, view)
        for event in step.events:
            if isinstance(event, ClockAnchored):
                anchors[ANCHOR] = msgspec.json.encode(event)
        if seq >= newest.seq - 1:
            row = next(iter(journal.rows(seq - 1)))
            cut(JournalMark(row.seq, row.chain), step.now_s)

    replay(
        controller,
        journal,
        on_step=note,
        snapshots=journal.archive.snapshots(),
        on_snapshot=lambda seq, snapshot: keepers.take(snapshot.kept),
    )
    journal.archive.move_all()
    journal.archive.drop(keep, journal.last_now_s())
    journal.ended.drop(keep.ended_s, journal.last_now_s())
    journal.shrink()
