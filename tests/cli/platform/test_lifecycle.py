"""What `springtide up` starts the platform with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from springtide.cli.main import cli


def installed_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, str]:
    """Exit code and the unit that `up --install-service` writes, or what it says."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command = ["up", "--install-service", "--state", str(tmp_path / "state"), "--json", *options]
    done = CliRunner().invoke(cli, command)
    return done.exit_code, Path(json.loads(done.stdout)["unit"]).read_text() if done.exit_code == 0 else done.output


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ((), "springtide"),
        (("--pay-per-use",), "springtide:efficiency=0.7"),
        (("--pay-per-use", "--slots", "4", "--pools", "inference=2"), "tide/springtide:efficiency=0.7"),
    ],
)
def test_where_devices_are_paid_by_use_none_is_given_that_brings_little(tmp_path, monkeypatch, options, policy) -> None:
    code, unit = installed_unit(tmp_path, monkeypatch, *options)
    assert code == 0, unit
    assert f"--policy {policy} " in unit


def test_another_policy_has_no_such_setting(tmp_path, monkeypatch) -> None:
    code, said = installed_unit(tmp_path, monkeypatch, "--pay-per-use", "--policy", "edf")
    assert code != 0
    assert "--pay-per-use sets how springtide decides; the policy is edf" in said
