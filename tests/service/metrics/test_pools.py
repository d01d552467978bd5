"""The figures of pools: bounded labels, nothing counted twice, and the same after a restart."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from kits.service.pools_fixtures import Tidal
from springtide.core.status.pools import TideBand
from springtide.core.tide import Tide
from springtide.service.history.history import HistoryIndex
from springtide.service.history.pool_reports import PoolReports
from springtide.service.history.pools import RECLAIM_BOUNDS_S, Histogram, PoolTotals
from springtide.service.metrics.platform import PlatformCollector
from springtide.service.metrics.pools import pool_families


@pytest.fixture
def tidal(tmp_path):
    return Tidal(tmp_path)


def history_of(tidal):
    index = HistoryIndex()
    for seq, step in tidal.platform.journal.read():
        index.add(seq, step)
    return index


def scrape(tidal):
    registry, history = CollectorRegistry(), history_of(tidal)
    PlatformCollector(tidal.platform, history, PoolReports(tidal.platform, history)).register(registry)
    return generate_latest(registry).decode()


def figures(text, name):
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)
    }


def test_figures_of_pools_have_bounded_labels_and_survive_a_restart(tidal):
    tidal.submit()
    tidal.deploy(least=3)
    tidal.wish("t1", "inference", cost_s=40.0, at_s=200.0)
    tidal.platform.run_job("fit-1", direction="shrink")
    tidal.platform.clock_s = 207.0
    tidal.platform.stop_replicas("fit-1")
    text = scrape(tidal)
    assert figures(text, "springtide_loaned_servers") == {
        f'springtide_loaned_servers{{from="{owner}",to="{pool}"}}': float((owner, pool) == ("training", "inference"))
        for owner in ("training", "shared", "inference")
        for pool in ("training", "shared", "inference")
        if owner != pool
    }
    assert 'springtide_reclaims_total{kind="shrinking"} 1.0' in text
    assert 'springtide_reclaim_seconds_bucket{le="5.0"} 0.0' in text
    assert 'springtide_reclaim_seconds_bucket{le="10.0"} 1.0' in text
    assert "springtide_reclaim_seconds_sum 7.0" in text
    assert "springtide_reclaim_cost_device_seconds_total 40.0" in text
    assert 'springtide_pool_devices{pool="inference"} 4.0' in text
    assert "springtide_tide_needed_devices 3.0" in text
    assert "t1" not in text
    # A platform that comes up again reads the same journal.
    again = history_of(tidal).totals().pools
    assert (again.num_reclaims["shrinking"], again.reclaim_s.count, again.reclaim_cost_s) == (1, 1, 40.0)


def test_the_forecast_is_told_once_it_is_known():
    class Families(Collector):
        def __init__(self, coming):
            self.coming = coming

        def collect(self):
            totals = PoolTotals(0, {}, Histogram(RECLAIM_BOUNDS_S), 0.0)
            yield from pool_families((), 0, Tide(level=4), self.coming, totals)

    def text(*coming):
        registry = CollectorRegistry()
        registry.register(Families(coming))
        return generate_latest(registry).decode()

    assert "springtide_tide_forecast_devices" not in text()
    told = text(
        TideBand(at_s=0.0, expected=4.0, lower=3.0, upper=5.5), TideBand(at_s=900.0, expected=6.0, lower=2.0, upper=7.5)
    )
    assert 'springtide_tide_forecast_devices{bound="expected"} 6.0' in told
    assert 'springtide_tide_forecast_devices{bound="upper"} 7.5' in told
    assert 'springtide_tide_forecast_devices{bound="lower"} 3.0' in told
    assert "springtide_tide_needed_devices 4.0" in told
