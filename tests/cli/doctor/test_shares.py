"""The doctor tries shares on a real child, and says what it found in one line."""

from __future__ import annotations

import pytest

from springtide.cli.doctor.shares import check_shares


def test_shares_are_tried_and_told() -> None:
    check, *_ = check_shares(trial_s=0.2)
    assert check.name == "shares"
    assert check.verdict in ("ok", "warn")
    assert "a child held to 30% of a core used" in check.text


@pytest.mark.slow
def test_what_holds_is_measured() -> None:
    check, *_ = check_shares(trial_s=2.0)
    assert check.verdict == "ok"
    assert check.text.split(":")[0] in ("cgroup-v1", "cgroup-v2", "signals")


def test_a_machine_that_holds_nobody_gets_a_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINGTIDE_SHARE_MECHANISM", "none")
    check, *_ = check_shares(trial_s=0.01)
    assert check.verdict == "warn"
    assert "not enforced" in check.text
    assert "as root" in check.mend
