"""Jobs on functions over the API: what is taken, planned, quoted and told, and what is refused with which sentence."""

from __future__ import annotations

import pytest

from kits.service.api_fixtures import job_body
from kits.service.function_fixtures import MIB, function_job, layer, profile
from springtide.core.events import PauseRequested, ProgressReported, UsageReported
from springtide.core.functions import Bill, Usage
from springtide.core.status.functions import FunctionRunStatus, PlaceStatus
from springtide.core.wire.functions import LaneTimes


def refusal(answer, status=422):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def submitted(asking, **changes):
    answer = asking.post("/v1/jobs", json=function_job(**changes))
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_a_job_with_a_profile_gets_a_menu_and_a_place(asking, connected):
    job = submitted(asking)
    record = connected.view().jobs[job["job_id"]]
    menu = record.job.menu
    assert menu.service == "emulator"
    assert menu.num_layers == 10
    assert record.job.total_steps == 72
    assert all(option.plan.stages[-1].end_layer == 10 for option in menu.options)
    assert [replica.device_id for replica in record.replicas] == ["functions/0"]
    assert job["on"] == "emulator"
    assert job["cost_usd"] == 0.0
    assert (job["min_workers"], job["max_workers"]) == (1, 1)
    plan = job["functions"]["plan"]
    assert plan["micro_batch_size"] * plan["num_micro_batches"] * plan["num_replicas"] >= 64


def test_a_job_for_machines_never_gets_a_place_at_the_function_service(asking, connected):
    job = asking.post("/v1/jobs", json=job_body(options__max_workers=2)).json()
    held = [replica["device_id"] for replica in job["replicas"]]
    assert held == ["local/0", "local/1"]
    assert job["on"] == ""
    assert job["functions"] is None


def test_without_a_function_service_the_sentence_says_how_to_start_one(http):
    assert "springtide up --functions emulator" in refusal(http.post("/v1/jobs", json=function_job()))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"options__layer_profile": None}, "needs options.layer_profile"),
        ({"options__on": "mainframe"}, "options.on must be 'cluster', 'functions' or 'auto'"),
        ({"options__layer_profile": profile(0)}, "options.layer_profile.layers"),
        ({"options__layer_profile": profile(memory_mb=[2048, 4096])}, "lists of different lengths"),
        (
            {"options__layer_profile": profile(memory_mb=[4096, 2048], bytes_per_s=[7e7, 7e7])},
            "lists of different lengths",
        ),
        (
            {"options__layer_profile": profile(micro_batch_size=65)},
            "options.layer_profile.micro_batch_size 65 is more than the global batch of 64",
        ),
        ({"options__layer_profile": profile(surprise=1)}, "surprise is not a known field"),
        ({"options__layer_profile": {**profile(), "layers": [layer(0, forward_s=-1.0)]}}, "at least 0"),
        ({"options__layer_profile": {**profile(), "layers": [layer(0)] * 1025}}, "at most 1024 entries"),
        ({"options__batch": {"min_size": 64, "max_size": 128}}, "one global batch"),
        (
            {"options__layer_profile": {**profile(), "layers": [layer(0), layer(1, parameter_bytes=9000 * MIB)]}},
            "layer layers.1 needs",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_field(asking, connected, changes, sentence):
    assert sentence in refusal(asking.post("/v1/jobs", json=function_job(**changes)))
    assert not connected.view().jobs, "nothing was taken in"
    assert not (connected.state_dir / "workloads").exists(), "nothing was written"


def test_a_script_cannot_be_cut(asking):
    body = function_job()
    body["source"] = {**body["source"], "kind": "script", "object_name": ""}
    assert "st.Task" in refusal(asking.post("/v1/jobs", json=body))


def test_a_profile_without_functions_is_refused_at_submission(asking):
    assert "options.layer_profile is for jobs on functions; add options.on 'functions'" in refusal(
        asking.post("/v1/jobs", json=function_job(options__on="cluster"))
    )


def test_a_quote_prices_each_item_and_compares_with_machines(asking, connected):
    body = function_job(options__profile_steps_per_s={"1": 2.0, "2": 3.6})
    quote = asking.post("/v1/quote", json=body).json()
    assert quote["verdict"] == "accepted", quote["reason"]
    assert quote["on"] == "emulator"
    assert 0 < quote["finish_s"]["p10"] < quote["finish_s"]["p90"]
    assert 0 < quote["cost_usd"]["p10"] < quote["cost_usd"]["p90"]
    bill = quote["bill"]
    assert bill["function_usd"] > bill["invocation_usd"] > 0
    assert bill["request_usd"] > 0
    total = sum(bill.values())
    assert 0.9 * quote["cost_usd"]["p10"] <= total <= 1.1 * quote["cost_usd"]["p90"], "the items are the whole"
    names = [option["name"] for option in quote["function_options"]]
    assert "chosen" in names
    assert quote["elsewhere"][0]["on"] == "cluster"
    assert quote["elsewhere"][0]["finish_s"]["p90"] > 0
    assert not connected.view().jobs, "asking changes nothing"


@pytest.mark.slow
def test_a_quote_counts_the_wait_for_a_place(asking, connected):
    alone = asking.post("/v1/quote", json=function_job()).json()
    assert alone["start_s"] == 0.0
    for _ in range(2):
        submitted(asking)
    behind = asking.post("/v1/quote", json=function_job()).json()
    assert behind["verdict"] == "accepted"
    if behind["start_s"] is None:
        assert behind["finish_s"] == {"p10": None, "p90": None}, "nobody knows when it starts, so nor when it ends"
    else:
        assert behind["start_s"] > 0
        assert behind["finish_s"]["p10"] > alone["finish_s"]["p10"]


def test_a_quote_for_machines_compares_with_functions(asking):
    quote = asking.post(
        "/v1/quote", json=function_job(options__on="cluster", options__profile_steps_per_s={"1": 2.0})
    ).json()
    assert quote["on"] == ""
    assert quote["workers"] == 2, "it is about machines"
    (other,) = quote["elsewhere"]
    assert (other["on"], other["verdict"]) == ("functions", "accepted")
    assert other["cost_usd"]["p90"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "why", "flag"),
    [
        ({"options__budget_usd": 0.000001}, "budget", "--budget"),
        ({"options__deadline_s": 1.0}, "in time", "--deadline"),
    ],
)
def test_an_impossible_goal_is_refused_and_what_is_offered_would_be_taken(asking, changes, why, flag):
    quote = asking.post("/v1/quote", json=function_job(**changes)).json()
    assert quote["verdict"] == "refused"
    assert why in quote["reason"]
    offers = {offer["change"].split()[0]: offer for offer in quote["alternatives"]}
    assert flag in offers
    job = submitted(asking, **changes)
    assert job["state"] == "REJECTED"
    name, value = next(iter(offers[flag]["options"].items()))
    assert submitted(asking, **{**changes, f"options__{name}": value})["state"] != "REJECTED"


