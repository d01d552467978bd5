"""The quote over HTTP: from the live state, with the platform's own policy, and the same verdict as a submission."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from kits.control.quoting import Reserving, training_job
from kits.service.api_fixtures import HEADERS, TOKEN, job_body
from kits.service.platform_double import PlatformDouble
from springtide.core.errors import CapacityError
from springtide.core.events import JobFinished, JobSubmitted, ProgressReported
from springtide.core.status.export import LiveState
from springtide.core.status.quote import Quote
from springtide.service.api.application import build_api
from springtide.service.export import live_state
from springtide.service.quotes import quote as quote_module
from springtide.service.quotes.quote import LiveQuotes
from springtide.service.submission.experience import (
    FITTED_SPREAD,
    MEASURED_SPREAD,
    Experience,
    declared_steps,
    exact_evidence,
    experience_of,
)
from springtide.service.submission.option_models import JobOptionsIn
from springtide.service.submission.schemas import JobIn


def known_body(**changes):
    """A job of 600 steps that takes ten minutes on one worker."""
    options = {"num_samples": 64 * 200, "num_epochs": 3, "profile_steps_per_s": {"1": 1.0, "2": 1.8, "4": 3.0}}
    return job_body(**{f"options__{name}": value for name, value in {**options, **changes}.items()})


@pytest.fixture
def promising(tmp_path):
    return PlatformDouble(tmp_path, num_devices=4, policy=Reserving)


@pytest.fixture
def asking(promising):
    app = build_api(promising, token=TOKEN, registry=CollectorRegistry())
    with TestClient(app, base_url="http://127.0.0.1:8787", headers=HEADERS, raise_server_exceptions=False) as client:
        yield client


def ask(http, body):
    answer = http.post("/v1/quote", json=body)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=Quote)


@pytest.mark.parametrize(("library", "mend"), [("", "have it call springtide.report"), ("accelerate", "run it once")])
def test_only_a_plain_script_of_unknown_length_has_to_report_it(asking, library, mend):
    body = job_body(options__min_workers=1, options__max_workers=2 if library else 1)
    body["source"] = {"filename": "train.py", "text": "print(1)", "kind": "script", "library": library}
    body["options"] = {name: body["options"][name] for name in ("min_workers", "max_workers")}
    told = ask(asking, body).reason
    assert mend in told
    assert ("springtide.report" in told) == (not library)


def test_the_answer_has_the_keys_that_scripts_read(asking):
    answer = asking.post("/v1/quote", json=known_body(deadline_s=400)).json()
    assert answer["verdict"] == "accepted"
    assert answer["is_promised"]
    assert answer["workers"] == 2
    assert answer["minimum_share"] == 2
    assert set(answer["finish_s"]) == {"p10", "p90"}
    # 333 s on two devices at 0.36 dollars an hour.
    assert answer["cost_usd"]["p90"] == pytest.approx(1.1 * 2 * (600 / 1.8) / 3600 * 0.36)
    assert answer["policy"] == "arrival-order"


def test_a_refusal_has_alternatives_that_a_submission_confirms(asking, promising):
    refused = ask(asking, known_body(deadline_s=150, max_workers=4))
    assert refused.verdict == "refused"
    assert {offer.change for offer in refused.alternatives} >= {"--best-effort"}
    for number, offer in enumerate(refused.alternatives):
        if offer.num_devices is not None:
            continue
        body = known_body(**{"deadline_s": 150, "max_workers": 4, **offer.options})
        body["name"] = f"offer-{number}"
        job = asking.post("/v1/jobs", json=body).json()
        assert job["state"] != "REJECTED", offer.change
        assert asking.post(f"/v1/jobs/{job['job_id']}/cancel").status_code == 200
        promising.stop_replicas(job["job_id"])


@pytest.mark.parametrize("deadline_s", [150, 199, 205, 400, 1000])
def test_the_quote_and_the_submission_say_the_same(asking, deadline_s):
    body = known_body(deadline_s=deadline_s, max_workers=4)
    quoted = ask(asking, body)
    job = asking.post("/v1/jobs", json=body).json()
    assert (quoted.verdict == "refused") == (job["state"] == "REJECTED")
    if quoted.verdict == "refused":
        why = asking.get(f"/v1/workloads/{job['job_id']}/why").json()
        assert why["reason"] in "".join(quoted.evidence)


def test_why_of_a_refused_job_names_what_would_be_accepted_now(asking):
    job = asking.post("/v1/jobs", json=known_body(deadline_s=150, max_workers=4)).json()
    why = asking.get(f"/v1/workloads/{job['job_id']}/why").json()
    assert why["state"] == "REJECTED"
    assert "--best-effort" in why["next_steps"]
    assert any(step.startswith("--deadline ") for step in why["next_steps"])


def test_why_says_so_if_the_same_would_be_accepted_now(asking, promising):
    full = asking.post("/v1/jobs", json=known_body(deadline_s=250, max_workers=4)).json()
    refused = asking.post("/v1/jobs", json={**known_body(deadline_s=250, max_workers=4), "name": "late"}).json()
    assert refused["state"] == "REJECTED"
    asking.post(f"/v1/jobs/{full['job_id']}/cancel")
    promising.stop_replicas(full["job_id"])
    why = asking.get(f"/v1/workloads/{refused['job_id']}/why").json()
    assert why["next_steps"] == ["submit it again: now it would be accepted"]


def test_asking_changes_nothing(asking, promising):
    before = promising.current.seq
    ask(asking, known_body(deadline_s=400))
    assert promising.current.seq == before
    assert not promising.current.jobs
    assert not (promising.state_dir / "workloads").exists()


def test_what_was_never_run_is_not_known(asking):
    quoted = ask(asking, job_body())
    assert quoted.verdict == "accepted"
    assert quoted.finish_s.p90 is None
    assert quoted.speed_source == "unknown"
    assert "--profile" in quoted.reason


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"options__profile_steps_per_s": {"0": 1.0}}, "profile_steps_per_s"),
        ({"options__profile_steps_per_s": {"1": 0.0}}, "profile_steps_per_s"),
        ({"options__num_samples": 0}, "num_samples"),
        ({"source__text": "def ("}, "not valid Python"),
        ({"name": "NO"}, "name"),
    ],
)
def test_what_cannot_be_asked_is_said(asking, changes, sentence):
    answer = asking.post("/v1/quote", json=job_body(**changes))
    assert answer.status_code == 422
    assert sentence in answer.json()["error"]["message"]


NEIGHBOUR = "from model import build\n\n\ndef fit(ctx):\n    return build()\n"


def report_speed(promising, job_id, rate, *, count=1, steps=600):
    """Play a worker's report; returns the speed that is planned with on so many workers (samples/s)."""
    promising.play(
        ProgressReported(
            job_id=job_id,
            generation=promising.current.jobs[job_id].group.generation,
            step=10,
            total_steps=steps,
            world_size=count,
            samples_per_s=rate,
        )
    )
    return promising.current.jobs[job_id].learnt.throughput_samples_per_s[count]


