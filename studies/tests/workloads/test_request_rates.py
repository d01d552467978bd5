"""Request rates: files of one number a line, three kinds that look like their names, arrivals that follow them."""

from __future__ import annotations

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.workloads.request_rates import KINDS, draw_arrivals, draw_rates, read_rates


def test_a_file_of_numbers_is_read_and_scaled(tmp_path):
    path = tmp_path / "bursty.txt"
    path.write_text("0.5\n\n2\n1e1\n")
    assert read_rates(path, scale=25.0).tolist() == [12.5, 50.0, 250.0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: it holds no numbers"),
        ("1\nx\n", "line 2: 'x' is no number"),
        ("1\n-2\n", "line 2: a rate is from 0"),
        ("nan\n", "line 1: a rate is from 0"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, text, told):
    path = tmp_path / "rates.txt"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=told):
        read_rates(path)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_rates(tmp_path / "absent.txt")


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_rates(kind):
    first, again = draw_rates(kind, 7, 300), draw_rates(kind, 7, 300)
    assert first.tolist() == again.tolist()
    assert first.tolist() != draw_rates(kind, 8, 300).tolist()
    assert first.shape == (300,)
    assert (first >= 0).all()


def test_the_kinds_are_what_they_are_called():
    bursty, periodic, sporadic = (np.stack([draw_rates(kind, seed, 900) for seed in range(6)]) for kind in KINDS)
    assert (sporadic == 0).mean() > 0.5
    assert sporadic.mean() < 0.3 < 2 < periodic.mean() < bursty.mean()
    assert (bursty.max(axis=1) > 1.8 * np.median(bursty, axis=1)).all()
    # A period of two to three minutes: half a period apart, the humps of the same trace are opposed.
    centred = periodic - periodic.mean(axis=1, keepdims=True)
    half = min(float((row[:-80] * row[80:]).mean()) for row in centred)
    assert half < 0


def test_bad_wishes_are_refused():
    with pytest.raises(InvalidRequest, match="no kind of request rates"):
        draw_rates("stormy", 0, 10)
    with pytest.raises(InvalidRequest, match="seconds"):
        draw_rates("bursty", 0, 0)
    with pytest.raises(InvalidRequest, match="arrivals"):
        draw_arrivals(np.full(10, 1e7), 0)
    with pytest.raises(InvalidRequest, match="variation"):
        draw_arrivals(np.ones(10), 0, variation=0.0)


def test_arrivals_follow_the_rates_second_by_second():
    rates = np.array([0.0, 400.0, 0.0, 50.0, 0.0])
    arrivals = draw_arrivals(rates, 3)
    counts = np.bincount(arrivals.astype(int), minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    assert abs(counts[1] - 400) < 80
    assert abs(counts[3] - 50) < 30
    assert (np.diff(arrivals) >= 0).all()
    assert draw_arrivals(np.zeros(4), 0).tolist() == []


@pytest.mark.parametrize("variation", [1.0, 3.0, 6.0])
def test_gaps_vary_as_asked(variation):
    gaps = np.diff(draw_arrivals(np.full(600, 100.0), 5, variation=variation))
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.15)
    assert gaps.mean() == pytest.approx(0.01, rel=0.25)
