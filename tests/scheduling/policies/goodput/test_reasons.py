"""What goodput says to people."""

from __future__ import annotations

import numpy as np
import pytest

from kits.scheduling.goodput_jobs import snapshot, view
from springtide.scheduling.decisions.rounds import Round
from springtide.scheduling.families.candidates import JobCandidates
from springtide.scheduling.policies.goodput.reasons import reasons_of

TIMES_S = {1: 7200.0, 2: 4000.0, 4: 2400.0, 8: 2500.0}


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (0, 0, "waits: the devices bring more to others now"),
        (0, 4, "starting on 4 devices: about 40 min to go"),
        (4, 0, "stopped: the devices bring more to others now"),
        (1, 4, "its remaining 2.0 h shrink to 40 min on 4 devices; 30 s for the change are paid back"),
        (4, 1, "others gain more: its remaining 40 min grow to 2.0 h on 1 device"),
        (4, 8, "8 devices instead of 4: its speed there is to be found out"),
        (8, 4, "4 devices are as fast for it as 8"),
        (3, 4, "4 devices instead of 3 suit it better"),
    ],
)
def test_each_change_has_its_sentence(before, after, text):
    sizes = np.array(list(TIMES_S))
    row = JobCandidates(view("a"), "key", before, sizes, np.array(list(TIMES_S.values())))
    held = {"a": tuple(f"n/{index}" for index in range(before))}
    now = Round(snapshot=snapshot(view("a")), number=0, devices=(), held=held)
    given = tuple(f"n/{index}" for index in range(after))
    assert reasons_of([row], {"a": after} if after else {}, {"a": given}, now) == {"a": text}


def test_a_new_place_is_told():
    row = JobCandidates(view("a"), "key", 1, np.array([1]), np.array([60.0]))
    now = Round(snapshot=snapshot(view("a")), number=0, devices=(), held={"a": ("n/0",)})
    assert reasons_of([row], {"a": 1}, {"a": ("n/1",)}, now) == {"a": "moved, because devices of its own are gone"}
    assert reasons_of([row], {"a": 1}, {"a": ("n/0",)}, now) == {}