def live_run(record, **values):
    plan = record.job.menu.options[record.job.menu.recommended].plan
    lanes = LaneTimes(step_s=2.0, forward_s=0.5, backward_s=0.7, flush_s=0.5, sync_s=0.3)
    place = PlaceStatus(
        stage=0, replica=0, incarnation=2, phase="training", memory_mb=1024, lifetime_left_s=40.0, step=9, lanes=lanes
    )
    defaults = {"service": "emulator", "plan": plan, "places": (place,), "step_s": 2.0, "predicted_step_s": 1.0}
    return FunctionRunStatus(**{**defaults, **values})


def test_status_tells_places_bill_and_budget(asking, connected):
    job = submitted(asking, options__budget_usd=5.0)
    record = connected.view().jobs[job["job_id"]]
    connected.runs[job["job_id"]] = live_run(record, num_replaced=1)
    connected.submit(UsageReported(job_id=job["job_id"], usage=Usage(function_gb_s=10.0), bill=Bill(function_usd=0.25)))
    told = asking.get(f"/v1/jobs/{job['job_id']}").json()
    run = told["functions"]
    assert run["places"][0]["lifetime_left_s"] == 40.0
    assert run["bill"]["function_usd"] == 0.25, "the journal knows more than a coordinator that has just come back"
    assert run["budget_usd"] == 5.0
    assert told["cost_usd"] == 0.25
    assert asking.get("/v1/status").json()["jobs"][0]["functions"]["num_replaced"] == 1


