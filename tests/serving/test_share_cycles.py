"""References of iterations: by batch size, down at once, up slowly, bounded by their neighbours."""

from __future__ import annotations

import pytest

from springtide.serving.share_control import ShareIteration, learn, reference_s, stretch


def ended(duration_s: float, batch_size: int = 4) -> ShareIteration:
    return ShareIteration(batch_size=batch_size, duration_s=duration_s)


def test_the_shortest_is_the_reference_of_its_batch_size() -> None:
    references = learn({}, [ended(0.03), ended(0.02), ended(0.05, 8)], is_unhindered=False)
    assert reference_s(references, 4) == 0.02
    assert reference_s(references, 8) == pytest.approx(0.04 + 0.01 * 0.01)


def test_an_unseen_size_is_bounded_by_its_neighbours() -> None:
    references = {4: 0.02, 16: 0.06}
    assert reference_s(references, 8) == 0.04
    assert reference_s(references, 14) == 0.06
    assert reference_s(references, 32) == 0.12
    assert reference_s(references, 1) == 0.02
    assert reference_s({}, 1) == 0.0


def test_a_longer_one_draws_the_reference_up_soon_only_if_nothing_was_in_its_way() -> None:
    slowly = learn({4: 0.02}, [ended(0.04)] * 10, is_unhindered=False)
    soon = learn({4: 0.02}, [ended(0.04)] * 10, is_unhindered=True)
    assert slowly[4] < 0.022
    assert soon[4] > 0.037


def test_what_counts_as_stretched() -> None:
    assert stretch({4: 0.025}, 4, 0.05) == 2.0
    assert stretch({4: 0.025}, 4, 0.03) == 1.0
    assert stretch({4: 0.002}, 4, 0.0029) == 1.0
    assert stretch({}, 4, 5.0) == 1.0
    assert stretch({4: 0.025}, 8, 0.05) == 1.0


def test_the_references_given_are_not_changed_and_at_most_64_sizes_are_kept() -> None:
    before = {size: 0.01 * size for size in range(1, 65)}
    after = learn(before, [ended(0.9, 99)], is_unhindered=False)
    assert len(before) == len(after) == 64
    assert 99 in after
    assert 1 not in after
