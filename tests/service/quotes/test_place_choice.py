"""`--on auto`: which place a job goes to, that its reason is kept, and what is said where only one place can run it."""

from __future__ import annotations

import msgspec
import pytest

from kits.service.api_fixtures import job_body
from kits.service.function_fixtures import function_job, layer, profile
from springtide.core.errors import InvalidRequest
from springtide.core.status.quote import Alternative, Quote, Range
from springtide.core.workload import TrainingJob
from springtide.service.quotes.place_choice import choose_place
from springtide.service.reconciler.submission import ResourceSubmission
from springtide.service.submission.schemas import JobIn
from springtide.service.submission.submission import SubmissionService


def told(finish_s=None, usd=None, **values):
    figures = {"finish_s": Range(p10=finish_s, p90=finish_s), "cost_usd": Range(p10=usd, p90=usd)}
    return Quote(**{"verdict": "accepted", "reason": "as it says", **figures, **values})


def on_functions(finish_s=None, usd=None, **values):
    return told(finish_s, usd, on="emulator", **values)


UNTIL = {"deadline_s": 100.0}
REFUSED = {"verdict": "refused"}


@pytest.mark.parametrize(
    ("machines", "functions", "place", "why"),
    [
        (told(80, 0.2, **UNTIL), on_functions(20, 0.2, **UNTIL), "", "they make its goal at no higher price"),
        (told(80, 0.3, **UNTIL), on_functions(20, 0.2, **UNTIL), "emulator", "both make its goal, functions for less"),
        (told(80, 0.3, **UNTIL), on_functions(101, 0.2, **UNTIL), "", "and functions may not"),
        (told(101, 0.1, **UNTIL), on_functions(20, 0.2, **UNTIL), "emulator", "and machines may not"),
        (told(101, 0.1, is_promised=True, **UNTIL), on_functions(20, 0.2, **UNTIL), "", "no higher price"),
        (
            told(**UNTIL),
            on_functions(20, 0.2, **UNTIL),
            "emulator",
            "an unknown time on machines, 20.0 s and $0.20 at most on functions",
        ),
        (told(110, 0.1, **UNTIL), on_functions(120, 0.1, **UNTIL), "", "neither place is sure"),
        (told(130, 0.1, **UNTIL), on_functions(120, 0.1, **UNTIL), "emulator", "functions end earlier"),
        (told(8, 0.6, budget_usd=0.5), on_functions(9, 0.4, budget_usd=0.5), "emulator", "they make its goal"),
        (told(**REFUSED, **UNTIL), on_functions(101, 0.2, **UNTIL), "emulator", "machines refuse it: as it says"),
        (told(101, 0.2, **UNTIL), on_functions(**REFUSED, **UNTIL), "", "functions refuse it: as it says"),
        (told(80, 9.0, start_s=0.0), on_functions(20, 0.1), "", "neither deadline nor budget"),
        (told(), on_functions(20, 0.1), "", "neither deadline nor budget"),
        (told(80, 0.0, start_s=30.0), on_functions(20, 0.1), "emulator", "machines would only begin in 30.0 s"),
        (told(80, 0.1), InvalidRequest("it is a script"), "", "were not considered: it is a script"),
        (InvalidRequest("no room"), on_functions(20, 0.1), "emulator", "machines cannot run it: no room"),
    ],
)
def test_machines_first_where_they_make_the_goal_at_no_higher_price(machines, functions, place, why):
    found = choose_place(machines, functions)
    assert (found.verdict, found.on) == ("accepted", place)
    assert found.place_reason.startswith("on functions: " if place else "on machines: ")
    assert why in found.place_reason
    assert [other.on for other in found.elsewhere] == ["cluster" if place else "functions"]


def test_where_neither_place_makes_it_the_offers_of_both_are_listed():
    longer = Alternative(change="--deadline 2m", options={"deadline_s": 120.0})
    dearer = Alternative(change="--budget 3", options={"budget_usd": 3.0})
    machines = told(**REFUSED, alternatives=(longer,))
    found = choose_place(machines, on_functions(**REFUSED, alternatives=(dearer,)))
    assert found.verdict == "refused"
    assert [offer.change for offer in found.alternatives] == [
        "--on cluster --deadline 2m",
        "--on functions --budget 3",
    ]
    assert found.alternatives[1].options == {"on": "functions", "budget_usd": 3.0}
    assert "--on functions --budget 3" in found.place_reason
    with pytest.raises(InvalidRequest, match="no room"):
        choose_place(InvalidRequest("no room"), InvalidRequest("no service"))


def asked(**changes):
    """A request that leaves the place open, with a profile of two layers, whose menu is made at once."""
    return function_job(**{"options__on": "auto", "options__layer_profile": profile(2), **changes})


def submitted(asking, body):
    answer = asking.post("/v1/jobs", json=body, headers={"Idempotency-Key": "once"})
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


@pytest.mark.slow
def test_a_job_goes_where_its_quote_says_and_the_reason_is_journaled(asking, connected):
    body = asked(options__deadline_s=500.0, options__profile_steps_per_s={"1": 0.01})
    quote = asking.post("/v1/quote", json=body).json()
    job = submitted(asking, body)
    assert (quote["on"], job["on"]) == ("emulator", "emulator"), "machines are too slow"
    assert "and machines may not" in job["place_reason"]
    kept = connected.view().jobs[job["job_id"]].job
    assert kept.menu is not None
    assert msgspec.json.decode(msgspec.json.encode(kept), type=TrainingJob).place_reason == job["place_reason"]
    why = asking.get(f"/v1/workloads/{job['job_id']}/why").json()
    assert why["evidence"][0] == job["place_reason"]
    assert job["place_reason"] in why["history"][0]["text"]
    assert submitted(asking, body)["job_id"] == job["job_id"], "the same request under its key is the same job"


def test_machines_that_are_fast_enough_and_cost_nothing_more_come_first(asking, connected):
    body = asked(options__deadline_s=500.0, options__profile_steps_per_s={"1": 9.0})
    job = submitted(asking, body)
    assert job["on"] == ""
    assert "they make its goal at no higher price" in job["place_reason"]
    assert connected.view().jobs[job["job_id"]].job.menu is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"options__layer_profile": None}, "no profile of its layers came with it: only a declared job"),
        ({"options__share": {"request": 0.5, "limit": 0.5}}, "shares no device"),
        ({"options__devices_each": 2}, "a function holds no devices"),
        ({"options__env": {"A": "1"}}, "a function runs in the platform's image"),
        ({"options__batch": {"min_size": 64, "max_size": 128}}, "one global batch"),
        (
            {"options__layer_profile": {**profile(), "layers": [layer(0), layer(1, parameter_bytes=9000 << 20)]}},
            "layer layers.1 needs",
        ),
    ],
)
def test_what_functions_cannot_run_goes_to_machines_and_it_is_said_why(asking, changes, why):
    job = submitted(asking, asked(**changes))
    assert job["on"] == ""
    assert "on machines: functions were not considered: " in job["place_reason"]
    assert why in job["place_reason"]


def test_without_a_function_service_auto_means_machines(http):
    job = http.post("/v1/jobs", json=job_body(options__on="auto")).json()
    assert job["place_reason"] == (
        "on machines: functions were not considered: this platform is connected to no function service"
    )


@pytest.mark.parametrize(
    "make", [SubmissionService, lambda platform: ResourceSubmission(platform, None, None, None, None)]
)
def test_an_object_of_a_cluster_says_where_it_runs(connected, make):
    with pytest.raises(InvalidRequest, match="a job is an object"):
        make(connected).submit_job(JobIn.model_validate(asked(), strict=False), None)
