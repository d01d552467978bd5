"""Clusters of several models of device: what is known of speeds, which model a job has, and what a promise rests on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kits.job_parts import with_fields
from kits.scheduling.loan_views import service
from kits.scheduling.rival_platform import make_view
from springtide.core.decision import JobView, Overheads, Plan, PoolAllocation, Snapshot
from springtide.core.job_parts import DeadlinePromise, JobProgress, LearntSpeed
from springtide.core.resources import Topology, make_node
from springtide.core.workload import JobState, TrainingJob, WorkloadId
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.policies.springtide.accelerators.choice import HomeChoice, model_row
from springtide.scheduling.policies.springtide.accelerators.speeds import KnownSpeeds
from springtide.scheduling.policies.springtide.memory import is_mixed
from springtide.scheduling.policies.springtide.policy import Springtide
from springtide.scheduling.policies.springtide.rows import SETTLE_S, SURE_FRACTION
from springtide.simulator.fluid.play import play
from springtide.simulator.fluid.rules import OverheadRule, ProfiledSpeeds
from springtide.workloads.cluster import cluster_nodes

FAST, SLOW = "A100", "T4"
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0}


def job(
    name: str, fast: float | None = None, slow: float | None = None, *, family: str = "", steps: int = 1000, **options
) -> JobView:
    """A job with a profile on each model for which a speed on one device is given."""
    view = make_view(name, steps=steps, profile={}, **{"most": 4, **options})
    told = {model: speed for model, speed in ((FAST, fast), (SLOW, slow)) if speed is not None}
    profiles = {model: {n: speed * n for n in LINEAR} for model, speed in told.items()}
    return replace(view, job=replace(view.job, profiles=profiles, family=family))


def measured(view: JobView, **by_model: Mapping[int, float]) -> JobView:
    speeds = {
        model: {n: rate * view.job.global_batch_size for n, rate in found.items()} for model, found in by_model.items()
    }
    return replace(view, learnt=LearntSpeed(by_accelerator=speeds))


class Cluster:
    """One policy on a cluster of two models; plans are carried out at once."""

    def __init__(self, num_fast: int = 4, num_slow: int = 4, change_s: float = 0.0) -> None:
        nodes = (make_node("f", num_fast, accelerator=FAST), make_node("s", num_slow, accelerator=SLOW))
        self.snapshot = Snapshot(now_s=0.0, cluster=Topology(nodes=nodes), overheads=Overheads(change_s=change_s))
        self.cache = DecisionCache(Springtide())

    def look(self, *views: JobView, now_s: float = 0.0) -> Plan:
        self.snapshot = replace(self.snapshot, now_s=now_s, jobs=views)
        plan = self.cache.decide(self.snapshot)
        fresh = Springtide().decide(self.snapshot)
        assert (plan.allocations, plan.admitted, plan.rejected, plan.memory) == (
            fresh.allocations,
            fresh.admitted,
            fresh.rejected,
            fresh.memory,
        )
        model_of = self.snapshot.cluster.accelerator_of
        for given in plan.allocations.values():
            assert len({model_of[device] for device in given.device_ids}) == 1
        self.snapshot = replace(self.snapshot, allocations=plan.allocations, memory=plan.memory)
        return plan

    def places(self) -> dict[str, tuple[str, int]]:
        model_of = self.snapshot.cluster.accelerator_of
        return {
            str(who): (model_of[given.device_ids[0]], given.num_devices)
            for who, given in self.snapshot.allocations.items()
        }


# --- speeds ----------------------------------------------------------------------------------------------------------


def test_a_ratio_is_that_of_families_on_both_models_and_one_that_is_alike_on_each():
    known = KnownSpeeds({}).learn(
        [
            measured(job("a", family="x"), A100={1: 8.0, 2: 16.0}, T4={2: 2.0}),
            measured(job("b", family="y"), A100={1: 8.0}, T4={1: 1.0, 4: 3.0}),
            measured(job("c", family="z"), T4={1: 1.0}),
        ]
    )
    assert known.ratio(FAST, SLOW) == pytest.approx(8.0 ** (2 / 3))
    assert known.ratio(SLOW, FAST) == pytest.approx(8.0 ** (-2 / 3))
    assert KnownSpeeds({}).ratio(FAST, SLOW) == 1.0
    assert KnownSpeeds.read(known.write()).families == known.families
    assert known.learn([measured(job("d", family="z"), T4={1: 1.03})]) is known


def test_what_is_sure_is_a_profile_and_the_rest_as_if_measured():
    known = KnownSpeeds({"x|32|fixed": {SLOW: {2: 64.0}}})
    told, kin, alone = job("a", fast=2.0), job("b", family="x"), job("c", family="y", fast=2.0)
    assert known.view_on(told, FAST).job.profile_steps_per_s == {1: 2.0, 2: 4.0, 4: 8.0}
    # Where two devices did two steps a second each does one or more.
    assert known.view_on(kin, SLOW).job.profile_steps_per_s == {1: SURE_FRACTION, 2: 2 * SURE_FRACTION}
    for view, model in ((kin, FAST), (alone, SLOW)):
        shown = known.view_on(view, model)
        assert not known.is_sure(view, model)
        assert not shown.job.profile_steps_per_s
        assert shown.learnt.throughput_samples_per_s
    # A job that started before anything was known of its family there was not promised anything.
    assert not known.is_sure(replace(kin, started_at_s=1.0), SLOW)


def test_a_measured_job_is_scaled_from_where_it_ran():
    known = KnownSpeeds({"x|32|fixed": {SLOW: {1: 32.0}, FAST: {1: 128.0}}})
    view = measured(job("a", slow=1.0), T4={1: 0.5})
    shown = known.view_on(view, FAST).learnt.throughput_samples_per_s
    assert shown == {n: pytest.approx(32.0 * 0.5 * n * 2.0) for n in LINEAR}


# --- which model -----------------------------------------------------------------------------------------------------


def test_the_faster_devices_go_to_the_job_that_gains_most_by_them():
    cluster = Cluster(1, 1)
    cluster.look(job("little", 1.2, 1.0, most=1), job("much", 8.0, 1.0, most=1))
    assert cluster.places() == {"little": (SLOW, 1), "much": (FAST, 1)}


@pytest.mark.parametrize(("change_s", "model"), [(1.0, FAST), (900.0, SLOW)])
def test_a_job_moves_where_that_gains_more_than_the_change_costs(change_s, model):
    cluster = Cluster(1, 1)
    first, second = job("first", 8.0, 7.0, most=1, steps=8000), job("second", 4.0, 1.0, most=1, steps=600)
    cluster.look(first, second)
    assert cluster.places() == {"first": (SLOW, 1), "second": (FAST, 1)}
    cluster.snapshot = replace(cluster.snapshot, overheads=Overheads(change_s=change_s))
    cluster.look(first, now_s=1.0)
    assert cluster.places() == {"first": (model, 1)}


def test_homes_are_kept_and_cannot_be_another_model_for_what_is_not_resized():
    cluster = Cluster(1, 1)
    held = PoolAllocation(device_ids=("s/0",))
    view = job("a", 8.0, 1.0, most=1, elastic=False, state=JobState.RUNNING)
    snapshot = replace(cluster.snapshot, jobs=(view,), allocations={WorkloadId("a"): held})
    known = KnownSpeeds({})
    choice = HomeChoice(
        snapshot,
        {},
        {FAST: {}, SLOW: {WorkloadId("a"): held}},
        known,
        lambda v, model: model_row(known.view_on(v, model)),
    )
    assert choice.homes == {"a": SLOW}
    assert not choice.may_move


# --- promises --------------------------------------------------------------------------------------------------------


def test_the_deadline_of_a_first_run_says_what_it_waits_for():
    plan = Cluster().look(job("a", deadline_s=2000.0), job("b", 1.0, 1.0))
    condition = plan.conditions[WorkloadId("a")]
    assert (condition.num_workers, condition.measured_s) == (plan.allocations[WorkloadId("a")].num_devices, None)
    assert 1000 * condition.step_s <= 2000.0


@pytest.mark.parametrize("profile", [{}, LINEAR])
def test_a_first_run_is_promised_once_it_is_measured_where_it_runs(profile):
    """A profile that does not say its model promises nothing; what the job has measured on its own model does."""
    cluster, view = Cluster(), job("a", deadline_s=2000.0)
    view = replace(view, job=replace(view.job, profile_steps_per_s=profile))
    assert not cluster.look(view).admitted
    model, size = cluster.places()["a"]
    for now_s in (10.0, SETTLE_S):
        running = measured(view, **{model: {size: 0.8 * size}})
        known = {"num_replicas": size, "resized_at_s": 0.0, "progress_at_s": now_s, "started_at_s": 0.0}
        running = with_fields(running, state=JobState.RUNNING, step=int(0.8 * size * now_s), **known)
        plan = cluster.look(running, now_s=now_s)
        assert set(plan.admitted) == ({"a"} if now_s == SETTLE_S else set())
    assert plan.admitted["a"] == pytest.approx(SETTLE_S + (1000 - running.progress.step) / (0.9 * 0.8 * size), abs=0.1)


def test_a_promise_rests_only_on_models_of_which_the_speed_is_sure():
    # In time on the fast model, had it a profile there; the slow one does not do, and that is what is said.
    plan = Cluster().look(job("a", slow=1.0, deadline_s=100.0))
    assert "impossible" in plan.rejected["a"].reason
    plan = Cluster().look(job("a", 8.0, 1.0, deadline_s=100.0))
    assert plan.admitted
    assert not plan.rejected
    # Without any profile it is pursued, and nothing is promised.
    plan = Cluster().look(measured(job("a", deadline_s=2000.0), T4={1: 1.0}))
    assert not plan.admitted
    assert not plan.rejected
    assert plan.allocations


def test_who_finds_no_room_on_one_model_is_promised_on_the_other_or_refused():
    cluster = Cluster()
    views = [job(name, 2.0, 2.0, steps=800, deadline_s=110.0) for name in "abc"]
    plan = cluster.look(*views)
    assert sorted(plan.admitted) == ["a", "b"]
    assert list(plan.rejected) == ["c"]
    assert {model for model, _ in cluster.places().values()} == {FAST, SLOW}


def test_a_promise_goes_on_on_the_other_model_when_its_own_has_gone():
    cluster = Cluster()
    view = job("a", 2.0, 1.0, steps=800, deadline_s=1000.0)
    cluster.look(view)
    assert cluster.places()["a"][0] == FAST
    view = replace(view, promise=DeadlinePromise(admitted_at_s=0.0, promised_finish_s=100.0))
    left = tuple(node for node in cluster.snapshot.cluster.nodes if node.node_id == "s")
    cluster.snapshot = replace(cluster.snapshot, cluster=Topology(nodes=left), allocations={})
    assert is_mixed(cluster.snapshot)
    plan = cluster.look(view, now_s=10.0)
    assert cluster.places()["a"][0] == SLOW
    assert not [claim for claim in plan.claims.values() if claim.code == "given_up"]


def test_a_job_that_moves_for_its_deadline_is_told_that_and_not_that_it_gains():
    cluster = Cluster(2, 2)
    view = job("a", 2.0, 1.0, most=2, steps=800, deadline_s=600.0)
    cluster.look(view)
    held = cluster.snapshot.allocations
    promise = DeadlinePromise(admitted_at_s=0.0, promised_finish_s=250.0)
    view = replace(view, promise=promise, state=JobState.RUNNING, num_replicas=2, started_at_s=0.0)
    cluster.look(measured(view, A100={2: 4.0}), now_s=1.0)
    assert cluster.places()["a"] == (FAST, 2)
    # It is much slower there than its profile says: at that speed it would be late.
    slow = measured(replace(view, progress=JobProgress(step=40, progress_at_s=100.0)), A100={2: 0.4})
    plan = cluster.look(slow, now_s=100.0)
    assert cluster.places()["a"][0] == SLOW
    assert plan.reasons == {"a": f"goes on on {SLOW}: it is in time for its deadline there"}
    assert plan.claims["a"].code == "kept_in_time"
    assert plan.claims["a"].at_s == plan.future["a"][-1].end_s <= 600.0
    # It is said as long as it is on its way, and the schedule on the model that it had would be late.
    cluster.snapshot = replace(cluster.snapshot, allocations=held)
    assert cluster.look(slow, now_s=101.0).reasons == plan.reasons
    assert 100.0 + 760 / 0.4 > 600.0


def test_prices_are_told_by_model():
    cluster = Cluster(1, 2)
    plan = cluster.look(job("a", 8.0, 1.0, most=2), job("b", 1.1, 1.0, most=1))
    assert cluster.places() == {"a": (FAST, 1), "b": (SLOW, 1)}
    assert plan.price_s is None
    assert plan.prices_s[FAST] > 0.0
    assert plan.prices_s[SLOW] == 0.0


def test_a_job_stays_where_it_runs_while_a_deadline_needs_its_devices_at_once():
    cluster = Cluster(1, 1)
    cluster.look(job("best", 1.1, 1.0, most=1, steps=100_000))
    assert cluster.places() == {"best": (FAST, 1)}
    running = job("best", 1.1, 1.0, most=1, steps=100_000, state=JobState.RUNNING, started_at_s=0.0)
    plan = cluster.look(running, job("due", fast=1.0, most=1, steps=100, deadline_s=150.0), now_s=1.0)
    assert set(plan.admitted) == {"due"}
    # It gives its device up there, and does not hold it until its worker on the other model is warm.
    assert cluster.places() == {"due": (FAST, 1)}
    assert plan.reasons["best"] == "'due' needs 1 device for a promised deadline"


def test_without_any_device_jobs_wait_and_what_was_promised_is_remembered():
    cluster = Cluster()
    view = job("a", 2.0, 1.0, steps=800, deadline_s=1000.0)
    cluster.look(view)
    view = replace(view, promise=DeadlinePromise(admitted_at_s=0.0, promised_finish_s=100.0))
    before = cluster.snapshot
    cluster.snapshot = replace(before, cluster=Topology(), allocations={})
    plan = cluster.look(view, now_s=10.0)
    assert plan.reasons == {"a": "waiting: there is no device"}
    assert plan.memory == before.memory
    cluster.snapshot = replace(cluster.snapshot, cluster=before.cluster)
    cluster.look(view, now_s=20.0)
    assert cluster.places()["a"][0] == FAST


def test_a_job_that_needs_more_than_there_is_of_one_model_is_told_that():
    plan = Cluster().look(job("a", 2.0, 1.0, least=6, most=8))
    assert plan.reasons == {"a": "waiting: it needs 6 devices of one model, and there are 4"}


def test_the_replicas_of_a_service_are_on_one_model_and_stay_there():
    cluster = Cluster(2, 4)
    cluster.snapshot = replace(cluster.snapshot, services=(service("s", low=2, high=3, load=2)[0],))
    cluster.look()
    assert cluster.places() == {"s": (SLOW, 2)}
    cluster.look(*[job(name, 1.0, 9.0, steps=9000) for name in "abc"], now_s=5.0)
    assert cluster.places()["s"] == (SLOW, 2)


def test_a_promise_made_on_one_model_is_kept_when_another_joins():
    cluster = Cluster()
    both, cluster.snapshot = (
        cluster.snapshot.cluster,
        replace(cluster.snapshot, cluster=Topology(nodes=cluster.snapshot.cluster.nodes[1:])),
    )
    view = replace(
        job("a", slow=1.0, deadline_s=300.0),
        job=replace(job("a", deadline_s=300.0).job, profile_steps_per_s=LINEAR, profiles={SLOW: LINEAR}),
    )
    assert cluster.look(view).admitted
    view = replace(view, promise=DeadlinePromise(admitted_at_s=0.0, promised_finish_s=250.0), state=JobState.RUNNING)
    cluster.snapshot = replace(cluster.snapshot, cluster=both)
    plan = cluster.look(replace(view, num_replicas=4), now_s=10.0)
    assert cluster.places()["a"][0] == SLOW
    assert not plan.claims


def test_a_trace_on_two_models_keeps_every_promise_and_moves_jobs():
    truth = {FAST: {n: 3.0 * n**0.9 for n in LINEAR}, SLOW: {n: 1.0 * n**0.9 for n in LINEAR}}

    def submitted(index: int) -> TrainingJob:
        deadline_s = 90.0 * index + 700.0 if index % 2 else None
        view = job(f"j{index}", family="x" if index % 3 else "", steps=600 + 97 * index, deadline_s=deadline_s)
        return replace(view.job, profiles=truth if index % 4 else {})

    found = play(
        Springtide(),
        [(60.0 * index, submitted(index)) for index in range(10)],
        cluster_nodes(f"1x4:{FAST},1x4:{SLOW}"),
        rule=OverheadRule(name="change", pause=Overheads(change_s=5.0)),
        speeds=ProfiledSpeeds(devices_per_node=4, true_profile=lambda _, model: truth[model]),
        reports_progress=True,
    )
    runs = found.runs.values()
    assert all(run.has_ended for run in runs)
    assert [run.admitted_s is not None for run in runs].count(True) >= 3
    assert not found.broken
    assert {model for run in runs for model in run.accelerators} == {FAST, SLOW}
