"""The command that plays seeds: one with its story, or many in one process."""

from __future__ import annotations

import pytest

from springtide_studies.fault_seeds import __main__ as command
from springtide_studies.fault_seeds.seeds import run_seed


def test_many_seeds_are_dealt_to_policies_and_counted(capsys):
    assert command.main(["--seed", "7", "--seeds", "3", "--policy", "elastic", "fifo"]) == 0
    assert capsys.readouterr().out == "elastic: 2 seeds, 0 violations\nfifo: 1 seeds, 0 violations\n"


def test_a_violation_is_told_with_its_command(capsys, monkeypatch):
    def broken(seed, policy, **chosen):
        result = run_seed(seed, policy, **chosen)
        return type(result)(seed=seed, policy=policy, violation="all-end", detail="waits", has_promises=True)

    monkeypatch.setattr(command, "run_seed", broken)
    assert command.main(["--seed", "7", "--seeds", "1", "--policy", "elastic", "--promises"]) == 1
    out = capsys.readouterr().out
    assert "VIOLATED all-end: python -m springtide_studies.fault_seeds --seed 7 --policy elastic --promises" in out
    assert "elastic: 1 seeds, 1 violations" in out


def test_one_seed_is_played_under_one_policy(capsys):
    with pytest.raises(SystemExit):
        command.main(["--seed", "7", "--policy", "elastic", "fifo"])
    assert "one seed is played under one policy" in capsys.readouterr().err
