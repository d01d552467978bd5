"""HiGHS: it solves, and what it prints does not end up among a command's answers."""

from __future__ import annotations

import os

import numpy as np
import pytest

from springtide_studies.bounds import highs

optimize = pytest.importorskip("scipy.optimize", reason="the solver is an extra")


def test_a_small_program_is_solved():
    # Of 3, 4 and 5 devices for 4, 5 and 6 points, seven devices hold the first two.
    found = highs.solve(
        np.array([-4.0, -5.0, -6.0]),
        np.ones(3),
        (0.0, 1.0),
        (np.array([[3.0, 4.0, 5.0]]), -np.inf, 7.0),
        node_limit=100,
    )
    assert np.round(found.x).tolist() == [1.0, 1.0, 0.0]


def test_what_it_prints_goes_to_the_error_output(monkeypatch, capfd):
    def chatty(**_):
        os.write(1, b"HiGHS says\n")

    monkeypatch.setattr(optimize, "milp", chatty)
    os.write(1, b"before ")
    highs.solve(np.ones(1), np.ones(1), (0.0, 1.0), (np.ones((1, 1)), -np.inf, 1.0))
    os.write(1, b"after")
    assert capfd.readouterr() == ("before after", "HiGHS says\n")


def test_the_output_comes_back_even_if_it_fails(monkeypatch, capfd):
    def broken(**_):
        raise ValueError("no")

    monkeypatch.setattr(optimize, "milp", broken)
    with pytest.raises(ValueError, match="no"):
        highs.solve(np.ones(1), np.ones(1), (0.0, 1.0), (np.ones((1, 1)), -np.inf, 1.0))
    os.write(1, b"after")
    assert capfd.readouterr().out == "after"
