"""The FaPES bench: what its jobs are, that its truth feels placement, batch and noise, and what its report says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.resources import Topology
from springtide.perf.communication.fabric import V100_SERVER
from springtide.workloads.cluster import cluster_nodes
from springtide_studies.communication.gnn_training import Training
from springtide_studies.fapes.bench import CLUSTER, PUBLISHED, RIVALS, markdown, requests_of, run_bench
from springtide_studies.fapes.jobs import (
    BUCKET_BYTES,
    FAMILIES,
    NUM_PIECES,
    arrivals_of,
    draw_requests,
    gain,
    progress_ends,
)
from springtide_studies.fapes.play import play_requests, pooled, request_rule, table_row, training_of
from springtide_studies.fapes.truth import TopologySpeeds, curves_for

NODES = cluster_nodes(CLUSTER)
TOPOLOGY = Topology(nodes=tuple(NODES))


def test_profiles_hold_the_whole_gradient_in_the_order_of_the_backward_pass():
    for family in FAMILIES.values():
        profile = family.profile()
        ready = [bucket.ready_s for bucket in profile.buckets]
        assert sum(bucket.num_bytes for bucket in profile.buckets) == family.num_bytes
        assert max(bucket.num_bytes for bucket in profile.buckets) <= BUCKET_BYTES
        assert ready == sorted(ready)
        assert ready[0] > profile.forward_s
        assert ready[-1] == pytest.approx(profile.forward_s + profile.backward_s)


def test_requests_are_drawn_from_the_seed_and_every_rule_has_the_same_training():
    requests = draw_requests([0.0, 10.0, 20.0, 30.0], seed=4)
    assert requests == draw_requests([0.0, 10.0, 20.0, 30.0], seed=4)
    speeds = TopologySpeeds(TOPOLOGY, V100_SERVER, requests)
    curves = curves_for(speeds, requests, 64)
    for request, *jobs in zip(
        requests, *[arrivals_of(requests, rule, curves) for rule in ("adaptive", "fixed", "rigid")], strict=True
    ):
        family = FAMILIES[request.family]
        for _, job in jobs:
            ends, worths = progress_ends(family, request, job.global_batch_size)
            lengths = np.diff(np.concatenate(([0.0], ends)))
            # In initial steps every training is as long as its samples make it.
            assert (lengths * worths).sum() * family.initial_batch_size == pytest.approx(request.num_samples)
        assert jobs[0][1].batch is not None
        assert jobs[2][1].min_workers == jobs[2][1].max_workers == request.num_workers


def test_a_larger_batch_is_worth_more_a_step_and_less_a_sample():
    family = FAMILIES["resnet50"]
    for piece in range(NUM_PIECES):
        assert gain(family, piece, family.initial_batch_size) == pytest.approx(1.0)
        assert 1.0 < gain(family, piece, 8 * family.initial_batch_size) < 8.0
    assert gain(family, 9, 4096) > gain(family, 0, 4096)


def test_the_truth_feels_where_the_devices_are():
    speeds = TopologySpeeds(TOPOLOGY, V100_SERVER, requests_of(0, num=2, hours=1))
    ids = TOPOLOGY.device_ids()
    one_server = speeds.step_total_s("vgg16", ids[:8], 64)[0]
    two_switches = speeds.step_total_s("vgg16", [*ids[:4], *ids[-4:]], 64)[0]
    assert one_server < two_switches
    assert speeds.step_total_s("vgg16", ids[:1], 64)[0] == pytest.approx(64 / 200.0, rel=0.01)
    curve = speeds.compact_curve("vit", 512, 64)
    assert curve[8] > curve[1]


def test_rivals_keep_to_as_much_of_a_request_as_they_do_in_the_paper():
    assert set(RIVALS) | {"fapes"} == set(PUBLISHED)
    assert [request_rule(RIVALS[name]) for name in ("fifo", "optimus", "pollux")] == ["rigid", "fixed", "adaptive"]
    assert [request_rule(name) for name in ("two-way/fifo", "tide:ahead=no/springtide")] == ["rigid", "fixed"]
    assert request_rule("dedicated/fapes:communication=/tmp/model.bin") == "adaptive"
    assert training_of("fapes:communication=/tmp/model.bin") == "fapes:communication=/tmp/model.bin"


def test_a_policy_plays_and_its_figures_add_up():
    requests = requests_of(1, num=6, hours=1)
    outcomes = [play_requests(name, requests, NODES, V100_SERVER) for name in ("fapes", "fifo")]
    for outcome in outcomes:
        assert (outcome.jct_s > 0.0).all()
        assert (outcome.queued_s <= outcome.jct_s).all()
        assert 0.0 < outcome.utilisation <= 1.0
    row = table_row("x", "fapes", pooled(outcomes))
    assert row["num_jobs"] == 2 * len(requests)
    assert row["jct_ks_min"] <= row["jct_ks_avg"] <= row["jct_ks_max"]


def test_the_report_says_what_is_reproduced_and_what_is_not():
    ticks = itertools.count()
    report = run_bench(
        parts=("gap",),
        timer=lambda: float(next(ticks)),
        num_seeds=1,
        num_requests=4,
        hours=1,
        num_gap_cases=3,
        training=Training(num_steps=3, num_members=1, batch_placements=8),
    )
    assert report["passed"]
    assert {row["case"] for row in report["rows"]} == {"primal-dual gap, mean", "primal-dual gap, 90 % of cases below"}
    assert all(row["ours"] >= -1e-6 for row in report["rows"])
    assert "prices as written" in markdown(report)
    with pytest.raises(InvalidRequest, match="choose among"):
        run_bench(parts=("all",), timer=lambda: 0.0)
