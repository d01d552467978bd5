"""Pools, loans and reclaims as users are told them: by the routes, the figures and the story of each job."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from kits.job_parts import with_fields
from kits.service.api_fixtures import HEADERS, TOKEN, service_body
from kits.service.pools_fixtures import CODE, Tidal
from springtide.control.records import JobRecord, Lifecycle, StateReason
from springtide.core.decision import PlannedRun
from springtide.core.events import JobSubmitted, NodeJoined, NodeLost, ReplicaReady
from springtide.core.job_parts import JobBounds
from springtide.core.resources import make_node
from springtide.core.status.platform import PlatformStatus, Timeline
from springtide.core.status.pools import AffectedJob, Handover, NodeStatus, PoolsReport, TideBand, TideStatus
from springtide.core.tide import Tide
from springtide.core.workload import JobState, TrainingJob
from springtide.service.api.application import build_api
from springtide.service.history.history import HistoryIndex
from springtide.service.status.pool_evidence import job_pool_evidence
from springtide.service.status.pools import MAX_BINS, TideForecasts, pool_statuses, tide_status


@pytest.fixture
def tidal(tmp_path):
    return Tidal(tmp_path)


@pytest.fixture
def http(tidal):
    app = build_api(tidal.platform, token=TOKEN, registry=CollectorRegistry())
    with TestClient(app, base_url="http://127.0.0.1:8787", headers=HEADERS) as client:
        yield client


def report(http, **params):
    answer = http.get("/v1/pools", params=params)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=PoolsReport)


def history_of(tidal):
    index = HistoryIndex()
    for seq, step in tidal.platform.journal.read():
        index.add(seq, step)
    return index


def stop_all(tidal, workload_id="fit-1"):
    tidal.platform.clock_s += 1.0
    tidal.platform.stop_replicas(workload_id)


def ready(tidal, service_id="ask"):
    record = tidal.platform.view().services[service_id]
    tidal.play(*(ReplicaReady(workload_id=service_id, replica_id=r.replica_id) for r in record.replicas))


def test_every_pool_says_what_it_has_and_who_holds_it(http, tidal):
    tidal.submit()
    tidal.deploy()
    told = report(http)
    assert [(p.pool, p.num_nodes, p.num_devices, p.num_training, p.num_serving) for p in told.pools] == [
        ("training", 2, 4, 4, 0),
        ("shared", 1, 0, 0, 0),
        ("inference", 1, 2, 0, 1),
    ]
    assert [(node.node_id, node.pool, node.is_loaned, node.drain) for node in told.nodes[1:]] == [
        ("t0", "training", False, None),
        ("t1", "training", False, None),
        ("s0", "inference", False, None),
    ]
    assert told.handovers == ()
    status = msgspec.json.decode(http.get("/v1/status").content, type=PlatformStatus)
    assert (status.pools, status.nodes) == (told.pools, told.nodes)


def test_where_all_is_shared_there_is_nothing_to_say_of_pools(tmp_path):
    from kits.service.platform_double import PlatformDouble

    app = build_api(PlatformDouble(tmp_path), token=TOKEN, registry=CollectorRegistry())
    with TestClient(app, base_url="http://127.0.0.1:8787", headers=HEADERS) as client:
        told = report(client)
        assert (told.pools, told.nodes, told.tide.sizes) == ((), (), ())


def test_a_loan_goes_through_a_drain_and_shows_in_the_timeline(http, tidal):
    tidal.deploy()
    ready(tidal)
    tidal.wish("s0", "training", reason="the night needs 1 device", at_s=200.0)
    told = report(http)
    assert told.nodes[-1].drain.pool == "training"
    assert told.nodes[-1].drain.reclaim_at_s is None
    (handover,) = told.handovers
    assert (handover.kind, handover.state, handover.demanded_at_s) == ("loan", "draining", 200.0)
    stop_all(tidal, "ask")
    (handover,) = report(http).handovers
    assert (handover.state, handover.labelled_at_s, handover.is_return) == ("done", 201.0, False)
    timeline = msgspec.json.decode(http.get("/v1/timeline").content, type=Timeline)
    (loan,) = timeline.loans
    assert (loan.node_id, loan.owner, loan.pool, loan.start_s, loan.end_s) == (
        "s0",
        "inference",
        "training",
        201.0,
        None,
    )
    assert [(mark.kind, mark.node_id) for mark in timeline.marks] == [("loan", "s0")]
    assert "the night needs 1 device" in timeline.marks[0].text


def test_a_reclaim_that_shrinks_says_whom_what_it_costs_and_how_long_it_took(http, tidal):
    tidal.submit()
    tidal.deploy(least=3)
    tidal.wish("t1", "inference", reason="forecast for 07:30 needs 2 more", cost_s=40.0, at_s=200.0)
    (handover,) = report(http).handovers
    assert (handover.state, handover.reclaim_at_s, handover.cost_s) == ("draining", 200.0, 40.0)
    (job,) = handover.affected
    assert (job.workload_id, job.effect, job.num_workers_before, job.num_workers_after) == ("fit-1", "shrunk", 4, 2)
    tidal.platform.run_job("fit-1", direction="shrink")
    tidal.platform.clock_s = 207.0
    tidal.platform.stop_replicas("fit-1")
    tidal.platform.clock_s = 209.0
    ready(tidal)
    (handover,) = report(http).handovers
    assert (handover.state, handover.labelled_at_s, handover.serving_at_s) == ("done", 207.0, 210.0)
    assert (handover.kind, handover.reclaim_kind) == ("reclaim", "shrinking")
    story = [line["text"] for line in http.get("/v1/workloads/fit-1/history").json() if line["kind"] == "reclaim"]
    assert story == ["goes on with fewer workers, t1 is reclaimed: forecast for 07:30 needs 2 more"]


def test_a_reclaim_that_stops_a_job_is_interrupting_and_one_of_an_idle_node_is_not(http, tidal):
    tidal.submit(most=2)
    tidal.deploy(least=4)
    tidal.wish("t1", "inference", at_s=150.0)
    tidal.policy.num_workers = 0
    tidal.wish("t0", "inference", reason="a minimum is missing", at_s=200.0)
    stop_all(tidal)
    told = report(http).handovers
    assert [(h.node_id, h.state, h.reclaim_kind) for h in told] == [
        ("t1", "done", "idle"),
        ("t0", "done", "interrupting"),
    ]
    assert [(job.effect, job.num_workers_after) for job in told[1].affected] == [("stopped", 0)]


def test_a_drain_that_is_called_off_counts_as_nothing(http, tidal):
    tidal.submit()
    tidal.wish("t1", "inference", at_s=200.0)
    tidal.policy.pools.clear()
    tidal.play()
    (handover,) = report(http).handovers
    assert handover.state == "called off"
    text = http.get("/metrics").text
    assert 'springtide_reclaims_total{kind="shrinking"} 0.0' in text
    assert "springtide_draining_servers 0.0" in text


def test_a_node_that_is_lost_while_it_drains_is_told_as_lost_and_comes_back_as_labelled(tidal):
    tidal.deploy()
    tidal.play(NodeLost(node_id="t0"))
    tidal.wish("t1", "inference")
    tidal.submit()
    tidal.wish("s0", "training")
    tidal.play(NodeLost(node_id="s0"), NodeLost(node_id="t1"), at_s=300.0)
    tidal.policy.pools.clear()
    tidal.play(NodeJoined(node=make_node("t1", 2, pool="training")), at_s=400.0)
    index = history_of(tidal)
    assert [(h.node_id, h.state) for h in index.handovers()] == [("t1", "done"), ("s0", "lost")]
    assert [(loan.node_id, loan.end_s) for loan in index.timeline(500.0).loans] == [("t1", 300.0), ("t1", None)]


def test_the_tide_is_thinned_to_what_a_picture_can_show():
    tide = Tide(day_s=960.0, bins_per_day=96, first_bin=5, peaks=tuple(range(1000)), peak=7, level=3)
    whole = tide_status(tide, 28)
    assert len(whole.peaks) <= MAX_BINS
    assert whole.bin_s == 30.0
    assert max(whole.peaks) == 999
    assert whole.from_at_s == 50.0
    day = tide_status(tide, 1)
    assert (len(day.peaks), day.bin_s, day.peaks[-1]) == (96, 10.0, 7)
    assert day.from_at_s + 96 * 10.0 == (tide.open_bin + 1) * 10.0


def test_the_forecast_begins_now_stays_within_what_can_be_needed_and_needs_a_day():
    day = [4 + 3 * (8 <= hour // 4 < 20) for hour in range(96)]
    tide = Tide(day_s=960.0, bins_per_day=96, peaks=tuple(day * 5), peak=4, level=4)
    bands = TideForecasts().bands(tide, 4805.0, 960.0, most=9)
    assert bands[0].at_s == 4800.0
    assert len(bands) == 97
    assert all(band.lower <= band.upper <= 9.0 for band in bands)
    assert bands[48].expected == pytest.approx(7.0)
    assert TideForecasts().bands(Tide(), 10.0, 960.0, most=9) == ()
    young = Tide(day_s=960.0, bins_per_day=96, peaks=(4, 5), peak=4, level=4)
    assert TideForecasts().bands(young, 25.0, 960.0, most=9) == ()


def test_more_days_than_are_remembered_are_refused(http):
    assert http.get("/v1/pools", params={"past_days": 29}).status_code == 422
    assert http.get("/v1/pools", params={"past_days": 0}).status_code == 422


# --- why --------------------------------------------------------------------------------------------------------------


def evidence(http, workload_id):
    return http.get(f"/v1/workloads/{workload_id}/why").json()["evidence"]


def test_a_job_that_was_shrunk_is_told_which_reclaim_and_when_it_may_have_devices_back(http, tidal):
    tidal.submit()
    tidal.deploy(least=3)
    tidal.wish("t1", "inference", reason="forecast for 07:30 needs 2 more", cost_s=40.0, at_s=200.0)
    tidal.platform.run_job("fit-1", direction="shrink")
    tidal.platform.clock_s = 212.0
    told = evidence(http, "fit-1")
    assert (
        "the reclaim of t1 12.0 s ago took it from 4 to 2 workers: forecast for 07:30 needs 2 more "
        "(estimated at 40 device-seconds)"
    ) in told
    assert "when services can spare devices again is not known: less than a day of their need was seen" in told


def test_a_job_that_has_what_it_had_hears_no_more_of_what_is_due_back():
    handover = Handover(
        node_id="t1",
        num_devices=2,
        kind="reclaim",
        from_pool="training",
        to_pool="inference",
        is_return=False,
        state="done",
        demanded_at_s=10.0,
        affected=(
            AffectedJob(workload_id="fit-1", name="fit", effect="stopped", num_workers_before=4, num_workers_after=0),
        ),
    )
    nodes = tuple(
        NodeStatus(
            node_id=name,
            pool=pool,
            owner=pool,
            is_loaned=False,
            num_devices=2,
            num_training=0,
            num_serving=int(pool == "inference"),
        )
        for name, pool in (("t0", "training"), ("s0", "inference"), ("s1", "inference"))
    )
    bands = tuple(
        TideBand(at_s=100.0 * step, expected=upper, lower=0.0, upper=upper)
        for step, upper in enumerate((4.0, 3.0, 2.0))
    )
    tide = TideStatus(bin_s=100.0, day_s=9600.0, from_at_s=0.0, peaks=(4,), level=4, forecast=bands)
    told = PoolsReport(
        now_s=20.0,
        wall_clock_offset_s=0.0,
        pools=pool_statuses(nodes),
        nodes=nodes,
        tide=tide,
        handovers=(handover,),
    )
    job = TrainingJob(job_id="fit-1", name="fit", entrypoint=CODE, num_virtual_shards=4, max_workers=4)
    record = JobRecord(
        job=job,
        lifecycle=Lifecycle(state=JobState.PENDING, reason=StateReason(""), submitted_at_s=1.0),
        bounds=JobBounds(min_workers=1, max_workers=4),
    )
    assert job_pool_evidence(record, told, (), 20.0) == [
        "the reclaim of t1 10.0 s ago stopped it after a checkpoint",
        "by the forecast services can spare 2 devices in 3m00",
        "2 of 2 devices for training free; 4 devices are kept for services, which need 4 now and no more soon",
    ]
    more = (*bands, TideBand(at_s=300.0, expected=4.5, lower=0.0, upper=5.2))
    rising = replace(told, tide=replace(tide, forecast=more))
    assert job_pool_evidence(record, rising, (), 20.0)[-1].endswith("need 4 now and by the forecast up to 6 in 4m40")
    planned = (PlannedRun(start_s=50.0, end_s=90.0, num_devices=4),)
    assert "it is planned to have 4 workers again in 30.0 s" in job_pool_evidence(record, told, planned, 20.0)
    running = with_fields(record, state=JobState.RUNNING, members=("a", "b", "c", "d"))
    assert len(job_pool_evidence(running, told, (), 20.0)) == 1


def test_a_job_that_waits_and_a_service_are_told_what_is_loaned_kept_and_under_way(http, tidal):
    tidal.deploy(least=1)
    ready(tidal)
    tidal.submit()
    tidal.wish("t1", "inference", reason="ask's minimum of 3 is missing 1", at_s=200.0)
    tidal.platform.clock_s = 204.0
    told = evidence(http, "ask")
    assert "guaranteed at least 1 replica: kept" in told
    assert "replicas: 1 on s0" in told
    assert (
        "t1 is being reclaimed for services, since 4.0 s: ask's minimum of 3 is missing 1; "
        "workloads there have 11.0 s left to leave"
    ) in told
    job = TrainingJob(job_id="fit-2", name="fit", entrypoint=CODE, num_virtual_shards=4)
    tidal.policy.num_workers = 0
    tidal.play(JobSubmitted(job=job), at_s=205.0)
    told = evidence(http, "fit-2")
    assert any(
        line.endswith("devices for training free; 4 devices are kept for services, which need 1 now") for line in told
    )
    assert any(line.startswith("t1 is being reclaimed for services") for line in told)


def test_a_minimum_that_can_never_be_kept_is_refused(http):
    answer = http.put("/v1/services/big", json=service_body(options__min_replicas=7, options__max_replicas=8))
    assert answer.status_code == 409
    assert "at most 6" in answer.json()["error"]["message"]
    assert http.put("/v1/services/big", json=service_body(options__max_replicas=8)).status_code == 200
    assert http.post("/v1/workloads/big/scale", json={"minimum": 7, "maximum": 8}).status_code == 409
