"""A start in phases: from the order to a replica that is warm."""

from __future__ import annotations

import os
import time

from springtide.runtime.process.start_phases import StartPhases, process_born_s


def clock(*moments_s):
    left = list(moments_s)
    return lambda: left.pop(0)


def test_each_phase_follows_the_one_before():
    phases = StartPhases(10.0, now_s=clock(10.9, 12.0, 15.5), born_s=lambda: 10.25)
    phases.ended("import")
    told = phases.ended("load")
    assert told == {"schedule": 0.25, "spawn": 0.6500000000000004, "import": 1.0999999999999996, "load": 3.5}
    assert list(told) == ["schedule", "spawn", "import", "load"]
    assert phases.seconds() == told


def test_a_process_born_in_the_same_tick_as_its_order_waited_for_nothing():
    phases = StartPhases(10.004, now_s=clock(10.5), born_s=lambda: 10.0)
    assert phases.seconds() == {"schedule": 0.0, "spawn": 10.5 - 10.004}


def test_what_nobody_knows_is_left_out():
    assert StartPhases(0.0, now_s=clock(10.5), born_s=lambda: 10.0).seconds() == {"spawn": 0.5}
    assert StartPhases(0.0, now_s=clock(10.5), born_s=lambda: None).seconds() == {}
    assert StartPhases(10.0, now_s=clock(10.5), born_s=lambda: None).seconds() == {"schedule": 0.5}


def test_a_phase_ends_once():
    phases = StartPhases(0.0, now_s=clock(1.0, 2.0, 9.0), born_s=lambda: None)
    phases.ended("load")
    assert phases.ended("load") == {"load": 1.0}


def test_the_kernel_says_when_this_process_began():
    born_s = process_born_s()
    assert born_s is not None
    # Counted in ticks of the kernel.
    assert born_s <= time.monotonic() + 2.0 / os.sysconf("SC_CLK_TCK")
