"""A journal that grew for long is compacted while the platform is down."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from kits.control.years import Years, bare_controller
from springtide.cli.main import cli
from springtide.control import upkeep
from springtide.control.journal import archive
from springtide.control.journal.inspection import inspect_journal
from springtide.control.journal.retention import Retention
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import replay
from springtide.control.state_data import StateData, data_of
from springtide.service.compaction import compact
from springtide.service.history.history import HistoryIndex


@pytest.fixture
def grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, StateData, HistoryIndex]:
    """A journal without snapshots, of a file that cannot shrink by itself."""
    monkeypatch.setattr(upkeep, "SNAPSHOT_S", 1e9)
    monkeypatch.setattr(archive, "SEGMENT_STEPS", 10)
    with sqlite3.connect(tmp_path / "journal.db") as db:
        db.execute("CREATE TABLE other (x)")
    controller, journal = bare_controller(), SqliteJournal(tmp_path / "journal.db")
    journal.query("PRAGMA synchronous = OFF")
    years = Years(journal, upkeep.JournalUpkeep(controller, journal, Retention()), controller, 10)
    years.run(3600.0, 60.0, 1800.0)
    history = HistoryIndex()
    for seq, step in journal.read():
        history.add(seq, step)
    journal.close()
    return tmp_path / "journal.db", data_of(controller.state), history


def test_all_steps_but_the_last_go_to_segments(grown: tuple[Path, StateData, HistoryIndex]) -> None:
    path, state, history = grown
    journal = SqliteJournal(path)
    compact(journal, Retention())
    newest = journal.newest.seq
    assert journal.query("SELECT seq FROM steps") == [(newest,)]
    assert [snapshot.seq for snapshot in journal.archive.snapshots()] == [newest, newest - 1]
    assert len(journal.archive.segments()) == (newest - 1 + 9) // 10
    assert journal.query("PRAGMA auto_vacuum") == [(2,)]
    assert [seq for seq, _ in journal.read()] == list(range(1, newest + 1))
    for snapshots in (list(journal.archive.snapshots()), list(journal.archive.snapshots())[1:], []):
        controller, index = bare_controller(), HistoryIndex()
        assert replay(
            controller,
            journal,
            snapshots=snapshots,
            on_step=index.add,
            on_snapshot=lambda seq, found, index=index: index.take(found.kept["history"]),
        )
        assert data_of(controller.state) == state
        assert index.timeline(1e9) == history.timeline(1e9)
    compact(journal, Retention(steps_bytes=1))
    assert inspect_journal(journal).begins_at > newest - 12
    journal.close()


def test_the_command(grown: tuple[Path, StateData, HistoryIndex], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINGTIDE_JOURNAL_RETENTION", "7d,1KB")
    state = ["--state", str(grown[0].parent)]
    before = json.loads(CliRunner().invoke(cli, ["journal", "check", "--json", *state]).output)
    assert (before["starts_from"], before["num_snapshots"], before["begins_at"]) == (0, 0, 1)
    done = CliRunner().invoke(cli, ["journal", "compact", *state])
    assert done.exit_code == 0, done.output
    assert "a start reads the snapshot of step" in done.output
    assert "retention has dropped the steps before" in done.output
    again = CliRunner().invoke(cli, ["journal", "check", *state])
    assert again.exit_code == 0, again.output
    with sqlite3.connect(grown[0]) as db:
        db.execute("UPDATE steps SET now_s = 0.5")
        db.execute("DELETE FROM snapshots")
    refused = CliRunner().invoke(cli, ["journal", "compact", *state])
    assert refused.exit_code != 0
    assert "springtide journal check" in f"{refused.output} {refused.exception}"