def run_once(asking, promising, *, workers=(1, 2), rates=(640.0, 1000.0), steps=600, end=True, **changes):
    """Submit a job and play what its workers report, on each number of workers in turn."""
    job = asking.post("/v1/jobs", json=job_body(**changes)).json()
    promising.run_job(job["job_id"])
    for count, rate in zip(workers, rates, strict=True):
        promising.clock_s += 5.0
        report_speed(promising, job["job_id"], rate, count=count, steps=steps)
    if end:
        asking.post(f"/v1/jobs/{job['job_id']}/cancel")
        promising.stop_replicas(job["job_id"])
    return job["job_id"]


def test_earlier_runs_of_the_same_code_tell_length_and_speed(asking, promising):
    run_once(asking, promising)
    quoted = ask(asking, job_body(options__deadline_s=None, options__max_workers=1))
    assert quoted.speed_source == "history of 1 run"
    # 600 steps of 64 samples at 640 samples/s, told at the slow end of what was measured.
    assert quoted.finish_s.p90 == pytest.approx(60 * 1.1)
    assert quoted.finish_s.p10 == pytest.approx(60 / 1.1)


def test_a_submission_knows_what_earlier_runs_tell(asking, promising):
    run_once(asking, promising)
    job_id = asking.post("/v1/jobs", json=job_body(options__num_epochs=6)).json()["job_id"]
    job = promising.current.jobs[job_id].job
    assert job.total_steps == 1200
    assert job.profile_steps_per_s[1] == pytest.approx(10 / 1.1)
    assert promising.current.jobs[job_id].promise.admitted_at_s is not None


