"""Sending a folder: what the platform lacks, in few bodies, of one moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kits.client.sent_contents import SentContents
from springtide.client.folders import send
from springtide.client.folders.send import pack_folder, submit_with_folder
from springtide.client.sources.source import read_source
from springtide.core.errors import Conflict, InvalidRequest
from springtide.storage.folders.contents import open_archive
from springtide.storage.folders.tree import MAX_FILE_BYTES, FolderTree, decode_tree


class FakePlatform:
    """Keeps contents and remembers submissions; refuses as often as it is told."""

    def __init__(self) -> None:
        self.contents = SentContents()
        self.jobs: list[dict[str, Any]] = []
        self.refusals: list[Exception] = []
        self.on_ask = lambda: None

    def request(self, method: str, path: str, answer_type: type, **asked: Any) -> Any:
        answer = self.contents.request(method, path, answer_type, **asked)
        if path == "/v1/missing-contents":
            self.on_ask()
        return answer

    def submit_job(self, **asked: Any) -> Any:
        if self.refusals:
            raise self.refusals.pop()
        self.jobs.append(asked)
        return asked

    def tree(self) -> FolderTree:
        return decode_tree(self.contents.kept[self.jobs[-1]["folder"].sha256])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path.resolve() / "folder"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("import pkg.model\n")
    (root / "pkg" / "model.py").write_text("x = 1\n")
    return root


def submit(platform: FakePlatform, folder: Path, wish: Any = None) -> list[str]:
    lines: list[str] = []
    source = read_source(folder / "train.py", "", "script")
    submit_with_folder(platform, {"name": "train", "source": source}, wish, lines.append)  # type: ignore[arg-type]
    return lines


def test_a_folder_is_sent_in_one_body_and_nothing_of_it_twice(folder: Path) -> None:
    platform = FakePlatform()
    lines = submit(platform, folder)
    assert lines == [f"{folder} travels with the job: 2 files, 23 B"]
    sent = platform.jobs[0]["folder"]
    assert (sent.path, sent.directory, sent.origin) == ("train.py", "", str(folder))
    assert [file.path for file in platform.tree().files] == ["pkg/model.py", "train.py"]
    # The contents together, then the list of them.
    assert platform.contents.num_bodies == 2
    submit(platform, folder)
    assert platform.contents.num_bodies == 2
    (folder / "pkg" / "model.py").write_text("x = 2\n")
    submit(platform, folder)
    assert platform.contents.num_bodies == 4
    assert len(platform.contents.kept) == 5


def test_large_files_are_sent_alone_and_small_ones_in_bodies_of_bounded_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "_SMALL_BYTES", 100)
    monkeypatch.setattr(send, "_BODY_BYTES", 100)
    for number in range(5):
        (folder / f"small{number}.txt").write_text(f"{number}" * 40)
    (folder / "large.txt").write_text("x" * 101)
    platform = FakePlatform()
    submit(platform, folder)
    # Seven small ones, of which five make two bodies and a half; the large one; the list.
    assert platform.contents.num_bodies == 3 + 1 + 1
    assert len(platform.contents.kept) == 9


def test_the_job_works_where_its_owner_stands(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = FakePlatform()
    for here, directory in ((folder / "pkg", "pkg"), (folder, ""), (tmp_path, "")):
        monkeypatch.chdir(here)
        submit(platform, folder)
        assert platform.jobs[-1]["folder"].directory == directory


def test_a_file_that_changes_while_it_is_sent_is_read_anew(folder: Path) -> None:
    platform = FakePlatform()
    changes = iter(["x = 2\n", None])

    def change() -> None:
        text = next(changes, None)
        if text is not None:
            (folder / "pkg" / "model.py").write_text(text)

    platform.on_ask = change
    submit(platform, folder)
    assert b"x = 2\n" in platform.contents.kept.values()
    assert b"x = 1\n" not in platform.contents.kept.values()


def test_a_file_that_never_rests_is_named(folder: Path) -> None:
    platform = FakePlatform()
    number = iter(range(100))
    platform.on_ask = lambda: (folder / "pkg" / "model.py").write_text(f"x = {next(number)}{os.getpid()}\n") and None
    with pytest.raises(InvalidRequest, match=r"pkg/model\.py in .* changes while it is sent"):
        submit(platform, folder)
    assert platform.jobs == []


def test_contents_that_went_meanwhile_are_sent_again(folder: Path) -> None:
    platform = FakePlatform()
    submit(platform, folder)
    platform.refusals = [Conflict("2 contents were not sent")]
    answer = platform.submit_job

    def lose(**asked: Any) -> Any:
        if platform.refusals:
            platform.contents.kept.clear()
        return answer(**asked)

    platform.submit_job = lose  # type: ignore[method-assign]
    submit(platform, folder)
    assert len(platform.jobs) == 2
    assert len(platform.contents.kept) == 3


def test_a_conflict_for_another_reason_stays_one(folder: Path) -> None:
    platform = FakePlatform()
    platform.refusals = [Conflict("the key was used")]
    with pytest.raises(Conflict, match="key was used"):
        submit(platform, folder)


def test_too_large_a_folder_is_refused_before_anything_is_read(folder: Path) -> None:
    with (folder / "huge.csv").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    platform = FakePlatform()
    with pytest.raises(InvalidRequest, match=r"huge\.csv \(268 MB\); leave files out in \.springtideignore"):
        submit(platform, folder)
    assert platform.contents.num_bodies == 0


def test_the_file_alone_is_submitted_as_it_was_before(folder: Path) -> None:
    platform = FakePlatform()
    assert submit(platform, folder, False) == []
    assert "folder" not in platform.jobs[0]
    assert platform.contents.num_bodies == 0


def test_a_folder_is_packed_as_it_would_be_sent_and_no_more_than_is_allowed(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    (folder / "data.bin").write_bytes(os.urandom(200_000))
    source, path = read_source(folder / "pkg" / "model.py", "", "script"), tmp_path / "folder.zip"
    sent = pack_folder(source, folder, path, max_bytes=300_000, on_progress=lines.append)
    assert sent is not None
    assert (sent.path, sent.origin) == ("pkg/model.py", str(folder))
    assert lines == [f"{folder} travels with it: 3 files, 200 kB"]
    with open_archive(path, sent.sha256) as (tree, open_content), open_content(tree.files[1].sha256) as file:
        assert [each.path for each in tree.files] == ["data.bin", "pkg/model.py", "train.py"]
        assert file.read() == b"x = 1\n"
    with pytest.raises(
        InvalidRequest, match=r"more than 100 kB when it is compressed.*: data\.bin \(200 kB\).*REST API"
    ):
        pack_folder(source, folder, path, max_bytes=100_000, on_progress=lines.append)
    assert pack_folder(source, False, path, max_bytes=1, on_progress=lines.append) is None


def test_what_takes_long_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 1))
    monkeypatch.setattr(send.time, "monotonic", lambda: float(next(now)))
    lines = submit(FakePlatform(), folder)
    assert lines[1:] == ["  read 6 B of 23 B", "  sent 23 B of 23 B"]
