"""The note of a journal's end reaches the disk at most once a second, and when it is closed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from springtide.control.journal.chain import JournalMark
from springtide.control.journal.witness import Witness, read_witness


def test_the_note_reaches_the_disk_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    note = Witness(tmp_path / "journal.head")
    counts = []
    for seq, now_s in enumerate((10.0, 10.4, 10.9, 11.1, 11.2), start=1):
        note.note(JournalMark(seq, bytes(16)), now_s)
        counts.append(len(synced))
    assert counts == [1, 1, 1, 2, 2]
    assert read_witness(tmp_path / "journal.head") == JournalMark(5, bytes(16)), "it is exact for a process that dies"
    note.close()
    assert len(synced) == 3
