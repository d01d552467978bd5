"""The load window: rates, idleness that is never claimed of a busy or loading service, and few words."""

from __future__ import annotations

from itertools import pairwise

from springtide.core.workload import WorkloadId
from springtide.serving.load import LoadWindow, is_worth_reporting

QUIET = {"in_flight": 0, "queued": 0, "loading": False}


def make_window():
    return LoadWindow(WorkloadId("s"), 100.0)


def test_the_rate_is_that_of_the_window_and_old_arrivals_fade():
    window = make_window()
    for n in range(40):
        window.arrived(110.0 + n / 4)
    assert 3.5 <= window.observe(120.0, **QUIET).arrivals_per_s <= 4.1
    assert window.observe(140.0, **QUIET).arrivals_per_s == 0


def test_idle_runs_from_the_last_end_and_not_while_busy_or_loading():
    window = make_window()
    assert window.observe(107.0, **QUIET).idle_s == 7
    window.arrived(108.0)
    assert window.observe(150.0, in_flight=1, queued=0, loading=False).idle_s == 0
    window.ended(160.0, 52.0)
    assert window.observe(165.0, **QUIET).idle_s == 5
    assert window.observe(400.0, in_flight=0, queued=0, loading=True).idle_s == 0
    assert window.observe(403.0, **QUIET).idle_s == 3, "a load of minutes does not count as idleness afterwards"


def test_percentiles_are_those_of_recent_latencies():
    window = make_window()
    for n in range(1, 101):
        window.ended(100.0, n / 1000)
    load = window.observe(101.0, **QUIET)
    assert (load.latency_p50_s, load.latency_p99_s) == (0.05, 0.099)
    assert window.observe(300.0, **QUIET).latency_p99_s is None


def told_times(loads, idle_limit_s=30.0):
    previous, previous_at_s, times = None, -1e9, []
    for now_s, load in loads:
        if is_worth_reporting(previous, previous_at_s, load, now_s, idle_limit_s):
            previous, previous_at_s = load, now_s
            times.append(now_s)
    return times


def test_a_quiet_service_is_told_of_every_ten_seconds_and_when_it_crosses_its_limit():
    window = make_window()
    times = told_times((float(now), window.observe(float(now), **QUIET)) for now in range(100, 160))
    assert times == [100.0, 110.0, 120.0, 130.0, 140.0, 150.0]
    window = make_window()
    times = told_times(((float(now), window.observe(float(now), **QUIET)) for now in range(100, 110)), 5.0)
    assert times == [100.0, 105.0]


def test_short_requests_between_two_looks_are_told_before_the_service_could_be_taken_for_idle():
    window = make_window()
    loads = []
    for now in range(100, 140):
        window.arrived(now + 0.5)
        window.ended(now + 0.6, 0.1)
        loads.append((now + 1.0, window.observe(now + 1.0, **QUIET)))
    times = told_times(loads, idle_limit_s=6.0)
    assert max(later - earlier for earlier, later in pairwise(times)) < 6.0


def test_a_queue_that_appears_is_told():
    window = make_window()
    quiet = window.observe(101.0, **QUIET)
    busy = window.observe(102.0, in_flight=1, queued=3, loading=False)
    assert is_worth_reporting(quiet, 101.0, busy, 102.0, 30.0)
    assert not is_worth_reporting(busy, 102.0, busy, 103.0, 30.0)


def test_a_look_between_two_batches_does_not_find_a_busy_service_idle():
    window = make_window()
    for n in range(1000):
        window.arrived(110.0 + n / 100)
        window.ended(110.08 + n / 100, 0.08)
    # Eight at once on average, whatever the look finds.
    assert window.observe(120.0, **QUIET).in_flight == 8
    assert window.observe(120.0, in_flight=3, queued=1, loading=False).in_flight == 7
    assert window.observe(120.0, in_flight=12, queued=0, loading=False).in_flight == 12
    assert window.observe(122.5, **QUIET).in_flight in (4, 5)
    assert window.observe(126.0, **QUIET).in_flight == 0
    assert window.observe(126.0, **QUIET).idle_s > 5


def test_a_request_now_and_then_occupies_nothing():
    window = make_window()
    window.arrived(110.0)
    window.ended(110.1, 0.1)
    assert window.observe(110.2, **QUIET).in_flight == 0
