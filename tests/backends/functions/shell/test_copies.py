"""Copies of status, losses and logs: what is brought to a new place, what is copied again, what is let lie."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from springtide.backends.functions.shell import copies as copies_module
from springtide.backends.functions.shell.copies import Copies, copies_prefix, fetch_status
from springtide.backends.functions.shell.notes import LOSSES_FILE, CoordinatorFiles
from springtide.core.errors import StorageError
from springtide.core.wire.functions import MAX_LOSSES, Place
from springtide.core.workload import WorkloadId
from springtide.storage.stores.checked import CheckedStore
from springtide.storage.stores.files import FileStore

JOB = WorkloadId("j")


@pytest.fixture
def store(tmp_path: Path) -> CheckedStore:
    return CheckedStore(FileStore(tmp_path / "store"))


def filled(folder: Path) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "functions.json").write_text("{}")
    (folder / "losses.jsonl").write_text("[1, 0.5, 8]\n")
    (folder / "logs" / "j.0.0.log").write_text("one\n")
    return folder


def names(store: CheckedStore) -> list[str]:
    return [key.removeprefix(copies_prefix(JOB)) for key in store.keys(copies_prefix(JOB))]


def test_what_one_place_has_written_is_in_another(store: CheckedStore, tmp_path: Path) -> None:
    here = filled(tmp_path / "here")
    Copies(store, JOB, here).save(is_last=True)
    assert names(store) == ["functions.json", "logs/j.0.0.log", "losses.jsonl"]
    there = tmp_path / "there"
    Copies(store, JOB, there).restore()
    found = {str(path.relative_to(there)): path.read_text() for path in there.rglob("*") if path.is_file()}
    assert found == {"functions.json": "{}", "losses.jsonl": "[1, 0.5, 8]\n", "logs/j.0.0.log": "one\n"}
    assert (there / "logs" / "j.0.0.log").stat().st_mode & 0o777 == 0o600


def test_lines_are_never_lost_to_a_shorter_copy(store: CheckedStore, tmp_path: Path) -> None:
    here = filled(tmp_path / "here")
    copies = Copies(store, JOB, here)
    copies.save(is_last=True)
    with (here / "losses.jsonl").open("a") as file:
        file.write("[2, 0.4, 8]\n")
    again = Copies(store, JOB, here)
    again.restore()
    assert len((here / "losses.jsonl").read_text().splitlines()) == 2
    again.save(is_last=True)
    assert store.get(copies_prefix(JOB) + "losses.jsonl").count(b"\n") == 2
    # One whose directory is of a time before the other's goes on from the other's.
    old = filled(tmp_path / "old")
    Copies(store, JOB, old).restore()
    assert len((old / "losses.jsonl").read_text().splitlines()) == 2


def test_only_what_has_changed_is_copied(store: CheckedStore, tmp_path: Path) -> None:
    here = filled(tmp_path / "here")
    copies = Copies(store, JOB, here)
    copies.save()
    before = store.requests().num_puts
    copies.save()
    # The status has no length to go by.
    assert store.requests().num_puts == before + 1
    with (here / "logs" / "j.0.0.log").open("a") as file:
        file.write("two\n")
    copies.save()
    assert store.requests().num_puts == before + 3


def test_a_long_log_waits_until_it_has_grown_by_a_part(
    store: CheckedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies_module, "SHORT_BYTES", 100)
    here = filled(tmp_path / "here")
    log, key = here / "logs" / "j.0.0.log", f"{copies_prefix(JOB)}logs/j.0.0.log"
    log.write_text("x" * 1000)
    copies = Copies(store, JOB, here)
    copies.save()
    for length, copied in ((1100, 1000), (1250, 1250), (1300, 1250)):
        log.write_text("x" * length)
        copies.save()
        assert len(store.get(key)) == copied
    copies.save(is_last=True)
    assert len(store.get(key)) == 1300


def test_what_comes_once_does_not_wait(store: CheckedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "SHORT_BYTES", 100)
    monkeypatch.setattr(copies_module, "URGENT_COPY_S", 0.0)
    here = filled(tmp_path / "here")
    files, copies = CoordinatorFiles(here, JOB), Copies(store, JOB, here)
    files.on_new_lines = copies.copy_soon
    files.add_lines("coordinator", ["x" * 1000])
    copies.save()
    files.add_step(Place(0, 0), 1, "step 1/9")
    files.add_losses([(step, 0.5, 8) for step in range(2, MAX_LOSSES // 2)])
    assert not copies.is_due(), "what is reported again can wait"
    files.add_lines("coordinator", ["0.0.1 killed"])
    assert copies.is_due()
    copies.save()
    assert store.get(f"{copies_prefix(JOB)}logs/j.coordinator.log").endswith(b"killed\n")
    assert not copies.is_due()
    for hurried in (
        lambda: files.add_tail(Place(0, 0), 1, "printed\n"),
        lambda: files.add_losses([(step, 0.5, 8) for step in range(MAX_LOSSES // 2, MAX_LOSSES)]),
    ):
        hurried()
        assert copies.is_due()
        copies.save()
        assert not copies.is_due()
    assert store.get(f"{copies_prefix(JOB)}logs/j.0.0.log").endswith(b"(1) printed\n")


def test_what_is_no_copy_is_let_lie(store: CheckedStore, tmp_path: Path) -> None:
    for name in ("other", "logs/deep/x.log", "logs/x.txt", "logs/y.log"):
        store.put(copies_prefix(JOB) + name, b"1")
    Copies(store, JOB, tmp_path / "there").restore()
    assert [path.name for path in (tmp_path / "there").rglob("*") if path.is_file()] == ["y.log"]


class Shut(FileStore):
    """A store that does nothing that it is asked."""

    def write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        raise StorageError("it is shut")

    def names(self, prefix: str) -> list[str]:
        raise StorageError("it is shut")


def test_a_store_that_is_shut_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copies = Copies(CheckedStore(Shut(tmp_path / "store")), JOB, filled(tmp_path / "here"))
    copies.restore()
    copies.save(is_last=True)
    assert "cannot be had: it is shut" in caplog.text
    assert "could not be written: it is shut" in caplog.text


def test_the_status_of_a_job_that_ended_elsewhere_is_fetched(store: CheckedStore, tmp_path: Path) -> None:
    fetch_status(store, JOB, tmp_path / "there")
    assert not (tmp_path / "there").exists()
    store.put(copies_prefix(JOB) + "functions.json", b"{}")
    fetch_status(store, JOB, tmp_path / "there")
    assert (tmp_path / "there" / "functions.json").read_bytes() == b"{}"


def test_a_loss_that_is_no_number_is_kept_as_nothing(tmp_path: Path) -> None:
    files = CoordinatorFiles(filled(tmp_path / "here"), JOB)
    files.add_losses([(1, 0.5, 8), (2, math.nan, 8)])
    assert (tmp_path / "here" / LOSSES_FILE).read_text().splitlines()[-2:] == ["[1, 0.5, 8]", "[2, null, 8]"]
    last = files.last_loss()
    assert last is not None
    assert last[0] == 2
    assert math.isnan(last[1])
