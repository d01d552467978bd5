"""The load of a run is drawn from its seed, and notes what becomes of it."""

from __future__ import annotations

import random

from msgspec.structs import replace

from kits.cli.fake_client import JOB
from springtide_studies.chaos.load import ChaosJob, ChaosLoad, draw_job


def test_a_seed_draws_the_same_jobs():
    first, second = ([draw_job(n, rng) for n in range(40)] for rng in (random.Random(3), random.Random(3)))
    assert first == second
    assert {ask[1] for job in first for ask in job.asks} == {"scale", "pause", "resume", "cancel"}
    assert any("deadline_s" in job.options for job in first)
    assert first != [draw_job(n, random.Random(4)) for n in range(40)]


def test_a_job_goes_on_when_it_has_made_a_step_was_paused_or_has_ended():
    job = ChaosJob(name=JOB.name, options={}, asks=[], status=JOB, seen_at=4.0)
    load = ChaosLoad(connect=lambda: None, rng=random.Random(1), jobs=[job])
    assert load.at_work() == [job]
    steps = {}
    assert not job.goes_on(5.0, steps), "what was seen before says nothing"
    job.seen_at = 6.0
    assert not job.goes_on(5.0, steps)
    for changes in ({"step": JOB.step + 1}, {"state": "PAUSED"}, {"state": "SUCCEEDED"}):
        job.status = replace(JOB, **changes)
        assert job.goes_on(5.0, steps)
    assert job.goes_on(7.0, {}), "an ended job is not looked at again"
    job.status = replace(JOB, state="PENDING")
    assert not job.goes_on(5.0, steps)
    assert not load.at_work()
