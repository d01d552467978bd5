"""Quotes and forecasts over two pools: what a promise counts on, who has training's servers, and needs that come."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from kits.control.quoting import Reserving, training_job
from springtide.control.quotes.forecast import roll_forward
from springtide.control.quotes.inquiry import arriving, grown
from springtide.control.quotes.pools_forecast import PoolForecast
from springtide.control.quotes.quote import quote
from springtide.control.quotes.quote_pools import PoolContext, counted_on, loans_counted
from springtide.core.decision import Capacity, Plan, PoolAllocation, Relabel, ServiceView, Snapshot
from springtide.core.resources import Topology, make_node
from springtide.core.status.quote import Quote
from springtide.core.tide import Tide
from springtide.core.workload import Entrypoint, InferenceService
from springtide.scheduling.policies.springtide.policy import Springtide

HOUR_S = 3600.0


def _node(name, num_devices, pool, owner=None):
    return replace(make_node(name, num_devices, pool=pool), home=owner or pool)


def _service(name, minimum=1, most=4, in_flight=0):
    service = InferenceService(
        service_id=name,
        name=name,
        entrypoint=Entrypoint(source_path="a.py"),
        min_replicas=minimum,
        max_replicas=most,
        target_in_flight=8,
    )
    return ServiceView(service=service, min_replicas=minimum, max_replicas=most, in_flight=in_flight)


def _snapshot(*nodes, services=(), held=None, now_s=6 * HOUR_S, **facts):
    allocations = {who: PoolAllocation(device_ids=devices) for who, devices in (held or {}).items()}
    return Snapshot(
        now_s=now_s, cluster=Topology(nodes=nodes), services=tuple(services), allocations=allocations, **facts
    )


class Told:
    """A policy that may count on what it is told, as the one that loans would tell it."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.policy = Springtide()

    def decide(self, snapshot):
        cluster = snapshot.cluster
        mine = Topology(nodes=tuple(node for node in cluster.nodes if node.pool == "training"))
        plan = self.policy.decide(replace(snapshot, cluster=mine, services=(), capacity=self.capacity))
        kept = {v.service.service_id: snapshot.allocations[v.service.service_id] for v in snapshot.services}
        return replace(plan, allocations={**plan.allocations, **kept}, capacity=self.capacity)


LOANED = (_node("n0", 2, "training"), _node("n1", 2, "training", "inference"), _node("n2", 2, "training", "inference"))
UNTIL_TEN_PAST_SEVEN = (
    Capacity(from_s=6 * HOUR_S, num_devices=6),
    Capacity(from_s=7 * HOUR_S + 600.0, num_devices=2),
)


def test_a_promise_that_rests_on_loans_says_so_and_until_when():
    snapshot = _snapshot(*LOANED)
    # Six workers bring it home in half an hour; on the two of training's own it would take an hour and more.
    job = training_job(minutes=120, deadline_s=2100.0, now_s=snapshot.now_s, most=8, fraction=0.99)
    answer = quote(snapshot, Told(UNTIL_TEN_PAST_SEVEN), job)
    assert answer.is_promised
    assert answer.reason.endswith("; counts 2 loaned servers until 07:10 (forecast)")
    assert [(c.num_devices, c.num_loaned, c.until_s) for c in answer.counts_on] == [(6, 4, 4200.0)]
    told = msgspec.json.decode(msgspec.json.encode(answer))
    assert told["counts_on"] == [{"num_devices": 6, "num_loaned": 4, "until_s": 4200.0}]
    assert msgspec.convert(told, Quote) == answer


def test_a_promise_that_needs_no_loan_does_not_mention_one():
    snapshot = _snapshot(*LOANED)
    job = training_job(minutes=10, deadline_s=3000.0, now_s=snapshot.now_s, most=1)
    answer = quote(snapshot, Told(UNTIL_TEN_PAST_SEVEN), job)
    assert answer.is_promised
    assert "loaned" not in answer.reason
    assert answer.counts_on[0].num_loaned == 4


def test_what_is_loaned_only_for_a_while_is_no_ground_for_a_longer_promise():
    snapshot = _snapshot(*LOANED)
    job = training_job(minutes=600, deadline_s=2.75 * HOUR_S, now_s=snapshot.now_s, most=8, fraction=0.99)
    answer = quote(snapshot, Told(UNTIL_TEN_PAST_SEVEN), job)
    assert answer.verdict == "refused"
    assert answer.reason == (
        "cannot finish within 2h45: needs >= 4 workers from now; 6 of 6 are free, "
        "counting 2 loaned servers until 07:10 (forecast)"
    )
    # With the same servers for good it is taken.
    assert quote(snapshot, Told((Capacity(from_s=0.0, num_devices=6),)), job).is_promised


def test_a_refusal_names_who_has_trainings_servers():
    nodes = (_node("n0", 1, "training"), _node("n1", 1, "training"), _node("n2", 1, "inference", "training"))
    snapshot = _snapshot(*nodes, services=[_service("sentiment")], held={"sentiment": ("n2/0",)})
    job = training_job(minutes=10, deadline_s=155.0, now_s=snapshot.now_s, most=8)
    answer = quote(snapshot, Told(()), job)
    assert answer.reason == (
        "cannot finish within 2m35: needs >= 6 workers from now; this pool has 2 (1 loaned to 'sentiment')"
    )
    assert answer.counts_on == ()
    # The services' own devices are no way out; more of training's own are.
    more = [alternative for alternative in answer.alternatives if alternative.num_devices is not None]
    assert more
    assert more[0].change.endswith("more nodes of 1 devices")