def test_the_first_slow_steps_count_for_the_time_that_they_took(asking, promising):
    """A promise rests on more than the first second of training: new processes begin slowly."""
    run_once(asking, promising)
    job_id = asking.post("/v1/jobs", json=job_body(options__max_workers=1)).json()["job_id"]
    job = promising.current.jobs[job_id].job
    profiled = job.profile_steps_per_s[1] * job.global_batch_size
    promising.run_job(job_id)
    resized_at_s = promising.current.jobs[job_id].changes.resized_at_s
    for since_s in (1.0, 3.0, 4.0):
        promising.clock_s = resized_at_s + since_s
        known = since_s / 4.0
        assert report_speed(promising, job_id, 80.0) == pytest.approx(known * 80.0 + (1.0 - known) * profiled)


def test_a_confidence_is_said_and_planned_with(asking, promising):
    run_once(asking, promising)
    plain = ask(asking, job_body(options__deadline_s=600.0))
    assert plain.probability > 0.99
    assert plain.confidence is None
    job_id = asking.post("/v1/jobs", json=job_body(options__confidence=0.6)).json()["job_id"]
    job = promising.current.jobs[job_id].job
    # The median of what was measured is about as probable as that; by convention it is told a tenth slower.
    assert 10 / 1.05 < job.profile_steps_per_s[1] < 10
    assert job.confidence == 0.6
    sure = ask(asking, job_body(options__confidence=0.999, options__deadline_s=65.0, options__max_workers=1))
    assert (sure.verdict, sure.confidence) == ("refused", 0.999)
    assert asking.post("/v1/quote", json=job_body(options__confidence=1.5)).status_code == 422


def test_the_same_code_is_that_of_the_same_syntax_tree(asking, promising):
    run_once(asking, promising)
    text = f"# A comment.\nimport os\n\n{job_body()['source']['text']}"
    assert ask(asking, job_body(source__text=text)).speed_source == "history of 1 run"


@pytest.mark.parametrize(
    "changes",
    [
        {"source__text": "def fit(ctx):\n    return 1\n"},
        {"options__params": {"width": "96"}},
        {"options__global_batch_size": 32},
        {"source__object_name": "other"},
        {"options__share": {"request": 0.5}},
        {"source__files": {"model.py": "def build():\n    return 1\n"}, "source__text": NEIGHBOUR},
    ],
)
def test_other_code_tells_nothing(asking, promising, changes):
    run_once(asking, promising)
    if "source__files" in changes:
        run_once(asking, promising, source__text=NEIGHBOUR, source__files={"model.py": "def build():\n    return 2\n"})
    assert ask(asking, job_body(**changes)).speed_source == "unknown"


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "another"},
        {"name": "another", "source__filename": "renamed.py"},
        {"name": "train", "source__object_name": "train", "source__text": "def train(ctx):\n    pass\n"},
    ],
)
def test_a_run_is_known_by_its_code_whatever_its_name(asking, promising, changes):
    first = run_once(asking, promising, source__text="def fit(ctx):\n    pass\n")
    asked = job_body(**{"source__text": "def fit(ctx):\n    pass\n", **changes})
    quoted = ask(asking, asked)
    assert quoted.speed_source == "history of 1 run"
    assert quoted.is_promised
    second = asking.post("/v1/jobs", json=asked).json()["job_id"]
    jobs = promising.current.jobs
    assert jobs[second].promise.admitted_at_s is not None
    assert jobs[second].job.family == jobs[first].job.family


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"source__text": "def fit(ctx):\n    return 1\n"}, "its code is another"),
        ({"options__params": {"width": "96"}}, "it has other values of width"),
        ({"options__global_batch_size": 32}, "its global batch is 64"),
        ({"options__num_virtual_shards": 16}, "it is not exact with as many shards"),
        ({"name": "another", "options__params": {"width": "96"}}, "it has other values of width"),
        ({"name": "another", "options__env": {"WIDTH": "96"}}, "its environment, its packages or the folder"),
        ({"name": "another", "source__import_root": "/"}, "its environment, its packages or the folder"),
    ],
)
def test_a_quote_says_why_a_run_tells_nothing(asking, promising, changes, told):
    first = run_once(asking, promising)
    quoted = ask(asking, job_body(**changes))
    assert quoted.speed_source == "unknown"
    assert [line for line in quoted.evidence if line.startswith(f"{first} does not count as an earlier run: {told}")]


