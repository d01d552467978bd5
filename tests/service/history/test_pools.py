"""Loans and reclaims read off hand-made steps: who was made to go, what stays told, and that all of it is bounded."""

from __future__ import annotations

import pytest

from springtide.core.actions import DrainNode, LabelNode, PreemptJob, ResizeJob, StartReplica, StopReplica
from springtide.core.events import NodeJoined, ReplicaReady, ReplicaStopped
from springtide.core.ports import Step
from springtide.core.resources import make_node
from springtide.core.workload import Entrypoint, InferenceService, TrainingJob
from springtide.service.history.pools import MAX_HANDOVERS, PoolHistory

CODE = Entrypoint(source_path="/fit.py", object_name="fit")
JOB = TrainingJob(job_id="fit-1", name="fit", entrypoint=CODE)
SERVICE = InferenceService(service_id="ask", name="ask", entrypoint=CODE)
HARD = DrainNode(node_id="t1", pool="inference", is_reclaim=True, cost_s=40.0, reason="a minimum is missing")
LABEL = LabelNode(node_id="t1", pool="inference", reason="a minimum is missing")


def start(number, device_id, workload=JOB):
    return StartReplica(workload=workload, replica_id=f"r.{number}", device_id=device_id, generation=1)


def resize(*numbers):
    replicas = tuple(f"r.{number}" for number in numbers)
    return ResizeJob(job_id="fit-1", generation=2, replica_ids=replicas, global_batch_size=32)


def stop(number):
    return ReplicaStopped(workload_id="fit-1", replica_id=f"r.{number}")


def history_of(*steps):
    """A job on two nodes of two devices, then what the test adds: (second, what happened or was done...)."""
    history = PoolHistory()
    nodes = [NodeJoined(node=make_node(name, 2, pool="training")) for name in ("t0", "t1")]
    history.add(Step(now_s=1.0, events=(*nodes, NodeJoined(node=make_node("s0", 2, pool="inference")))))
    starts = [start(number, f"t{number // 2}/{number % 2}") for number in range(4)]
    history.add(Step(now_s=2.0, actions=(*starts, resize(0, 1, 2, 3))))
    for now_s, *news in steps:
        events = tuple(item for item in news if type(item).__module__.endswith("events"))
        actions = tuple(item for item in news if type(item).__module__.endswith("actions"))
        history.add(Step(now_s=now_s, events=events, actions=actions))
    return history


@pytest.mark.parametrize(
    ("action", "effect", "num_after", "kind"),
    [
        (resize(0, 1), "shrunk", 2, "shrinking"),
        (resize(0, 1, 4, 5), "moved", 4, "shrinking"),
        (PreemptJob(job_id="fit-1", generation=2, replica_ids=()), "stopped", 0, "interrupting"),
        (StopReplica(workload_id="fit-1", replica_id="r.2", grace_s=0.0), "forced", 3, "interrupting"),
    ],
)
def test_what_a_reclaim_does_to_a_job_is_read_off_what_the_job_is_told(action, effect, num_after, kind):
    history = history_of((10.0, HARD, action), (14.0, stop(2), stop(3), LABEL))
    (handover,) = history.handovers()
    (job,) = handover.affected
    assert (job.effect, job.num_workers_before, job.num_workers_after) == (effect, 4, num_after)
    assert (handover.reclaim_kind, handover.labelled_at_s - handover.reclaim_at_s) == (kind, 4.0)


def test_a_job_that_goes_on_elsewhere_or_leaves_by_itself_is_not_counted():
    asked_of_others = StopReplica(workload_id="fit-1", replica_id="r.0", grace_s=0.0)
    history = history_of((10.0, HARD, asked_of_others, resize(1, 2, 3)), (14.0, stop(2), stop(3), LABEL))
    (handover,) = history.handovers()
    assert (handover.affected, handover.reclaim_kind) == ((), "idle")


def test_what_a_reclaim_was_for_and_cost_stays_when_others_may_stay_a_while():
    soft = DrainNode(node_id="t1", pool="inference", reason="until they have ended")
    history = history_of(
        (10.0, HARD, resize(0, 1, 2)), (10.0, PreemptJob(job_id="fit-1", generation=3, replica_ids=()))
    )
    history.add(Step(now_s=12.0, actions=(soft,)))
    history.add(Step(now_s=90.0, events=(stop(2), stop(3)), actions=(LABEL,)))
    (handover,) = history.handovers()
    assert (handover.reason, handover.cost_s, handover.reclaim_kind) == ("a minimum is missing", 40.0, "interrupting")
    # It was the patience with the others that took so long, not the reclaim.
    assert handover.reclaim_at_s is None
    assert history.totals().reclaim_s.count == 0


def test_a_part_of_a_server_is_loaned_and_what_jobs_hold_of_it_is_not_open_to_services():
    history = history_of(
        (10.0, LabelNode(node_id="s0", pool="shared")),
        (11.0, start(7, "s0/1")),
        (12.0, stop(7)),
        (13.0, LabelNode(node_id="s0", pool="inference")),
    )
    assert [(handover.kind, handover.is_return) for handover in history.handovers()] == [
        ("loan", False),
        ("reclaim", True),
    ]
    assert [(size.at_s, size.num_open, size.num_owned) for size in history.sizes()] == [
        (1.0, 2, 2),
        (11.0, 1, 2),
        (12.0, 2, 2),
    ]
    (loan,) = history.loans()
    assert (loan.pool, loan.start_s, loan.end_s) == ("shared", 10.0, 13.0)
    assert [size.at_s for size in history.sizes(since_s=11.5)] == [11.0, 12.0]


def test_the_first_replica_that_is_ready_on_the_server_ends_a_reclaim_and_no_other():
    history = history_of(
        (10.0, HARD, resize(0, 1)),
        (14.0, stop(2), stop(3), LABEL, start(8, "t1/0", SERVICE), start(9, "s0/0", SERVICE)),
        (15.0, ReplicaReady(workload_id="ask", replica_id="r.9")),
        (16.0, ReplicaReady(workload_id="ask", replica_id="r.8")),
        (17.0, ReplicaReady(workload_id="ask", replica_id="r.8")),
    )
    assert history.handovers()[0].serving_at_s == 16.0


def test_what_is_remembered_is_bounded():
    history = history_of()
    for second in range(2 * MAX_HANDOVERS):
        pool = "training" if second % 2 else "inference"
        history.add(Step(now_s=100.0 + second, actions=(LabelNode(node_id="t0", pool=pool),)))
    assert len(history.handovers()) == MAX_HANDOVERS
    assert history.totals().num_loans == MAX_HANDOVERS
    assert history.handovers()[-1].demanded_at_s == 99.0 + 2 * MAX_HANDOVERS


def test_a_drain_that_is_called_off_at_once_and_moved_nobody_is_only_counted():
    kept = LabelNode(node_id="t1", pool="training", reason="it stays with training after all")
    history = history_of(
        (10.0, HARD), (10.2, kept), (20.0, HARD), (21.5, kept), (30.0, HARD, resize(0, 1)), (30.1, kept)
    )
    assert [(h.demanded_at_s, h.state) for h in history.handovers()] == [(20.0, "called off"), (30.0, "called off")]
    assert history.totals().num_called_off == 3