def test_why_names_the_way_the_losses_and_the_pace(asking, connected):
    job = submitted(asking)
    record = connected.view().jobs[job["job_id"]]
    connected.runs[job["job_id"]] = live_run(
        record, num_replaced=2, num_lost=1, num_throttled=3, num_redone_steps=4, num_handovers=5
    )
    told = "\n".join(asking.get(f"/v1/workloads/{job['job_id']}/why").json()["evidence"])
    assert "the recommended one" in told or "1 way" in told
    assert "predicted were 1.0 s (2.0 times as long: stage 0 spends most of it on computation)" in told
    assert "2 functions were replaced after they died, 1 invocation never began, 4 steps redone" in told
    assert "5 functions handed over" in told
    assert "put off 3 invocations (throttling)" in told


def test_a_budget_that_ran_out_can_be_raised_but_not_below_what_was_spent(asking, connected):
    job_id = submitted(asking, options__budget_usd=1.0)["job_id"]
    connected.run_job(job_id)
    connected.submit(UsageReported(job_id=job_id, usage=Usage(), bill=Bill(function_usd=0.99)))
    connected.submit(PauseRequested(job_id=job_id, reason="its budget of $1.00 would be broken by the next step"))
    connected.stop_replicas(job_id)
    why = asking.get(f"/v1/workloads/{job_id}/why").json()
    assert why["state"] == "PAUSED"
    assert why["next_steps"][0].startswith(f"springtide resume {job_id} --budget ")
    assert "has cost $0.99" in refusal(asking.post(f"/v1/jobs/{job_id}/resume", json={"budget_usd": 0.5}))
    assert asking.post(f"/v1/jobs/{job_id}/resume", json={"budget_usd": 5.0}).status_code == 200
    assert connected.view().jobs[job_id].job.goal.budget_usd == 5.0


def test_functions_are_not_scaled_by_hand(asking):
    job = submitted(asking)
    answer = asking.post(f"/v1/workloads/{job['job_id']}/scale", json={"minimum": 1, "maximum": 2})
    assert "follows from its plan" in refusal(answer, 409)


def test_the_description_holds_what_may_be_sent(asking):
    described = asking.get("/openapi.json").json()["components"]["schemas"]
    assert {"LayerProfileIn", "ResumeIn", "FunctionRunStatus", "FunctionQuoteOption"} <= set(described)


def test_figures_of_functions_have_bounded_labels(asking, connected, http):
    assert "springtide_function_" not in http.get("/metrics").text, "a platform without functions says nothing of them"
    job = submitted(asking)
    record = connected.view().jobs[job["job_id"]]
    connected.runs[job["job_id"]] = live_run(record, num_replaced=2)
    usage = Usage(function_gb_s=12.5, num_invocations=3, num_puts=7)
    connected.submit(UsageReported(job_id=job["job_id"], usage=usage, bill=Bill(function_usd=0.25, request_usd=0.5)))
    figures = asking.get("/metrics").text
    assert 'springtide_function_places{phase="training"} 1.0' in figures
    assert 'springtide_function_incidents{kind="replaced"} 2.0' in figures
    assert "springtide_function_step_ratio 2.0" in figures
    assert "springtide_function_gigabyte_seconds_total 12.5" in figures
    assert 'springtide_function_cost_dollars_total{item="requests"} 0.5' in figures
    assert 'springtide_function_store_requests_total{kind="put"} 7.0' in figures
    assert job["job_id"] not in figures


def test_the_story_speaks_of_functions(asking, connected):
    job_id = submitted(asking, options__budget_usd=1.0)["job_id"]
    connected.run_job(job_id)
    connected.submit(PauseRequested(job_id=job_id, reason="its budget of $1.00 is nearly spent"))
    connected.stop_replicas(job_id)
    asking.post(f"/v1/jobs/{job_id}/resume", json={"budget_usd": 5.0})
    texts = [entry["text"] for entry in asking.get(f"/v1/workloads/{job_id}/history").json()]
    assert texts[0].startswith("submitted: to functions at emulator, global batch 64")
    assert any(text.startswith("started on ") and "function" in text for text in texts)
    assert "its budget of $1.00 is nearly spent" in texts
    assert "its owner lets it go on with a budget of $5.00" in texts


def test_the_loss_over_time_is_in_the_series(asking, connected):
    job_id = submitted(asking)["job_id"]
    connected.run_job(job_id)
    record = connected.view().jobs[job_id]
    connected.submit(
        ProgressReported(
            job_id=job_id, generation=record.group.generation, step=3, total_steps=72, world_size=1, loss=2.25
        )
    )
    assert asking.get(f"/v1/jobs/{job_id}/series").json()["points"][-1]["loss"] == 2.25
