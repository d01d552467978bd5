"""A minimum of replicas is promised only if all that is promised can be there at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kits.service.api_fixtures import service_body
from kits.service.platform_double import PlatformDouble
from springtide.control.records import ServiceRecord, ServiceState
from springtide.core.errors import Conflict, InvalidRequest
from springtide.core.events import JobSubmitted
from springtide.core.resources import make_node
from springtide.core.shares import Share
from springtide.core.workload import Entrypoint, Goal, InferenceService, TrainingJob
from springtide.scheduling.registry import make_live_policy
from springtide.service.submission.guarantees import check_guarantee
from springtide.service.submission.schemas import ScaleIn, ServiceIn
from springtide.service.submission.submission import SubmissionService


def platform(num_devices=4, **minimums):
    services = {}
    for name, minimum in minimums.items():
        is_removed = name.startswith("removed")
        service = InferenceService(service_id=name, name=name, entrypoint=Entrypoint(source_path=""))
        services[name] = ServiceRecord(
            service=service,
            state=ServiceState.REMOVED if is_removed else ServiceState.READY,
            reason="",
            deployed_at_s=0.0,
            min_replicas=minimum,
            max_replicas=8,
            is_removed=is_removed,
        )
    nodes = tuple(make_node(f"local-{number}", 1, pool="inference") for number in range(num_devices))
    return SimpleNamespace(nodes=nodes, services=services)


@pytest.mark.parametrize(
    ("view", "name", "minimum"),
    [
        (platform(), "reader", 0),
        (platform(), "reader", 4),
        (platform(echo=1, other=1), "reader", 2),
        (platform(echo=1, other=1), "echo", 3),
        (platform(removed=4), "reader", 4),
        (platform(removed=4), "removed", 4),
        # What was promised when there were more devices may be said again.
        (platform(num_devices=1, echo=2, other=2), "echo", 2),
        # Before its first node has joined, nobody knows.
        (platform(num_devices=0), "reader", 3),
    ],
)
def test_what_can_be_kept_is_promised(view, name, minimum):
    check_guarantee(view, name, minimum)


def test_more_than_the_platform_has():
    with pytest.raises(InvalidRequest) as refused:
        check_guarantee(platform(), "reader", 5)
    assert str(refused.value) == (
        "reader cannot be guaranteed 5 replicas: the platform has 4 devices; ask for a minimum of at most 4, "
        "like a scale of 4..5, or start it with more slots"
    )
    with pytest.raises(InvalidRequest, match="has 1 device;"):
        check_guarantee(platform(num_devices=1), "reader", 2)


def test_more_than_others_leave():
    with pytest.raises(InvalidRequest) as refused:
        check_guarantee(platform(echo=2, idle=0, big=2), "reader", 1)
    assert (
        "of which others are guaranteed 4 (echo 2, big 2); ask for a minimum of at most 0, like a scale of 0..1"
        in str(refused.value)
    )
    with pytest.raises(InvalidRequest, match="at most 2"):
        check_guarantee(platform(echo=2, big=2), "echo", 3)


def shared(view, **shares):
    """The platform's services, some of them on shares."""
    for name, request in shares.items():
        record = view.services[name]
        share = Share(request=request, limit=min(1.0, 2 * request))
        view.services[name] = replace(record, service=replace(record.service, share=share))
    return view


@pytest.mark.parametrize(
    ("view", "minimum", "request_fraction"),
    [
        (platform(num_devices=2), 2, 0.3),
        (shared(platform(num_devices=2, echo=2), echo=0.5), 2, 0.5),
        (shared(platform(num_devices=2, echo=1), echo=0.5), 1, None),
        (shared(platform(num_devices=1, a=1, b=1), a=0.3, b=0.3), 1, 0.4),
    ],
)
def test_shares_of_one_device_can_be_promised_together(view, minimum, request_fraction):
    share = None if request_fraction is None else Share(request=request_fraction, limit=1.0)
    check_guarantee(view, "reader", minimum, share)


