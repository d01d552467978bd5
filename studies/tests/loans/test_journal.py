"""The journal of loans: what was labelled, held and interrupted for how long, from steps alone."""

from __future__ import annotations

import pytest

from springtide.core import actions, events
from springtide.core.ports import Step
from springtide.core.resources import Node, make_node
from springtide.core.workload import Entrypoint, InferenceService, ReplicaId, TrainingJob, WorkloadId
from springtide_studies.loans.journal import LoanJournal

SOURCE = Entrypoint(source_path="trace", object_name="fit")
JOB = TrainingJob(job_id=WorkloadId("job"), name="job", entrypoint=SOURCE)
SERVICE = InferenceService(
    service_id=WorkloadId("ask"), name="ask", entrypoint=SOURCE, min_replicas=1, max_replicas=4, target_in_flight=1
)
OWN, LENT = make_node("own", 2, pool="training"), make_node("lent", 2, pool="inference")


def start(workload: TrainingJob | InferenceService, replica: str, node: Node, index: int) -> actions.StartReplica:
    device_id = node.devices[index].device_id
    return actions.StartReplica(
        workload=workload, replica_id=ReplicaId(replica), device_id=device_id, generation=1, reason="test"
    )


def stopped(workload_id: str, replica: str) -> events.ReplicaStopped:
    return events.ReplicaStopped(workload_id=WorkloadId(workload_id), replica_id=ReplicaId(replica))


def lent_and_taken_back(until_s: float = 100.0) -> LoanJournal:
    """The inference server trains from 10 s on, has to go back at 40 s, and serves again from 50 s on."""
    journal = LoanJournal(until_s)
    joined = (events.NodeJoined(node=OWN), events.NodeJoined(node=LENT), events.JobSubmitted(job=JOB))
    journal.append(Step(now_s=0.0, events=joined))
    label = actions.LabelNode(node_id=LENT.node_id, pool="training")
    journal.append(Step(now_s=10.0, actions=(label, start(JOB, "r1", LENT, 0), start(JOB, "r2", LENT, 1))))
    drain = actions.DrainNode(node_id=LENT.node_id, pool="inference", is_reclaim=True, cost_s=7.0)
    preempt = actions.PreemptJob(job_id=JOB.job_id, generation=2, replica_ids=(ReplicaId("r1"), ReplicaId("r2")))
    deployed = events.ServiceDeployed(service=SERVICE)
    journal.append(Step(now_s=40.0, events=(deployed,), actions=(drain, preempt)))
    back = actions.LabelNode(node_id=LENT.node_id, pool="inference")
    gone = (stopped("job", "r1"), stopped("job", "r2"))
    journal.append(Step(now_s=43.0, events=gone, actions=(back, start(SERVICE, "s1", LENT, 0))))
    ready = events.ReplicaReady(workload_id=SERVICE.service_id, replica_id=ReplicaId("s1"))
    journal.append(Step(now_s=50.0, events=(ready,), actions=(start(JOB, "r3", OWN, 0),)))
    resized = events.JobResized(job_id=JOB.job_id, generation=3, world_size=1, step=5, pause_s=2.5, direction="resume")
    journal.append(Step(now_s=53.0, events=(resized,)))
    journal.close()
    return journal


def test_a_loan_and_its_return_are_counted() -> None:
    journal = lent_and_taken_back()
    assert (journal.num_loaned, journal.num_returned) == (1, 1)


def test_areas_are_those_of_what_was_held_and_labelled() -> None:
    areas = lent_and_taken_back().areas
    assert areas.devices == pytest.approx(4 * 100.0)
    assert areas.by_jobs == pytest.approx(2 * 33.0 + 1 * 50.0)
    assert areas.by_services == pytest.approx(57.0)
    assert areas.of_training == pytest.approx(2 * 100.0 + 2 * 33.0)
    assert areas.loaned_servers == pytest.approx(33.0)
    # It was needed from 40 s on and ready at 50 s.
    assert (areas.needed, areas.missing) == (pytest.approx(60.0), pytest.approx(10.0))


def test_waiting_counts_before_the_start_and_after_a_stop() -> None:
    assert lent_and_taken_back().queued_s(JOB.job_id) == pytest.approx(10.0 + 7.0)


def test_integrals_end_with_the_books_and_counts_do_not() -> None:
    journal = lent_and_taken_back(until_s=20.0)
    assert journal.areas.devices == pytest.approx(80.0)
    assert journal.areas.by_jobs == pytest.approx(20.0)
    assert journal.num_returned == 1


def test_a_drain_that_is_called_off_is_no_return_and_a_lost_server_no_holder() -> None:
    journal = LoanJournal(100.0)
    journal.append(Step(now_s=0.0, events=(events.NodeJoined(node=OWN), events.JobSubmitted(job=JOB))))
    journal.append(Step(now_s=1.0, actions=(start(JOB, "r1", OWN, 0),)))
    journal.append(Step(now_s=2.0, actions=(actions.DrainNode(node_id=OWN.node_id, pool="inference"),)))
    journal.append(Step(now_s=3.0, actions=(actions.LabelNode(node_id=OWN.node_id, pool="training"),)))
    journal.append(Step(now_s=4.0, events=(events.NodeLost(node_id=OWN.node_id),)))
    journal.close()
    assert journal.num_returned == 0
    assert journal.areas.by_jobs == pytest.approx(3.0)
    assert journal.areas.devices == pytest.approx(8.0)


def test_on_a_shared_server_training_has_what_no_service_holds() -> None:
    journal = LoanJournal(10.0)
    node = make_node("lent", 4, pool="inference", isolates_devices=True)
    journal.append(Step(now_s=0.0, events=(events.NodeJoined(node=node), events.ServiceDeployed(service=SERVICE))))
    label = actions.LabelNode(node_id=node.node_id, pool="shared")
    journal.append(Step(now_s=2.0, actions=(label, start(SERVICE, "s1", node, 0))))
    journal.close()
    assert journal.num_loaned == 1
    assert journal.areas.of_training == pytest.approx(8 * 3.0)
    assert journal.areas.loaned_servers == pytest.approx(8 * 0.75)
