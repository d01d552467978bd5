"""Jobs whose workers and memory are searched for: who gets a search, what it knows, what is quoted and told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kits.service.function_fixtures import MIB, function_job, layer, profile
from springtide.control.records import JobRecord, Lifecycle, StateReason
from springtide.core.events import FunctionsMeasured, ProgressReported, StreamObserved, UsageReported
from springtide.core.function_search import FunctionMeasurement, StreamView
from springtide.core.functions import Bill, FunctionPlan, FunctionStage, Usage
from springtide.core.job_parts import JobBounds
from springtide.core.reasons import ChosenPlan, GroupChange
from springtide.core.status.functions import FunctionRunStatus
from springtide.core.workload import Entrypoint, JobState, TrainingJob
from springtide.service.status.search_reports import decided_why, excess_of, search_status, tried_of
from springtide.service.submission.function_searches import as_of, earlier_measurements

# Asked for outright, no pipeline is planned to compare with.
DEADLINE = {"options__deadline_s": 1200.0, "options__search": True}


def refusal(answer, status=422):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def submitted(asking, **changes):
    answer = asking.post("/v1/jobs", json=function_job(**changes))
    assert answer.status_code == 201, answer.text
    return answer.json()


def quoted(asking, **changes):
    answer = asking.post("/v1/quote", json=function_job(**changes))
    assert answer.status_code == 200, answer.text
    return answer.json()


def measured(record, plan=None, factor=1.0, num_steps=10, usd=None):
    """What steps of a job would show, `factor` times as long as the menu says of its first entry."""
    option = record.job.menu.options[0]
    return FunctionMeasurement(
        plan=plan or option.plan,
        global_batch_size=64,
        gradient_bytes=record.job.search.model.parameter_bytes,
        num_steps=num_steps,
        step_s=factor * option.step_s,
        compute_s=0.8 * factor * option.step_s,
        sync_s=0.2 * factor * option.step_s,
        usd=option.step_usd if usd is None else usd,
    )


def tell_measured(connected, job_id, *measurements):
    record = connected.view().jobs[job_id]
    for one in measurements:
        connected.submit(FunctionsMeasured(job_id=job_id, generation=record.group.generation, measurement=one))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"options__deadline_s": 1200.0},
        {"options__search": True},
        {"options__search": True, "options__is_fastest": True},
        {"options__batch_schedule": [{"from_epoch": 1, "global_batch_size": 128}]},
        {"options__stream": "clicks", "options__num_samples": None, "options__num_epochs": 1},
    ],
)
def test_a_goal_or_work_that_changes_gets_a_search(asking, connected, changes):
    job = submitted(asking, **changes)
    record = connected.view().jobs[job["job_id"]]
    search = record.job.search
    assert search is not None
    assert search.model.parameter_bytes == 10 * 4 * MIB
    assert search.model.sample_s == pytest.approx(10 * 0.06 / 4)
    assert all(len(option.plan.stages) == 1 for option in record.job.menu.options)
    assert search.space.sizes[0].memory_mb % 128 == 0
    assert job["search"]["phase"] == "waiting"
    assert job["search"]["num_workers"] >= 1
    assert "begins with" in job["reason"]
    assert job["study"] == ""


def test_bounds_on_workers_are_those_of_the_search(asking, connected):
    job = submitted(asking, **DEADLINE, options__function_workers=[3, 6])
    record = connected.view().jobs[job["job_id"]]
    assert (record.job.search.space.min_workers, record.job.search.space.max_workers) == (3, 6)
    assert (record.job.min_workers, record.job.max_workers) == (1, 1), "it has one coordinator"
    assert max(option.plan.num_replicas for option in record.job.menu.options) <= 6


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**DEADLINE, "options__search": False},
        # No function holds the whole model: only stages of it.
        {
            "options__deadline_s": 100_000.0,
            "options__layer_profile": profile(layers=[layer(index, parameter_bytes=300 * MIB) for index in range(10)]),
        },
    ],
)
def test_without_a_goal_or_where_no_function_holds_the_model_it_is_a_pipeline(asking, connected, changes):
    job = submitted(asking, **changes)
    assert connected.view().jobs[job["job_id"]].job.search is None
    assert job["search"] is None


def test_a_search_that_was_asked_for_and_cannot_be_is_refused_with_what_would_do(asking, connected):
    layers = [layer(index, parameter_bytes=300 * MIB) for index in range(10)]
    body = function_job(options__search=True, options__layer_profile=profile(layers=layers))
    assert "without a search" in refusal(asking.post("/v1/jobs", json=body))
    assert not connected.view().jobs


def test_steps_that_outlast_every_lifetime_are_refused(asking, connected):
    slow = profile(layers=[layer(index, forward_s=40.0) for index in range(10)])
    for changes in ({"options__search": True}, {"options__budget_usd": 500.0}):
        body = function_job(options__layer_profile=slow, **changes)
        assert "lives 900 s" in refusal(asking.post("/v1/jobs", json=body))
    assert not connected.view().jobs


def test_a_pipeline_that_is_predicted_to_be_clearly_better_is_taken_instead(asking, connected):
    job = submitted(asking, options__is_fastest=True)
    record = connected.view().jobs[job["job_id"]]
    assert record.job.search is None, "16 workers exchange 40 MB each; four stages of four exchange a quarter of it"
    assert max(len(option.plan.stages) for option in record.job.menu.options) > 1
    insisted = submitted(asking, options__is_fastest=True, options__search=True)
    assert connected.view().jobs[insisted["job_id"]].job.search is not None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"options__on": "cluster", "options__layer_profile": None, "options__search": True},
            "is for jobs on functions",
        ),
        (
            {"options__on": "cluster", "options__layer_profile": None, "options__is_fastest": True},
            "is for jobs on functions",
        ),
        (
            {
                "options__on": "cluster",
                "options__layer_profile": None,
                "options__batch_schedule": [{"from_epoch": 0, "global_batch_size": 8}],
            },
            "options.batch_schedule is for jobs on functions",
        ),
        ({**DEADLINE, "options__is_fastest": True}, "two goals"),
        ({"options__study": "Not A Name"}, "options.study"),
        ({"options__function_workers": [4, 2]}, "swap them"),
        ({"options__function_workers": [0, 2]}, "at least 1"),
        ({"options__function_workers": [2]}, "options.function_workers"),
        ({"options__function_workers": [500, 900], **DEADLINE}, "runs 16 functions at a time"),
        ({"options__batch_schedule": [{"from_epoch": 0, "global_batch_size": 0}]}, "at least 1"),
        ({"options__batch_schedule": [{"from_epoch": -1, "global_batch_size": 8}]}, "at least 0"),
        (
            {
                "options__batch_schedule": [
                    {"from_epoch": 1, "global_batch_size": 8},
                    {"from_epoch": 1, "global_batch_size": 9},
                ]
            },
            "epochs ascend",
        ),
        ({"options__batch_schedule": [{"from_epoch": 3, "global_batch_size": 8}]}, "numbered 0 to 2"),
        ({"options__batch_schedule": [{"from_epoch": 1, "global_batch_size": 2}]}, "--micro-batch 2"),
        ({"options__batch_schedule": [[0, 8]]}, "options.batch_schedule"),
        ({"options__stream": "../x", "options__num_samples": None, "options__num_epochs": 1}, "options.stream"),
        ({"options__stream": "clicks", "options__num_epochs": 1}, "leave out options.num_samples"),
        (
            {"options__stream": "clicks", "options__num_samples": None, "options__num_epochs": 1, **DEADLINE},
            "a budget is possible",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_sentence(asking, connected, changes, sentence):
    assert sentence in refusal(asking.post("/v1/jobs", json=function_job(**changes)))
    assert not connected.view().jobs


def test_a_batch_schedule_says_how_many_steps_there_are(asking, connected):
    schedule = [{"from_epoch": 1, "global_batch_size": 128}, {"from_epoch": 2, "global_batch_size": 500}]
    job = submitted(asking, options__batch_schedule=schedule, options__study="widths")
    record = connected.view().jobs[job["job_id"]]
    assert record.job.total_steps == 24 + 12 + 4
    assert record.job.num_samples == 1536
    assert job["batch_schedule"] == schedule
    assert job["study"] == "widths"


def test_a_quote_says_what_the_search_may_cost_and_how_far_it_may_be_off(asking):
    quote = quoted(asking, **DEADLINE)
    assert quote["verdict"] == "accepted", quote["reason"]
    assert 0 < quote["finish_s"]["p10"] < quote["finish_s"]["p90"] <= 1200.0
    search = quote["search"]
    assert search["num_configurations"] > 100
    assert 0.2 < search["error_fraction"] < 0.3
    assert search["num_trials"] > 0
    assert 0 < search["trial_usd"] < quote["cost_usd"]["p90"]
    names = [option["name"] for option in quote["function_options"]]
    assert names[0] == "cheapest"
    assert names[-1] == "fastest"
    assert quote["elsewhere"][0]["on"] == "cluster"
    assert any("the search goes on while it trains" in line for line in quote["evidence"])


@pytest.mark.parametrize(
    ("changes", "why", "flag"),
    [
        ({"options__budget_usd": 0.000001, "options__search": True}, "budget", "--budget"),
        ({"options__deadline_s": 1.0, "options__search": True}, "in time", "--deadline"),
        ({"options__budget_usd": 0.000001, "options__is_fastest": True, "options__search": True}, "budget", "--budget"),
    ],
)
def test_a_goal_that_cannot_be_met_is_refused_and_what_is_offered_is_taken(asking, changes, why, flag):
    quote = quoted(asking, **changes)
    assert quote["verdict"] == "refused"
    assert why in quote["reason"]
    offers = {offer["change"].split()[0]: offer for offer in quote["alternatives"]}
    assert flag in offers
    assert "--best-effort" in offers
    assert submitted(asking, **changes)["state"] == "REJECTED"
    name, value = next(iter(offers[flag]["options"].items()))
    assert submitted(asking, **{**changes, f"options__{name}": value})["state"] != "REJECTED"


def test_fewer_epochs_of_a_schedule_are_counted_with_their_own_batches(asking):
    changes = {
        "options__search": True,
        "options__batch_schedule": [{"from_epoch": 1, "global_batch_size": 512}],
        "options__deadline_s": 100.0,
        "options__num_epochs": 30,
    }
    quote = quoted(asking, **changes)
    assert quote["verdict"] == "refused"
    fewer = next(offer for offer in quote["alternatives"] if offer["change"].startswith("--epochs"))
    kept = {**changes, "options__num_epochs": fewer["options"]["num_epochs"]}
    kept["options__batch_schedule"] = [
        phase for phase in changes["options__batch_schedule"] if phase["from_epoch"] < kept["options__num_epochs"]
    ]
    assert quoted(asking, **kept)["verdict"] == "accepted"


def test_a_stream_is_quoted_by_the_sample_and_never_for_machines(asking):
    quote = quoted(asking, options__stream="clicks", options__num_samples=None, options__num_epochs=1)
    assert quote["verdict"] == "accepted"
    assert "for 1,000 samples" in quote["reason"]
    assert quote["elsewhere"][0]["verdict"] == "refused"


def test_what_earlier_runs_of_the_function_have_shown_is_known_at_submission(asking, connected):
    first = submitted(asking, **DEADLINE)["job_id"]
    connected.run_job(first)
    record = connected.view().jobs[first]
    slow = measured(record, factor=1.5)
    tell_measured(connected, first, slow, measured(record, factor=1.6))
    job = submitted(asking, **DEADLINE)
    search = connected.view().jobs[job["job_id"]].job.search
    assert len(search.earlier) == 1, "of the same configuration the newest counts"
    assert search.earlier[0].step_s == pytest.approx(1.6 * record.job.menu.options[0].step_s)
    assert job["search"]["num_earlier"] == 1
    assert quoted(asking, **DEADLINE)["search"]["num_earlier"] == 1
    assert quoted(asking, **DEADLINE, name="renamed")["search"]["num_earlier"] == 1
    other = submitted(asking, **DEADLINE, source__text="def fit(ctx):\n    return 2\n")
    assert connected.view().jobs[other["job_id"]].job.search.earlier == (), "another text is another function"


def test_a_model_of_another_size_learns_by_how_much_the_model_was_off(asking, connected):
    small = submitted(asking, **DEADLINE)["job_id"]
    connected.run_job(small)
    record = connected.view().jobs[small]
    theirs = record.job.search
    shown = measured(record, factor=1.5)
    tell_measured(connected, small, shown)
    view, service = connected.view(), connected.view().nodes[-1].functions
    mine = replace(
        theirs,
        model=replace(
            theirs.model, parameter_bytes=2 * theirs.model.parameter_bytes, sample_s=3 * theirs.model.sample_s
        ),
        earlier=(),
    )
    (told,) = earlier_measurements(view, service, mine, record.job.family)
    assert told.gradient_bytes == 2 * shown.gradient_bytes
    assert told.compute_s == pytest.approx(3 * shown.compute_s, rel=0.01)
    assert told.num_steps == shown.num_steps
    assert as_of(shown, theirs, theirs, service) is shown
    assert earlier_measurements(view, service, replace(mine, has_parameter_store=True), record.job.family) == []
    assert earlier_measurements(view, service, mine, "") == []


def test_status_and_why_tell_what_was_tried_and_the_map_comes_with_the_job_alone(asking, connected):
    job_id = submitted(asking, **DEADLINE)["job_id"]
    connected.run_job(job_id)
    record = connected.view().jobs[job_id]
    other = next(option.plan for option in record.job.menu.options if option.plan != record.runs_as.plan)
    tell_measured(
        connected, job_id, measured(record, other, factor=1.5), measured(record, record.runs_as.plan, factor=1.2)
    )
    told = asking.get(f"/v1/jobs/{job_id}").json()["search"]
    assert told["phase"] in ("searching", "settled")
    # What was measured may have had it moved on already.
    is_there = connected.view().jobs[job_id].runs_as.plan == record.runs_as.plan
    assert [one["is_running"] for one in told["tried"]] == [False, is_there]
    assert [one["is_left"] for one in told["tried"]] == [True, not is_there]
    assert told["num_left"] == 2 - is_there
    assert told["search_s"] >= 0
    assert told["model_error_fraction"] > 0
    assert told["error_fraction"] > 0
    assert told["tried"][0]["model_step_s"] > 0
    cells = {(cell["num_workers"], cell["memory_mb"]): cell for cell in told["expected"]}
    assert 20 <= len(cells) <= 400
    assert (record.runs_as.plan.num_replicas, record.runs_as.plan.stages[0].memory_mb) in cells
    assert {cell["meets_goal"] for cell in cells.values()} <= {True, False}
    everything = asking.get("/v1/status").json()["jobs"][0]["search"]
    assert everything["expected"] == []
    assert everything["tried"] == told["tried"]
    why = "\n".join(asking.get(f"/v1/workloads/{job_id}/why").json()["evidence"])
    assert "searched for: cheapest that makes the deadline, among 1..16 workers of" in why
    assert "measured 2 configurations" in why
    assert "ways from cheap to fast" not in why


def test_the_batch_of_the_moment_and_the_next_one_are_told(asking, connected):
    schedule = [{"from_epoch": 1, "global_batch_size": 128}]
    job_id = submitted(asking, **DEADLINE, options__batch_schedule=schedule)["job_id"]
    connected.run_job(job_id)
    why = "\n".join(asking.get(f"/v1/workloads/{job_id}/why").json()["evidence"])
    assert "a step has 64 samples in epoch 0, 128 from epoch 1 on" in why


def test_a_stream_says_how_many_samples_wait_and_that_idling_is_free(asking, connected):
    changes = {"options__stream": "clicks", "options__num_samples": None, "options__num_epochs": 1}
    job_id = submitted(asking, **changes)["job_id"]
    connected.run_job(job_id)
    record = connected.view().jobs[job_id]
    connected.submit(
        ProgressReported(
            job_id=job_id,
            generation=record.group.generation,
            step=10,
            total_steps=0,
            world_size=2,
            global_batch_size=64,
        )
    )
    stream = StreamView(name="clicks", num_samples=677, arrivals_per_s=1.25)
    connected.submit(StreamObserved(job_id=job_id, stream=stream))
    connected.runs[job_id] = FunctionRunStatus(
        service="emulator", plan=record.runs_as.plan, idle_reason="waits for data of 'clicks' (37 of 64 samples)"
    )
    told = asking.get(f"/v1/jobs/{job_id}").json()["stream"]
    assert (told["num_waiting"], told["num_used"], told["is_idle"]) == (37, 640, True)
    why = "\n".join(asking.get(f"/v1/workloads/{job_id}/why").json()["evidence"])
    assert "37 samples of 'clicks' wait, 640 were used, 1.25 a second arrive" in why
    assert "idle: no function runs and nothing is charged" in why
    connected.submit(StreamObserved(job_id=job_id, stream=replace(stream, num_samples=700, is_closed=True)))
    connected.runs.pop(job_id)
    closed = asking.get(f"/v1/jobs/{job_id}").json()["stream"]
    assert (closed["num_waiting"], closed["is_closed"], closed["is_idle"]) == (60, True, False)


def test_figures_count_searches_and_what_waits(asking, connected):
    assert "springtide_search_" not in asking.get("/metrics").text
    job_id = submitted(asking, **DEADLINE)["job_id"]
    connected.run_job(job_id)
    record = connected.view().jobs[job_id]
    other = next(option.plan for option in record.job.menu.options if option.plan != record.runs_as.plan)
    tell_measured(
        connected,
        job_id,
        measured(record, other, num_steps=4, usd=0.5),
        measured(record, record.runs_as.plan, usd=0.25),
    )
    changes = {"options__stream": "clicks", "options__num_samples": None, "options__num_epochs": 1}
    stream_id = submitted(asking, **changes)["job_id"]
    stream = StreamView(name="clicks", num_samples=37, arrivals_per_s=1.5)
    connected.submit(StreamObserved(job_id=stream_id, stream=stream))
    plan = connected.view().jobs[stream_id].job.menu.options[0].plan
    connected.runs[stream_id] = FunctionRunStatus(service="emulator", plan=plan, idle_reason="waits for data")
    figures = asking.get("/metrics").text
    assert "springtide_search_jobs 2.0" in figures
    assert "springtide_search_configurations 2.0" in figures
    assert "springtide_search_dollars 1.0" in figures
    assert "springtide_stream_waiting_samples 37.0" in figures
    assert "springtide_stream_idle_jobs 1.0" in figures
    assert job_id not in figures


def test_points_over_time_hold_functions_memory_batch_and_cost(asking, connected):
    job_id = submitted(asking, **DEADLINE)["job_id"]
    connected.run_job(job_id)
    record = connected.view().jobs[job_id]
    connected.submit(UsageReported(job_id=job_id, usage=Usage(), bill=Bill(function_usd=0.125)))
    connected.submit(
        ProgressReported(
            job_id=job_id,
            generation=record.group.generation,
            step=3,
            total_steps=72,
            world_size=5,
            global_batch_size=64,
            samples_per_s=80.0,
        )
    )  # fmt: skip
    point = asking.get(f"/v1/jobs/{job_id}/series").json()["points"][-1]
    assert (point["num_workers"], point["global_batch_size"], point["samples_per_s"]) == (5, 64, 80.0)
    assert point["memory_mb"] == record.runs_as.plan.memory_mb
    assert point["cost_usd"] == 0.125


def test_a_search_is_told_after_its_end_and_without_its_service(asking, connected):
    job_id = submitted(asking, **DEADLINE)["job_id"]
    connected.run_job(job_id)
    record = connected.view().jobs[job_id]
    tell_measured(connected, job_id, measured(record))
    asking.post(f"/v1/jobs/{job_id}/cancel", json={})
    connected.stop_replicas(job_id)
    record = connected.view().jobs[job_id]
    told = search_status(record, connected.view().nodes[-1].functions, 200.0, with_map=True)
    assert told.phase == "over"
    assert told.expected
    alone = search_status(record, None, 200.0, with_map=True)
    assert alone.expected == ()
    assert alone.tried[0].step_s == told.tried[0].step_s
    assert alone.tried[0].model_step_s is None


def test_the_cost_of_searching_is_what_other_steps_took_beyond_the_best(asking, connected):
    job_id = submitted(asking, **DEADLINE)["job_id"]
    record = connected.view().jobs[job_id]
    plans = [option.plan for option in record.job.menu.options[:3]]
    base = record.job.menu.options[0].step_s
    shown = [
        measured(record, plans[0], factor=1.0, num_steps=4, usd=3.0),
        measured(record, plans[1], factor=2.0, num_steps=5, usd=1.0),
        measured(record, plans[2], factor=3.0, num_steps=6, usd=2.0),
    ]
    seconds, usd = excess_of(shown, record.job.goal)
    assert usd == pytest.approx(4 * (3.0 - 1.0)), "for a deadline the cheapest is the best; the newest was not left"
    assert seconds == 0.0
    fastest = replace(record.job.goal, deadline_s=None, is_fastest=True)
    seconds, usd = excess_of(shown, fastest)
    assert seconds == pytest.approx(5 * 1.0 * base)
    assert usd == 0.0
    apart = [shown[0], replace(shown[1], global_batch_size=128)]
    assert excess_of(apart, fastest) == (0.0, 0.0), "another batch is another question"
    assert [one.is_left for one in tried_of(apart, record.job.search, None, plans[1])] == [False, False]
    assert excess_of([], fastest) == (0.0, 0.0)


def test_why_it_came_to_its_plan_is_told_as_long_as_its_reason_is_about_that():
    plan, other = (
        FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=1, memory_mb=size),), num_replicas=1)
        for size in (512, 1024)
    )
    change = GroupChange(code="plan", why="tries it", chosen=ChosenPlan(plan=plan, why="tries it (2 of 10)"))
    plain = JobRecord(
        job=TrainingJob(job_id="a", name="a", entrypoint=Entrypoint(source_path="a.py")),
        bounds=JobBounds(min_workers=1, max_workers=1),
        lifecycle=Lifecycle(state=JobState.RUNNING, reason=StateReason(change.text(), change), submitted_at_s=0.0),
    )
    assert decided_why(plain, plan) == "tries it (2 of 10)"
    assert decided_why(plain, other) == ""
    stopping = replace(plain, lifecycle=replace(plain.lifecycle, reason=StateReason("stopping")))
    assert decided_why(stopping, plan) == ""
