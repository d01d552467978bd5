"""A minimum of replicas is asked of the table in which promised deadlines stand, on whole devices and on parts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from springtide.control.controller import Controller
from springtide.control.quotes.minimum import ask_minimum
from springtide.core.decision import Snapshot
from springtide.core.events import JobSubmitted, NodeJoined, ReplicaReady
from springtide.core.resources import make_node
from springtide.core.shares import Share, make_share
from springtide.core.workload import Entrypoint, Goal, InferenceService, TrainingJob
from springtide.scheduling.registry import make_live_policy

SOURCE = Entrypoint(source_path="a.py")
JOB = TrainingJob(
    job_id="fit",
    name="fit",
    entrypoint=SOURCE,
    max_workers=2,
    num_virtual_shards=4,
    total_steps=10_000,
    profile_steps_per_s={1: 10.0, 2: 18.0},
)


def service(share: Share | None = None) -> InferenceService:
    return InferenceService(service_id="s", name="s", entrypoint=SOURCE, max_replicas=4, share=share)


def with_job(deadline_s: float | None, *, num_devices: int = 2, share: Share | None = None) -> Snapshot:
    """The platform ten seconds after a job came to it."""
    controller = Controller(make_live_policy("springtide"))
    controller.step(0.0, [NodeJoined(node=make_node("n", num_devices))])
    controller.step(0.0, [JobSubmitted(job=replace(JOB, goal=Goal(deadline_s=deadline_s), share=share))])
    replicas = controller.state.jobs["fit"].replicas
    controller.step(0.1, [ReplicaReady(workload_id="fit", replica_id=known.replica_id) for known in replicas])
    return controller.snapshot(10.0)


@pytest.mark.parametrize("share", [None, make_share(0.3, 0.6)])
def test_what_a_promise_needs_is_not_guaranteed_to_another(share: Share | None) -> None:
    answer = ask_minimum(with_job(600.0), make_live_policy("springtide"), service(share), 1, 0)
    assert (answer.most, answer.jobs) == (0, ("fit",))
    assert answer.free_in_s == pytest.approx(545.5, abs=1.0)


@pytest.mark.parametrize("share", [None, make_share(0.3, 0.6)])
@pytest.mark.parametrize("deadline_s", [None, 1200.0])
def test_what_promises_leave_is_guaranteed(share: Share | None, deadline_s: float | None) -> None:
    assert ask_minimum(with_job(deadline_s), make_live_policy("springtide"), service(share), 1, 0).most == 1


def test_as_many_as_fit_are_offered() -> None:
    policy = make_live_policy("springtide")
    answer = ask_minimum(with_job(600.0, num_devices=4), policy, service(), 4, 0)
    assert (answer.most, answer.jobs) == (2, ("fit",))
    # What is guaranteed already is not asked about again.
    assert ask_minimum(with_job(600.0), policy, service(), 2, 1).most == 1


def test_a_part_that_a_promise_has_is_not_guaranteed_to_another() -> None:
    answer = ask_minimum(
        with_job(3000.0, num_devices=1, share=make_share(0.8, 0.8)),
        make_live_policy("springtide"),
        service(make_share(0.3, 0.3)),
        1,
        0,
    )
    assert (answer.most, answer.jobs) == (0, ("fit",))


def test_a_replica_that_would_have_some_of_its_parts_is_not_guaranteed() -> None:
    """Half of two replicas is as many devices as one has: what is asked about is each part."""
    snapshot = with_job(3000.0, num_devices=4, share=make_share(0.8, 0.8))
    wide = replace(service(make_share(0.3, 0.3)), devices_each=2)
    answer = ask_minimum(snapshot, make_live_policy("springtide"), wide, 2, 0)
    assert (answer.most, answer.jobs) == (1, ("fit",))


def test_a_policy_without_promises_is_in_nobodys_way() -> None:
    assert ask_minimum(with_job(600.0), make_live_policy("elastic"), service(), 1, 0).most == 1