def test_a_run_whose_parts_had_passes_of_their_own_tells_nothing_of_one_pass(asking, promising):
    bounds = {"options__batch": {"min_size": 64, "max_size": 128}}
    first = run_once(asking, promising, **bounds, options__num_virtual_shards=16)
    told = f"{first} does not count as an earlier run: it ran the parts of its batch one after another"
    assert any(line.startswith(told) for line in ask(asking, job_body(**bounds)).evidence)
    same = ask(asking, job_body(**bounds, options__num_virtual_shards=16))
    assert not any(line.startswith(told) for line in same.evidence)


def test_a_quote_says_that_no_run_is_known(asking, promising):
    run_once(asking, promising)
    changed = job_body(name="another", source__text="def fit(ctx):\n    return 1\n")
    assert "no run of this code, and none named another, is known here" in ask(asking, changed).evidence
    assert "known here" not in "".join(ask(asking, known_body(deadline_s=400)).evidence)


def test_names_tell_runs_of_one_code_with_other_parameters_apart(asking, promising):
    families = {}
    for name, width in (("wide", "9"), ("small", "1"), ("again", "9"), ("wide", "5"), ("small", "9")):
        body = job_body(name=name, options__params={"width": width}, options__deadline_s=None)
        job_id = asking.post("/v1/jobs", json=body).json()["job_id"]
        families[name, width] = promising.current.jobs[job_id].job.family
    wide, small = families["wide", "9"], families["small", "1"]
    assert wide != small, "two names with parameters of their own learn from each other"
    assert (families["again", "9"], families["small", "9"]) == (wide, wide)
    assert families["wide", "5"] == wide, "runs of one name learn from each other, whatever their parameters"
    assert [family.rpartition("-")[0] for family in (wide, small)] == ["wide", "small"]


def test_what_was_never_measured_is_less_sure(asking, promising):
    run_once(asking, promising, workers=(1,), rates=(640.0,))
    request = JobIn.model_validate(job_body(options__max_workers=2), strict=False)
    known = experience_of(promising.view(), request, promising.source_store.holds)
    assert known.spread.fast_on[1] == pytest.approx((1 + MEASURED_SPREAD) ** -2)
    assert known.spread.fast_on[2] == pytest.approx((1 + FITTED_SPREAD) ** -2)
    [told] = [line for line in ask(asking, job_body(options__max_workers=2)).evidence if line.startswith("speed (")]
    assert told.endswith("; on 2 it was never measured, and is predicted from the others")
    [told] = [line for line in ask(asking, job_body(options__max_workers=1)).evidence if line.startswith("speed (")]
    assert told.endswith("by number of workers")


def test_many_runs_tell_their_own_spread(asking, promising):
    for rate in (512.0, 640.0, 640.0, 640.0, 650.0):
        run_once(asking, promising, workers=(1,), rates=(rate,))
    request = JobIn.model_validate(job_body(options__max_workers=1), strict=False)
    known = experience_of(promising.view(), request, promising.source_store.holds)
    assert known.spread.source == "history of 5 runs"
    assert known.spread.fast_on[1] == pytest.approx(1.25**-2)
    assert known.steps_per_s[1] == pytest.approx(512.0 / 64)


def test_an_exact_job_is_not_promised_by_the_speed_of_plain_runs(asking, promising):
    run_once(asking, promising, workers=(1,), rates=(640.0,))
    known = {}
    for shards in (None, 4):
        request = JobIn.model_validate(
            job_body(options__max_workers=1, options__num_virtual_shards=shards), strict=False
        )
        known[shards] = experience_of(promising.view(), request, promising.source_store.holds)
    assert 1 in known[None].steps_per_s
    assert not known[4].steps_per_s


