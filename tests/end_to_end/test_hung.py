"""Workloads that hang on real processes: each is named, and what its owner wanted happens."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kits.end_to_end.live_platform import ECHO, TINY, LivePlatform, assert_exactly_once, ended_after, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Hangs at its fourth step, the first time only where `once` names a file.
SLEEPER = """
import os, time, torch
torch.manual_seed(7)
X = torch.randn(96, 6)
Y = X @ torch.randn(6, 1)
def fit(ctx):
    model, _ = ctx.prepare(torch.nn.Linear(6, 1), lambda p: torch.optim.SGD(p, lr=0.01))
    for batch in ctx.batches((X, Y)):
        if ctx.step_number == 4 and not os.path.exists(ctx.params["mark"]):
            if ctx.params.get("once"):
                open(ctx.params["mark"], "w").close()
            time.sleep(3600)
        ctx.step(torch.nn.functional.mse_loss(model(batch.x), batch.y))
"""


@pytest.fixture
def live(tmp_path):
    with ended_after(LivePlatform(tmp_path / "state")) as platform:
        platform.start()
        yield platform


def is_stalled(live: LivePlatform, job_id: str) -> bool:
    return live.job(job_id)["stalled_since_s"] is not None


def test_a_job_that_sleeps_is_named_and_its_owner_decides(live: LivePlatform, tmp_path) -> None:
    mark = str(tmp_path / "woken")
    options = {"text": SLEEPER, "stall_timeout_s": 2.0, "max_workers": 1}
    reported = live.submit("reported", params={"mark": mark}, **options)
    failed = live.submit("failed", params={"mark": mark}, on_stall="fail", **options)
    again = live.submit(
        "again",
        params={"mark": f"{mark}.again", "once": "1"},
        on_stall="restart",
        checkpoint_interval_s=0.05,
        **options,
    )
    assert live.wait_job(failed)["state"] == "FAILED"
    assert live.job(failed)["reason"] == "no step for more than 2.0 s, the last was 4 of 18"
    status = live.wait_job(again)
    assert (status["state"], status["num_restarts"]) == ("SUCCEEDED", 1), status
    assert_exactly_once(live.workload(again), num_samples=96, batch=16, num_epochs=3)
    wait_for(lambda: is_stalled(live, reported), 20.0, "the stall to be noted")
    assert live.job(reported)["state"] == "RUNNING"
    why = live.request("GET", f"/v1/workloads/{reported}/why")
    assert any("what it may go without one (stall_timeout)" in line for line in why["evidence"]), why
    metrics = live.http.get("/metrics").text
    assert "springtide_jobs_stalled 1.0" in metrics
    assert "springtide_job_stalls_total 3.0" in metrics


def test_the_time_without_a_control_plane_is_no_stall(live: LivePlatform, tmp_path) -> None:
    options = {"text": SLEEPER, "stall_timeout_s": 6.0, "on_stall": "fail", "max_workers": 1}
    job_id = live.submit("sleeper", params={"mark": str(tmp_path / "woken")}, **options)
    wait_for(lambda: live.job(job_id)["step"] == 4, 30.0, "the job to hang")
    live.kill()
    time.sleep(8.0)
    live.start()
    back_s = live.request("GET", "/v1/status")["now_s"]
    status = live.wait_job(job_id)
    assert status["state"] == "FAILED"
    assert status["ended_at_s"] > back_s + 3.0, "all of its time began anew"


def deploy(live: LivePlatform, text: str, **options) -> None:
    source = {"filename": "echo.py", "text": text, "object_name": "Echo", "kind": "class"}
    live.request("PUT", "/v1/services/echo", {"source": source, "options": {"min_replicas": 1, **options}})


def test_a_version_that_hangs_in_load_is_rolled_back(live: LivePlatform) -> None:
    deploy(live, ECHO)
    assert live.request("POST", "/f/echo", {"numbers": [1.0]})["outputs"] == [2.0]
    hangs = ECHO.replace("2 *", "3 *") + "    def load(self):\n        import time\n        time.sleep(3600)\n"
    deploy(live, hangs, start_timeout_s=3.0)
    # The version before answers all the time.
    assert live.request("POST", "/f/echo", {"numbers": [1.0]})["outputs"] == [2.0]
    wait_for(lambda: live.request("GET", "/v1/services/echo")["rolled_back"], 30.0, "the version to be rolled back")
    assert live.request("POST", "/f/echo", {"numbers": [1.0]})["outputs"] == [2.0]
    service = live.request("GET", "/v1/services/echo")
    assert service["revision"] == 1
    assert service["rolled_back"] == "revision 2 was rolled back: echo.1 was not ready within 3.0 s"
    assert service["reason"] == f"1 of 1 replicas ready; {service['rolled_back']}"
    assert "springtide_start_timeouts_total 1.0" in live.http.get("/metrics").text


def test_a_job_whose_import_hangs_fails_and_gives_its_device_back(live: LivePlatform) -> None:
    job_id = live.submit("stuck", text="import time\ntime.sleep(3600)\n" + TINY, start_timeout_s=3.0, max_restarts=1)
    status = live.wait_job(job_id)
    assert status["state"] == "FAILED"
    assert "crashed 2 times in 10 minutes: its first step has not come within 3.0 s" in status["reason"]
    wait_for(lambda: not live.job(job_id)["replicas"], 30.0, "its workers to be gone")
    assert live.wait_job(live.submit("after", start_timeout_s=0.0))["state"] == "SUCCEEDED"


def test_a_loss_that_is_no_number_ends_the_job_where_its_owner_wants_that(live: LivePlatform) -> None:
    # The gradient stays finite, so that only one loss of many is not, between two reports.
    once = TINY.replace("batch.y))", "batch.y) + (float('nan') if ctx.step_number == 6 else 0.0))")
    fails = live.submit("fails", text=once, on_nan="fail", num_epochs=50)
    status = live.wait_job(fails)
    assert (status["state"], status["reason"]) == ("FAILED", "its loss was not a finite number at step 7 (on_nan=fail)")
    assert live.wait_job(live.submit("reports", text=once))["state"] == "SUCCEEDED"


def test_the_queue_of_an_owner_is_bounded_and_loses_nothing(tmp_path) -> None:
    with ended_after(LivePlatform(tmp_path / "state", slots=1)) as live:
        live.start(options=("--max-unfinished", "3"))
        source = {"filename": "job.py", "text": SLEEPER, "object_name": "fit", "kind": "function"}
        options = {"global_batch_size": 16, "params": {"mark": str(tmp_path / "mark")}}

        def submit(number: int):
            body = {"name": "many", "source": source, "options": options}
            return live.http.post("/v1/jobs", json=body, headers={"Idempotency-Key": f"key-{number}"})

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(submit, range(12)))
        accepted = [number for number, answer in enumerate(answers) if answer.status_code == 201]
        assert sorted({answer.status_code for answer in answers}) == [201, 429]
        assert len(accepted) == 3
        refused = next(answer for answer in answers if answer.status_code == 429).json()["error"]
        assert refused["code"] == "too_many_unfinished"
        assert "3 jobs and services are unfinished, and at most 3 may be (max_unfinished)" in refused["message"]
        ids = {answers[number].json()["job_id"] for number in accepted}
        live.kill()
        live.start(options=("--max-unfinished", "3"))
        assert {job["job_id"] for job in live.request("GET", "/v1/jobs")} == ids
        assert submit(accepted[0]).status_code == 200, "the same request again is no further job"
        echo = {"source": {"filename": "e.py", "text": ECHO, "object_name": "Echo", "kind": "class"}, "options": {}}
        assert live.http.put("/v1/services/echo", json=echo).status_code == 429
        live.request("POST", f"/v1/jobs/{min(ids)}/cancel")
        live.wait_job(min(ids))
        assert live.http.put("/v1/services/echo", json=echo).status_code == 200
        assert submit(99).status_code == 429
        assert live.http.put("/v1/services/echo", json=echo).status_code == 200, "a new version is no further service"
