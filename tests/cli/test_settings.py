"""Which setting holds, where it comes from, and what is said of one that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from springtide.cli.main import cli
from springtide.cli.session import Session
from springtide.cli.settings import resolve, user_file
from springtide.core.errors import InvalidRequest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a working directory of its own, with nothing set."""
    for name in ("STATE", "URL", "PORT", "SLOTS", "POLICY", "PRICE", "POOLS", "DAY_S", "TOKEN"):
        monkeypatch.delenv(f"SPRINGTIDE_{name}", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_user_file(text: str) -> None:
    user_file().parent.mkdir(parents=True, exist_ok=True)
    user_file().write_text(text, encoding="utf-8")


def test_the_nearer_place_wins(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (resolve("port").value, resolve("port").origin) == (8787, "default")
    _write_user_file("port = 1001\n")
    assert (resolve("port").value, resolve("port").level) == (1001, "user file")
    (home / "pyproject.toml").write_text("[tool.springtide]\nport = 1002\n", encoding="utf-8")
    assert (resolve("port").value, resolve("port").level) == (1002, "pyproject")
    monkeypatch.setenv("SPRINGTIDE_PORT", "1003")
    assert (resolve("port").value, resolve("port").origin) == (1003, "SPRINGTIDE_PORT")
    assert (resolve("port", 1004).value, resolve("port", 1004).origin) == (1004, "--port")


def test_without_anything_set(home: Path) -> None:
    assert resolve("state").value == str(home / ".local" / "state" / "springtide")
    assert resolve("policy").value == "springtide"
    assert resolve("slots").value is None
    assert resolve("url").value is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("slots = 0", "slots must be a whole number from 1 to 256, not 0"),
        ("slots = true", "slots must be a whole number"),
        ("port = 'many'", "port must be a whole number from 0 to 65535, not 'many'"),
        ("policy = 'best'", "policy must be one of springtide"),
        ("url = 'localhost:8787'", "url must be an address, like 'http://127.0.0.1:8787'"),
        ("pools = 'inference'", "pools 'inference' is not a division of slots; write it like inference=2"),
        ("pools = 'serving=2'", "there is no pool 'serving'; the pools are training and inference"),
        ("pools = 'inference=two'", "the pool inference needs a whole number of slots, not 'two'"),
        ("pools = 'inference=1,inference=2'", "the pool inference is named twice"),
        ("pools = 2", "pools 2 is not a division of slots"),
        ("day_s = 3", "a day of 3 s cannot be followed"),
        ("day_s = 'long'", "day 'long' is not a duration"),
        ("policy = 'best/fifo'", "there is no"),
        ("state = 3", "state must be a directory"),
        ("sltos = 3", "there is no setting 'sltos'"),
        ("slots =", "is not valid TOML"),
    ],
)
def test_what_cannot_be_names_its_place(text: str, sentence: str, home: Path) -> None:
    _write_user_file(text)
    name = text.partition(" ")[0].replace("sltos", "slots")
    with pytest.raises(InvalidRequest, match=r"config\.toml") as refused:
        resolve(name)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("pools = 'inference=2'", "inference=2"),
        ("pools = ' training = 1 , inference = 3 '", "training=1,inference=3"),
        ("pools = {inference = 2}", "inference=2"),
        ("pools = ''", ""),
    ],
)
def test_pools_as_text_and_as_a_table(text: str, pools: str, home: Path) -> None:
    assert resolve("pools").value is None
    _write_user_file(text)
    assert resolve("pools").value == pools
    assert resolve("pools", "training=1").origin == "--pools"


def test_the_length_of_a_day(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("day_s").value == 86400.0
    _write_user_file("day_s = 90\n")
    assert resolve("day_s").value == 90.0
    monkeypatch.setenv("SPRINGTIDE_DAY_S", "12h")
    assert resolve("day_s").value == 43200.0
    assert (resolve("day_s", "2m").value, resolve("day_s", "2m").origin) == (120.0, "--day")


def test_a_project_file_whose_table_is_none(home: Path) -> None:
    (home / "pyproject.toml").write_text("tool.springtide = 3\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="must be a table of settings"):
        resolve("port")


@pytest.fixture
def show(home: Path) -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(cli, ["config", "show", *arguments])


def test_config_show(show: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINGTIDE_SLOTS", "3")
    assert json.loads(show("--json").stdout)["slots"] == 3
    answer = json.loads(show("--json", "--origin", "--state", "/elsewhere").stdout)
    assert answer["slots"] == {"value": 3, "origin": "SPRINGTIDE_SLOTS"}
    assert answer["state"] == {"value": "/elsewhere", "origin": "--state"}
    assert "FROM" not in show().output
    assert "SPRINGTIDE_SLOTS" in show("--origin").output
    monkeypatch.setenv("SPRINGTIDE_SLOTS", "none")
    assert show().exit_code == 2


@pytest.mark.parametrize(
    ("state_in", "url_in", "is_by_url"),
    [("file", "file", True), ("environment", "file", False), ("file", "environment", True), ("flag", "file", False)],
)
def test_an_address_counts_where_it_is_as_near_as_the_state(
    state_in: str, url_in: str, is_by_url: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"state": str(home / "state"), "url": "http://127.0.0.1:9"}
    places = {"state": state_in, "url": url_in}
    _write_user_file("".join(f"{name} = '{settings[name]}'\n" for name in settings if places[name] == "file"))
    for name, value in settings.items():
        if places[name] == "environment":
            monkeypatch.setenv(f"SPRINGTIDE_{name.upper()}", value)
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("springtide.client.api.connect", lambda *given, **named: asked.append((given, named)))
    session = Session(given_state_dir=home / "given" if state_in == "flag" else None)
    session.connect(session.given_state_dir)
    ((given, named),) = asked
    assert bool(given) == is_by_url
    assert given[:1] == ("http://127.0.0.1:9",) or set(named) == {"state_dir"}
