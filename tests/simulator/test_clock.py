"""Virtual time moves only forward."""

from __future__ import annotations

from springtide.simulator.clock import VirtualClock


def test_clock_never_goes_back() -> None:
    clock = VirtualClock(5.0)
    clock.advance_to(3.0)
    assert clock.now_s() == 5.0
    clock.advance_to(7.5)
    assert clock.now_s() == 7.5