def test_a_cluster_without_labels_is_as_it_was():
    snapshot = _snapshot(make_node("n0", 2))
    ground = PoolContext(snapshot, Plan())
    assert (ground.has_pools, ground.num_devices, ground.num_free(), ground.holders()) == (False, 2, 2, [])
    assert counted_on(ground, Plan(), 1e9) == ()
    assert loans_counted(ground, ()) is None
    answer = quote(snapshot, Reserving(), training_job(minutes=10, deadline_s=420, now_s=snapshot.now_s, most=2))
    assert answer.counts_on == ()


def test_parts_of_a_server_are_told_in_devices():
    nodes = (_node("n0", 4, "training"), _node("n1", 4, "shared", "inference"))
    capacity = (Capacity(from_s=0.0, num_devices=7), Capacity(from_s=100.0, num_devices=4))
    ground = PoolContext(_snapshot(*nodes, now_s=0.0, tide=Tide(day_s=600.0)), Plan(capacity=capacity))
    counts = counted_on(ground, Plan(capacity=capacity), 90.0)
    counted = loans_counted(ground, counts)
    assert counted is not None
    assert counted.text() == "3 loaned devices until second 100 of the day (forecast)"


def test_more_devices_are_trainings_own():
    cluster = grown(Topology(nodes=(_node("n0", 2, "training"), _node("n1", 2, "inference"))), 6)
    assert [(node.pool, node.owner) for node in cluster.nodes[2:]] == [("training", "training")]


class Lending:
    """Lends `n1` while services need nothing that `n0` does not hold; jobs have what is labelled for them."""

    def __init__(self):
        self.seen = []

    def decide(self, snapshot):
        needed = sum(view.needed_replicas for view in snapshot.services)
        self.seen.append((snapshot.now_s, needed, snapshot.cluster.by_id["n1"].pool))
        wish = "inference" if needed > 2 else "training"
        serving = [d for node in snapshot.cluster.nodes if node.pool == "inference" for d in node.devices]
        given = {
            view.service.service_id: PoolAllocation(device_ids=tuple(d.device_id for d in serving[:needed]))
            for view in snapshot.services
        }
        mine = [
            device.device_id
            for node in snapshot.cluster.nodes
            if node.pool == "training" and (node.node_id != "n1" or wish == "training")
            for device in node.devices
        ]
        for view in snapshot.jobs[:1]:
            given[view.job.job_id] = PoolAllocation(device_ids=tuple(mine))
        return Plan(allocations=given, pools={"n1": Relabel(pool=wish)})


def test_in_a_forecast_nodes_go_over_when_the_tide_comes():
    # A day of 24 bins: two devices by night, four from eight to twenty.
    day = tuple(4 if 8 <= hour < 20 else 2 for hour in range(24))
    tide = Tide(day_s=24 * HOUR_S, bins_per_day=24, first_bin=0, peaks=(*day, *day, *day[:6]), peak=2, level=2)
    now_s = 2 * 24 * HOUR_S + 6 * HOUR_S + 60.0
    nodes = (_node("n0", 2, "inference"), _node("n1", 2, "inference"), _node("n2", 2, "training"))
    job = training_job("long", minutes=60 * 24, most=4, fraction=0.99)
    snapshot = _snapshot(
        *nodes, services=[_service("s", 1, 4, in_flight=16)], held={"s": ("n0/0", "n0/1")}, now_s=now_s, tide=tide
    )
    snapshot = replace(snapshot, jobs=(arriving(job, now_s),))
    policy = Lending()
    forecast = roll_forward(snapshot, policy)
    sizes = [run.num_devices for run in forecast.schedules["long"]]
    assert max(sizes) == 4
    # Lent through the night, taken back for the day.
    labels = {int((at_s - 2 * 24 * HOUR_S) // HOUR_S): label for at_s, _, label in policy.seen}
    assert labels[6] == "training"
    assert sizes[-1] == 2
    assert any(needed == 4 for at_s, needed, _ in policy.seen if at_s > now_s + HOUR_S)


def test_needs_without_a_forecast_stay_as_they_are():
    snapshot = _snapshot(
        _node("n0", 2, "inference"), _node("n1", 2, "training"), services=[_service("s", 1, 4, in_flight=16)]
    )
    play = PoolForecast(snapshot)
    assert play.next_change_s(snapshot.now_s) is None
    later = play.at(snapshot, snapshot.now_s + HOUR_S, {"s": PoolAllocation(device_ids=("n0/0", "n0/1"))})
    assert later.services[0].needed_replicas == snapshot.services[0].needed_replicas == 2
    assert later.services[0].num_ready == 2


def test_a_label_waits_for_who_is_in_the_way():
    nodes = (_node("n0", 2, "inference"), _node("n1", 2, "training"))
    snapshot = _snapshot(*nodes, services=[_service("s")], held={"fit": ("n1/0",)})
    plan = Plan(pools={"n1": Relabel(pool="inference", reason="forecast")}, allocations=snapshot.allocations)
    play = PoolForecast(snapshot)
    under_way = play.relabelled(snapshot, plan, snapshot.allocations)
    assert under_way.cluster is snapshot.cluster
    assert under_way.drains["n1"].pool == "inference"
    done = play.relabelled(under_way, plan, {})
    assert done.cluster.by_id["n1"].pool == "inference"
    assert done.cluster.by_id["n1"].is_loaned
    assert done.drains == {}
    called_off = play.relabelled(under_way, Plan(), snapshot.allocations)
    assert called_off.drains == {}


@pytest.mark.parametrize(("at_s", "told"), [(7 * HOUR_S + 600, "07:10"), (25 * HOUR_S, "01:00")])
def test_moments_are_told_by_the_platforms_clock(at_s, told):
    assert Tide().clock(at_s) == told
    assert Tide(day_s=60.0).clock(61.0) == "second 1 of the day"
