"""The cheap names are every policy's, and every one of them can be made."""

from __future__ import annotations

from kits.cheap_policies import cheap_names
from springtide.scheduling.registry import POLICY_NAMES, make_policy


def test_every_policy_has_a_name_that_can_be_made():
    for names in (cheap_names(), cheap_names(round_s=7.0)):
        assert tuple(name.partition(":")[0] for name in names) == POLICY_NAMES
        assert all(make_policy(name) for name in names)


def test_rounds_are_as_long_as_asked_where_there_are_rounds():
    lengths = {name: getattr(make_policy(name), "round_s", None) for name in cheap_names(round_s=7.0)}
    assert set(lengths.values()) == {None, 7.0}
