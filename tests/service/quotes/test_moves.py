"""Moving a job to functions over the API: what the rest takes is told first, and refused is what cannot be."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kits.service.api_fixtures import job_body
from kits.service.function_fixtures import function_job, profile
from springtide.core.events import CheckpointCommitted, MoveRequested, ProgressReported
from springtide.core.status.quote import UNKNOWN, Quote, Range
from springtide.service.quotes.moves import makes_goal

LAYERS = profile(2)


def on_machines(asking, connected, *, step=30, **options):
    """A job that was left to the platform, runs on machines and has come so far of 72 steps."""
    given = {"options__on": "auto", "options__layer_profile": LAYERS, **options}
    answer = asking.post("/v1/jobs", json=function_job(**given))
    assert answer.status_code == 201, answer.text
    job_id = answer.json()["job_id"]
    assert answer.json()["on"] == ""
    connected.run_job(job_id)
    generation = connected.view().jobs[job_id].group.generation
    connected.play(ProgressReported(job_id=job_id, generation=generation, step=step, total_steps=72, world_size=1))
    return job_id


def moved(asking, job_id, **body):
    return asking.post(f"/v1/jobs/{job_id}/move", json={"to": "functions", **body})


def refusal(answer, status=422):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_the_quote_is_of_what_is_left_and_changes_nothing(asking, connected):
    job_id = on_machines(asking, connected)
    before = connected.view().seq
    early = asking.post(f"/v1/jobs/{job_id}/move/quote", json={}).json()
    assert early["verdict"] == "accepted"
    assert early["on"] == "emulator"
    assert any("42 steps of 64 samples" in line for line in early["evidence"])
    assert any("it goes on from step 30" in line for line in early["evidence"])
    generation = connected.view().jobs[job_id].group.generation
    connected.play(ProgressReported(job_id=job_id, generation=generation, step=60, total_steps=72, world_size=1))
    late = asking.post(f"/v1/jobs/{job_id}/move/quote", json={}).json()
    assert late["finish_s"]["p90"] < early["finish_s"]["p90"]
    assert late["cost_usd"]["p90"] < early["cost_usd"]["p90"]
    assert connected.view().seq == before + 1


def test_its_owner_moves_it_and_the_journal_has_the_menu(asking, connected):
    job_id = on_machines(asking, connected)
    answer = moved(asking, job_id)
    assert answer.status_code == 200, answer.text
    (event,) = [
        event for _, step in connected.journal.read() for event in step.events if isinstance(event, MoveRequested)
    ]
    assert (event.reason, event.is_automatic, event.usd_per_device_hour) == ("its owner asked for it", False, 0.36)
    assert event.menu.num_layers == 2
    record = connected.view().jobs[job_id]
    assert record.state == "PREEMPTING"
    connected.play(CheckpointCommitted(job_id=job_id, generation=record.group.generation, step=31, path="/c"))
    connected.stop_replicas(job_id)
    status = asking.get(f"/v1/jobs/{job_id}").json()
    assert status["on"] == "emulator"
    assert status["place_reason"] == "moved to functions after step 31: its owner asked for it"
    assert status["functions"]["bill"]["machines_usd"] == status["cost_usd"]
    why = asking.get(f"/v1/workloads/{job_id}/why").json()
    assert "its owner moves it to functions at emulator" in [line["text"] for line in why["history"]]


def test_a_job_without_layers_of_its_own_needs_a_profile(asking, connected):
    answer = asking.post("/v1/jobs", json=job_body(options__deadline_s=None))
    job_id = answer.json()["job_id"]
    assert "springtide profile FILE --layers" in refusal(moved(asking, job_id))
    assert moved(asking, job_id, layer_profile=LAYERS).status_code == 200


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"options__num_virtual_shards": 4}, "it is exact"),
        ({"options__batch": {"min_size": 64, "max_size": 128}}, "its batch has bounds"),
        ({"options__share": {"request": 0.5, "limit": 0.5}}, "a share of a device"),
        ({"options__env": {"MODE": "x"}}, "an environment of its own"),
        ({"source__kind": "script", "source__object_name": ""}, "only a declared job"),
    ],
)
def test_what_functions_cannot_take_over_is_refused_with_the_reason(asking, options, why):
    answer = asking.post("/v1/jobs", json=job_body(options__deadline_s=None, **options))
    assert answer.status_code == 201, answer.text
    assert why in refusal(moved(asking, answer.json()["job_id"], layer_profile=LAYERS))


def test_a_goal_that_functions_would_miss_keeps_it_on_machines(asking, connected):
    job_id = on_machines(asking, connected, options__budget_usd=0.003)
    told = refusal(moved(asking, job_id))
    assert "stays on machines" in told
    assert "more than its budget of $0.00" in told
    assert not connected.view().jobs[job_id].is_moving


def test_what_machines_have_cost_is_left_out_of_the_budget(asking, connected):
    speeds = {"options__profile_steps_per_s": {"1": 9.0}, "options__budget_usd": 1.0}
    job_id = on_machines(asking, connected, **speeds)
    connected.clock_s += 3600.0
    told = asking.post(f"/v1/jobs/{job_id}/move/quote", json={}).json()
    assert 0.2 < told["budget_usd"] < 0.65
    connected.clock_s += 36000.0
    assert "its budget of $1.00 is spent" in refusal(moved(asking, job_id))


def test_one_that_is_on_functions_or_on_its_way_or_over_does_not_move(asking, connected):
    job_id = on_machines(asking, connected)
    assert moved(asking, job_id).status_code == 200
    assert "on its way" in refusal(moved(asking, job_id), 409)
    connected.stop_replicas(job_id)
    assert "on functions already" in refusal(moved(asking, job_id), 409)
    asking.post(f"/v1/jobs/{job_id}/cancel")
    assert "has ended" in refusal(moved(asking, job_id), 409)


def test_jobs_in_pods_do_not_move_yet(asking, connected):
    job_id = on_machines(asking, connected)
    connected.cluster_status = object()
    assert "runs in pods" in refusal(moved(asking, job_id))


def test_without_functions_there_is_no_place_to_move_to(http, platform):
    job_id = http.post("/v1/jobs", json=job_body()).json()["job_id"]
    assert "function service" in refusal(moved(http, job_id, layer_profile=LAYERS))


QUOTE = Quote(verdict="accepted", reason="", finish_s=Range(p10=8.0, p90=10.0), cost_usd=Range(p10=0.1, p90=0.2))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"deadline_s": 10.0, "budget_usd": 0.2}, True),
        ({"deadline_s": 9.9}, False),
        ({"budget_usd": 0.19}, False),
        ({"verdict": "refused"}, False),
        ({"finish_s": UNKNOWN}, False),
    ],
)
def test_a_goal_is_made_if_the_slow_and_the_dear_end_keep_it(fields, expected):
    assert makes_goal(replace(QUOTE, **fields)) is expected
