"""One run of the study of loans: whose servers are whose, which jobs are drawn, and figures that add up."""

from __future__ import annotations

import msgspec
import pytest

from springtide.core.workload import DEFAULT_GRACE_S
from springtide.workloads.cluster import cluster_nodes
from springtide_studies.loans.play import START_S, LoanSetting, draw_jobs, label_nodes, play_loans, tide_of
from springtide_studies.loans.study import play_run

SMALL = LoanSetting(policy="two-way/fifo", n_r_max=2, days=1, seed=1, cluster="4x8@2+2")


def test_the_last_servers_are_inferences_and_keep_their_switches() -> None:
    nodes = label_nodes(cluster_nodes("4x8@2+2"), 1, isolates_devices=True)
    assert [node.pool for node in nodes] == ["training"] * 3 + ["inference"]
    assert all(node.owner == node.pool and node.isolates_devices for node in nodes)
    assert nodes[3].switches == ("switch-1", "core")


def test_no_job_is_larger_than_what_training_owns_and_all_strategies_get_the_same() -> None:
    nodes = label_nodes(cluster_nodes("16x8@6+6+4"), 12)
    setting = msgspec.structs.replace(SMALL, n_r_max=12, cluster="16x8@6+6+4")
    jobs = draw_jobs(setting, nodes)
    assert max(job.num_workers for job in jobs) == 32
    assert jobs == draw_jobs(msgspec.structs.replace(setting, policy="tide/springtide"), nodes)
    assert 200 < len(jobs) < 440


def test_the_tide_goes_on_for_a_day_after_the_jobs() -> None:
    tide = tide_of(4, 3, 8)
    assert (tide.num_servers, tide.days, tide.devices_per_server) == (4, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dedicated/fifo", "two-way/fifo"])
def test_a_run_and_its_figures(policy: str) -> None:
    setting = msgspec.structs.replace(SMALL, policy=policy)
    figures = play_loans(setting)
    assert figures["jobs"] > 30
    assert figures["minimums"] > 0
    assert figures["minimums_broken"] == 0
    assert 0.0 < figures["serving_fraction"] < figures["utilisation"] <= 1.0
    assert 0.0 < figures["training_utilisation"] <= 1.0
    assert figures["queueing_mean_s"] < figures["jct_mean_s"]
    assert figures["reclaim_bound_s"] == DEFAULT_GRACE_S + START_S
    assert figures["reclaims"] <= figures["loans"]
    assert figures["reclaims_interrupting"] <= figures["reclaims_forced"]
    if policy.startswith("dedicated"):
        assert (figures["loans"], figures["loaned_servers_mean"]) == (0, 0.0)
    # The same values again, from plain values as another process gets them.
    assert play_run("row", msgspec.to_builtins(setting)) == {"policies": {"row": figures}}
