"""The systemd unit of the platform: what it starts, and where it is written."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

import pytest

from springtide.cli.platform.service_unit import install_unit, unit_path, unit_text
from springtide.core.errors import BackendError

COMMAND = ["/opt/my venv/bin/python", "-m", "springtide.service", "--state", "/srv/state", "--port", "8787"]


def parsed(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


@pytest.mark.parametrize(("is_of_user", "target"), [(True, "default.target"), (False, "multi-user.target")])
def test_the_unit_starts_the_platform_again_when_it_dies(is_of_user: bool, target: str) -> None:
    unit = parsed(unit_text(COMMAND, is_of_user=is_of_user))
    assert unit["Service"]["ExecStart"] == (
        "'/opt/my venv/bin/python' -m springtide.service --state /srv/state --port 8787"
    )
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["KillMode"] == "process", "workers train on while the control plane is away"
    assert unit["Unit"]["StartLimitBurst"] == "5"
    assert unit["Install"]["WantedBy"] == target


def test_it_is_written_where_systemd_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("USER", "ada")
    path, start = install_unit(COMMAND)
    assert path == tmp_path / "systemd" / "user" / "springtide.service"
    assert "springtide.service --state /srv/state" in path.read_text()
    assert start == (
        "systemctl --user daemon-reload && systemctl --user enable --now springtide && loginctl enable-linger ada"
    )
    assert unit_path(is_of_user=False) == Path("/etc/systemd/system/springtide.service")


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(BackendError, match=r"springtide\.service cannot be written"):
        install_unit(COMMAND)
