"""The same seed tells the same story: in another process, under another hash seed, word for word."""

from __future__ import annotations

import pytest

from kits.simulation.story import story


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "policy"), [(7, "elastic"), (192, "edf"), (11, "fifo")])
def test_two_processes_two_hash_seeds_one_story(seed, policy):
    first, second = story(seed, policy, "1"), story(seed, policy, "4242")
    assert first == second
    assert first.count("\n") > 50
    assert story(seed + 1, policy, "1") != first
