"""What the next request to a sleeping service would wait for is what it waits for once it is there."""

from __future__ import annotations

import pytest

from kits.service.api_fixtures import service_body
from kits.service.platform_double import PlatformDouble
from springtide.core.events import JobSubmitted, LoadObserved
from springtide.core.workload import Entrypoint, Goal, TrainingJob
from springtide.scheduling.registry import make_live_policy
from springtide.service.status.explain import explain
from springtide.service.status.next_request import next_request_waits
from springtide.service.submission.schemas import ServiceIn
from springtide.service.submission.submission import SubmissionService


@pytest.mark.parametrize("share", [None, {"request": 0.3, "limit": 0.6}])
@pytest.mark.parametrize(("deadline_s", "is_held"), [(600.0, True), (3000.0, False)])
def test_what_the_next_request_would_wait_for(tmp_path, share, deadline_s, is_held):
    platform = PlatformDouble(tmp_path, policy=lambda: make_live_policy("springtide"))
    job = TrainingJob(
        job_id="fit",
        name="fit",
        entrypoint=Entrypoint(source_path="a.py"),
        max_workers=2,
        num_virtual_shards=4,
        total_steps=10_000,
        profile_steps_per_s={1: 10.0, 2: 18.0},
        goal=Goal(deadline_s=platform.clock_s + deadline_s),
    )
    platform.play(JobSubmitted(job=job))
    platform.run_job("fit")
    body = service_body(**({} if share is None else {"options__share": share}))
    record = SubmissionService(platform).deploy_service("reader", ServiceIn.model_validate(body))
    assert (record.state, record.reason) == ("IDLE", "no replica: scaled to zero, and no request waits")
    told = next_request_waits(record, platform)
    assert bool(told) is is_held
    why = explain(record, platform.view(), (), platform.clock_s, next_request=told)
    assert (told in why.evidence) is is_held
    assert why.next_steps == (("springtide ps",) if is_held else ("springtide scale reader 1..2",))
    platform.play(LoadObserved(service_id="reader", arrivals_per_s=1.0, in_flight=0, queued=1, idle_s=0.0))
    waiting = platform.view().services["reader"]
    assert next_request_waits(waiting, platform) == "", "what it waits for is its reason then"
    assert waiting.reason.startswith("waits for") is is_held
    if is_held:
        later = "; it can have one in 9m16 if nothing else changes"
        assert told == f"if a request came now: {waiting.reason}{later}"
        assert "promised deadlines need" in told
        assert "('fit' has 2)" in told
