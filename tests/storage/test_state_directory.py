"""Where the state is: a setting first, then the XDG variable, and an earlier platform is not lost sight of."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.storage.state_directory import default_state_directory, find_state_directory


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPRINGTIDE_STATE", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return tmp_path


def make_platform(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "token").write_text("t", encoding="ascii")
    return folder


def test_without_a_variable_it_is_the_usual_place(home: Path) -> None:
    assert find_state_directory() == (home / ".local" / "state" / "springtide", "")


def test_the_xdg_variable_names_its_parent(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    assert find_state_directory() == (home / "xdg" / "springtide", "")


@pytest.mark.parametrize("value", ["", "relative/place"])
def test_what_is_no_absolute_path_is_ignored(home: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", value)
    assert default_state_directory() == home / ".local" / "state" / "springtide"


def test_the_own_variable_wins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_platform(home / ".local" / "state" / "springtide")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    monkeypatch.setenv("SPRINGTIDE_STATE", str(home / "own"))
    assert find_state_directory() == (home / "own", "")


def test_an_earlier_platform_is_still_found_and_a_note_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = make_platform(home / ".local" / "state" / "springtide")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    path, note = find_state_directory()
    assert path == usual
    assert f"there is a platform in {usual} and none in {home / 'xdg' / 'springtide'}" in note
    make_platform(home / "xdg" / "springtide")
    assert find_state_directory() == (home / "xdg" / "springtide", "")