def test_a_run_that_went_through_tells_its_average(asking, promising):
    job_id = run_once(asking, promising, workers=(1,), rates=(6400.0,), end=False)
    promising.clock_s += 55.0
    generation = promising.current.jobs[job_id].group.generation
    promising.play(JobFinished(job_id=job_id, generation=generation, step=600))
    promising.stop_replicas(job_id)
    assert promising.current.jobs[job_id].state == "SUCCEEDED"
    # 600 steps in 60 s, whatever single steps took.
    quoted = ask(asking, job_body(options__deadline_s=None, options__max_workers=1))
    assert quoted.finish_s.p90 == pytest.approx(60 * 1.1)


def test_a_declared_length_is_counted_in_whole_batches():
    assert declared_steps(JobOptionsIn(num_samples=100, global_batch_size=64, num_epochs=3)) == 6
    assert declared_steps(JobOptionsIn()) is None


def test_a_soft_deadline_is_not_refused(asking):
    assert ask(asking, known_body(deadline_s=10, is_soft=True)).verdict == "accepted"


def test_the_export_holds_what_a_policy_is_shown_and_no_code(asking, promising):
    run_once(asking, promising, end=False)
    answer = asking.get("/v1/export")
    live = msgspec.json.decode(answer.content, type=LiveState)
    (view,) = live.snapshot.jobs
    assert view.learnt.throughput_samples_per_s == {1: 640.0, 2: 1000.0}
    assert live.snapshot.allocations[view.job.job_id].num_devices == view.num_replicas
    assert len(live.snapshot.cluster.device_ids()) == 4
    assert b"fit" not in answer.content
    assert live.usd_per_device_hour == 0.36


def test_the_live_state_leaves_parameters_and_keys_behind(asking, promising):
    asking.post("/v1/jobs", json=job_body(options__params={"secret": "s3"}), headers={"Idempotency-Key": "k3y"})
    live = live_state(promising)
    assert live.policy == "arrival-order"
    (view,) = live.snapshot.jobs
    assert (view.job.params, view.job.submit_key, view.job.entrypoint.source_path) == ({}, "", "")
    assert promising.snapshot().jobs[0].job.params == {"secret": "s3"}


def test_why_tells_when_a_waiting_job_is_expected_to_start(asking, promising):
    first = asking.post("/v1/jobs", json=known_body(deadline_s=None, max_workers=1)).json()
    bodies = [known_body(deadline_s=None, max_workers=1) for _ in range(4)]
    ids = [asking.post("/v1/jobs", json=body).json()["job_id"] for body in bodies]
    why = asking.get(f"/v1/workloads/{ids[-1]}/why").json()
    assert why["state"] == "PENDING"
    assert why["expected_start_at_s"] == pytest.approx(promising.clock_s + 600, rel=0.01)
    assert any(line.startswith("expected start in 10m") for line in why["evidence"])
    assert asking.get(f"/v1/workloads/{first['job_id']}/why").json()["expected_start_at_s"] is None


def test_why_says_when_a_start_is_not_known(asking):
    for _ in range(5):
        job_id = asking.post("/v1/jobs", json=job_body(options__deadline_s=None)).json()["job_id"]
    why = asking.get(f"/v1/workloads/{job_id}/why").json()
    assert any("it is not known" in line and "'digits'" in line for line in why["evidence"])


def test_who_asks_while_another_quote_takes_too_long_is_told_to_come_back(promising, monkeypatch):
    monkeypatch.setattr(quote_module, "MAX_WAIT_S", 0.0)
    quotes = LiveQuotes(promising)
    request = JobIn.model_validate(known_body(deadline_s=400), strict=False)
    with quotes.turn(0.0):
        with pytest.raises(CapacityError, match="ask again"):
            quotes.quote(request)
        job = promising.submit(JobSubmitted(job=training_job("a", deadline_s=1.0)))
        assert job
        assert quotes.offers(promising.current.jobs["a"]) == ()
    assert quotes.quote(request).verdict == "accepted"


def test_a_quote_names_the_measured_price_of_exact_results():
    request = JobIn.model_validate(job_body(options__num_virtual_shards=4))
    measured = Experience(exact_cost=(1.18, "fit-1"))
    assert exact_evidence(request, measured) == (
        "exact=4 costs 1.18 of a plain step's processor time (measured on fit-1)",
    )
    assert "is not known before a run has measured it" in exact_evidence(request, Experience())[0]
    assert exact_evidence(JobIn.model_validate(job_body()), measured) == ()
