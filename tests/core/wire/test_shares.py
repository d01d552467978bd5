"""Slots carry what a worker does; a reader survives whatever is in them."""

from __future__ import annotations

import os
import random
import struct
import threading
from pathlib import Path

import pytest

from springtide.core.errors import BackendError
from springtide.core.wire.shares import (
    MAX_BATCH_SIZE,
    MAX_QUEUED,
    NUM_KEPT,
    SLOT_BYTES,
    EndedIteration,
    SlotReader,
    SlotReading,
    SlotWriter,
    clear_slot,
    make_slots,
)


class Ticking:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def look(reader: SlotReader, slot: int = 0) -> SlotReading:
    reading = reader.read(slot)
    assert reading is not None
    return reading


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_slots(tmp_path / "slots", 8)
    return tmp_path / "slots"


def test_what_is_written_is_read(path: Path) -> None:
    clock = Ticking()
    writer, reader = SlotWriter(str(path), 3, clock), SlotReader(path)
    first = look(reader, 3)
    assert (first.num_begun, first.started_s) == (0, 0.0)
    writer.begin(4)
    writer.queued(7)
    running = look(reader, 3)
    assert (running.num_begun, running.num_ended, running.started_s) == (1, 0, 100.0)
    assert (running.batch_size, running.num_queued, running.finished) == (4, 7, ())
    clock.now_s += 0.25
    writer.end()
    ended = look(reader, 3)
    assert ended.finished == (EndedIteration(4, 0.25),)
    assert (ended.started_s, ended.batch_size) == (0.0, 0)
    again = look(reader, 3)
    assert (again.num_ended, again.finished) == (1, ())
    neighbour = look(reader, 2)
    assert neighbour.num_begun == 0
    reader.close()
    writer.close()


def test_what_has_ended_is_told_once_on_each_device(path: Path) -> None:
    clock = Ticking()
    writer, reader = SlotWriter(str(path), 3, clock), SlotReader(path)
    for on in ("n/0", "n/1"):
        assert reader.read(3, on) is not None
    writer.begin(4)
    clock.now_s += 0.25
    writer.end()
    for on in ("n/0", "n/1"):
        assert reader.has_changed(3, on)
        seen = reader.read(3, on)
        assert seen is not None
        assert seen.finished == (EndedIteration(4, 0.25),)
        assert not reader.has_changed(3, on)
    reader.forget(3)
    assert reader.has_changed(3, "n/0")
    reader.close()
    writer.close()


def test_only_the_last_iterations_are_kept_and_in_order(path: Path) -> None:
    clock = Ticking()
    writer, reader = SlotWriter(str(path), 0, clock), SlotReader(path)
    reader.read(0)
    for number in range(NUM_KEPT + 5):
        writer.begin(number)
        clock.now_s += 1.0
        writer.end()
    reading = look(reader)
    assert reading.num_ended == NUM_KEPT + 5
    assert [entry.batch_size for entry in reading.finished] == list(range(5, NUM_KEPT + 5))
    reader.close()


def test_an_end_without_a_beginning_and_an_abandoned_iteration_measure_nothing(path: Path) -> None:
    writer, reader = SlotWriter(str(path), 0, Ticking()), SlotReader(path)
    reader.read(0)
    writer.end()
    writer.begin(2)
    writer.abandon()
    writer.end()
    reading = look(reader)
    assert (reading.num_begun, reading.num_ended) == (1, 0)
    assert (reading.started_s, reading.finished) == (0.0, ())
    reader.close()


def test_a_writer_without_a_path_goes_nowhere() -> None:
    writer = SlotWriter("", 0, Ticking())
    writer.begin(1)
    writer.queued(3)
    writer.end()
    writer.close()


def test_a_closed_writer_holds_no_descriptor(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    writer = SlotWriter(str(path), 0, Ticking())
    assert len(os.listdir("/proc/self/fd")) > before
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_slot_that_was_cleared_tells_nothing_of_its_past(path: Path) -> None:
    clock = Ticking()
    writer, reader = SlotWriter(str(path), 1, clock), SlotReader(path)
    reader.read(1)
    writer.begin(1)
    clock.now_s += 1.0
    writer.end()
    clear_slot(path, 1)
    reading = look(reader, 1)
    assert (reading.num_ended, reading.finished) == (0, ())
    reader.close()


def test_files_and_slots_that_are_not_there_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="it has 8 slots"):
        SlotWriter(str(path), 8, Ticking())
    with pytest.raises(BackendError, match="slot -1"):
        SlotWriter(str(path), -1, Ticking())
    with pytest.raises(BackendError):
        SlotReader(tmp_path / "nothing")
    (tmp_path / "other").write_bytes(b"x" * 4096)
    with pytest.raises(BackendError, match="no file of share slots"):
        SlotWriter(str(tmp_path / "other"), 0, Ticking())


def test_a_file_cut_short_reads_as_no_news(path: Path) -> None:
    reader = SlotReader(path)
    os.truncate(path, 100)
    assert reader.read(5) is None
    assert reader.read(10_000) is None
    assert reader.read(-1) is None
    reader.close()


def test_a_reader_knows_whether_its_file_was_replaced(path: Path) -> None:
    reader = SlotReader(path)
    assert reader.is_of(path)
    make_slots(path, 8)
    assert not reader.is_of(path)
    path.unlink()
    assert not reader.is_of(path)
    reader.close()


def test_a_slot_left_half_written_reads_as_no_news(path: Path) -> None:
    reader = SlotReader(path)
    with path.open("r+b") as file:
        file.seek(64)
        file.write(struct.pack("<Q", 7))
    assert reader.read(0) is None
    reader.close()


def test_garbage_is_bounded(path: Path) -> None:
    generator = random.Random(5)
    reader = SlotReader(path)
    assert reader.read(0) is not None
    num_read = 0
    for number in range(300):
        data = generator.randbytes(SLOT_BYTES) if number % 3 else b"\xff" * (SLOT_BYTES - number)
        with path.open("r+b") as file:
            file.seek(64)
            file.write(bytes([data[0] & 0xFE]) + data[1:])
        reading = look(reader)
        num_read += 1
        assert 0 <= reading.num_queued <= MAX_QUEUED
        assert 0 <= reading.batch_size <= MAX_BATCH_SIZE
        assert 0.0 <= reading.started_s < 1e13
        assert len(reading.finished) <= NUM_KEPT
        assert all(0.0 < entry.duration_s <= 1e6 for entry in reading.finished)
    assert num_read == 300
    reader.close()


def test_a_reader_beside_a_busy_writer_sees_whole_records(path: Path) -> None:
    """The writer's batch size is always its count of iterations: a torn record would show another."""
    clock = Ticking()
    writer, reader = SlotWriter(str(path), 0, clock), SlotReader(path)
    done = threading.Event()

    def write() -> None:
        for number in range(1, 30_001):
            writer.begin(number)
            writer.end()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    num_seen = 0
    while not done.is_set() or num_seen == 0:
        reading = reader.read(0)
        if reading is not None:
            num_seen += 1
            assert reading.num_begun - reading.num_ended in (0, 1)
            assert reading.started_s == 0.0 or reading.batch_size == reading.num_begun
    thread.join()
    assert num_seen
    reader.close()