@pytest.mark.parametrize(
    ("view", "minimum", "request_fraction", "sentence"),
    [
        (
            platform(num_devices=2),
            3,
            0.1,
            "3 replicas of 0.1 of a device each: the platform has 2 devices; .*at most 2",
        ),
        (shared(platform(num_devices=1, a=1, b=1), a=0.4, b=0.3), 1, 0.4, r"guaranteed 0\.7 \(a 0\.4, b 0\.3\)"),
        # Its two replicas need a device each, of which none is left whole.
        (shared(platform(num_devices=2, echo=2), echo=0.1), 1, None, "at most 0"),
    ],
)
def test_shares_that_can_never_be_there_together(view, minimum, request_fraction, sentence):
    share = None if request_fraction is None else Share(request=request_fraction, limit=1.0)
    with pytest.raises(InvalidRequest, match=sentence):
        check_guarantee(view, "reader", minimum, share)


def test_a_larger_share_is_a_new_promise():
    view = shared(platform(num_devices=1, echo=1, reader=1), echo=0.5, reader=0.25)
    check_guarantee(view, "reader", 1, Share(request=0.5, limit=0.5))
    with pytest.raises(InvalidRequest, match=r"cannot be guaranteed 1 replicas of 0\.6"):
        check_guarantee(view, "reader", 1, Share(request=0.6, limit=0.6))


@pytest.mark.parametrize("share", [None, {"request": 0.3, "limit": 0.6}])
def test_a_minimum_that_a_promised_deadline_leaves_no_device_for(tmp_path, share):
    platform = PlatformDouble(tmp_path, policy=lambda: make_live_policy("springtide"))
    job = TrainingJob(
        job_id="fit",
        name="fit",
        entrypoint=Entrypoint(source_path="a.py"),
        max_workers=2,
        num_virtual_shards=4,
        total_steps=10_000,
        profile_steps_per_s={1: 10.0, 2: 18.0},
        goal=Goal(deadline_s=platform.clock_s + 600.0),
    )
    platform.play(JobSubmitted(job=job))
    submissions = SubmissionService(platform)

    def deploy(minimum):
        changes = {} if share is None else {"options__share": share}
        body = service_body(options__min_replicas=minimum, options__max_replicas=4, **changes)
        return submissions.deploy_service("reader", ServiceIn.model_validate(body))

    with pytest.raises(InvalidRequest) as refused:
        deploy(1)
    assert str(refused.value) == (
        "reader cannot be guaranteed 1 replica: the deadline promised to 'fit' needs the devices; ask for a minimum of "
        "at most 0, like a scale of 0..1, ask again in 9m16, or start the platform with more devices"
    )
    assert "reader" not in platform.view().services
    deploy(0)
    with pytest.raises(InvalidRequest, match="the deadline promised to 'fit' needs the devices"):
        submissions.scale("reader", ScaleIn(minimum=1, maximum=2))
    assert len(platform.view().jobs["fit"].replicas) == 2
    # What is offered to one that asks for more than the machines have is not refused then.
    for ask in (lambda minimum: submissions.scale("reader", ScaleIn(minimum=minimum, maximum=4)), deploy):
        with pytest.raises(InvalidRequest, match=r"at most 0, as promised deadlines need devices, too, like .* 0..3,"):
            ask(3)
        ask(0)


def test_a_minimum_counts_every_part_of_its_replicas():
    nodes = (make_node("n", 3), make_node("m", 2))
    view = SimpleNamespace(nodes=nodes, services={})
    half = Share(request=0.5, limit=0.6)
    check_guarantee(view, "wide", 2, half, 2)
    # Five devices, but room for two replicas: each is on one node.
    with pytest.raises(Conflict, match=r"3 replicas of 0\.5 of each of 2 devices of one node each.* at most 2"):
        check_guarantee(view, "wide", 3, half, 2)
    known = platform(num_devices=5, echo=2).services["echo"]
    wide = replace(known, service=replace(known.service, share=half, devices_each=2))
    # Its two replicas are on four different devices.
    with pytest.raises(Conflict, match=r"others are guaranteed 2 \(echo 2\); ask for a minimum of at most 1"):
        check_guarantee(SimpleNamespace(nodes=nodes, services={"echo": wide}), "whole", 4)
