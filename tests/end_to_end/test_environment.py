"""The environment of workloads on a real platform: variables before the file is imported, and where values are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("environment")]

# What is there when the file is imported is what libraries see that read their settings then.
TRAINING = """
import os
AT_IMPORT = os.environ.get("HF_HOME")
import torch


def fit(ctx):
    print("at import", AT_IMPORT, "in the function", os.environ["HF_HOME"])
    model, _ = ctx.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for batch in ctx.batches((torch.ones(32, 2), torch.ones(32, 1))):
        ctx.step(((model(batch.x) - batch.y) ** 2).mean())
"""
SCRIPT = """
import os
print("a script sees", os.environ["HF_HOME"], os.environ["RANK"])
"""
SERVICE = """
import os
AT_IMPORT = os.environ.get("HF_HOME")


class Teller:
    def predict(self, word: str) -> str:
        return f"{word} {AT_IMPORT}"
"""
VALUE = "/a/place/of-my-own"


def logs_of(live: LivePlatform, workload_id: str) -> str:
    return "".join(path.read_text() for path in live.workload(workload_id).glob("logs/*.log"))


def script(live: LivePlatform, name: str, text: str, **options: object) -> str:
    source = {"filename": "job.py", "text": text, "kind": "script"}
    return str(live.request("POST", "/v1/jobs", {"name": name, "source": source, "options": options})["job_id"])


def test_functions_scripts_and_services_get_their_variables(standing: LivePlatform) -> None:
    env = {"HF_HOME": VALUE}
    job_id = standing.submit("function", text=TRAINING, env=env, max_workers=1)
    script_id = script(standing, "script", SCRIPT, env=env)
    source = {"filename": "serve.py", "text": SERVICE, "object_name": "Teller", "kind": "class"}
    standing.request("PUT", "/v1/services/teller", {"source": source, "options": {"env": env, "min_replicas": 1}})
    assert standing.wait_job(job_id)["state"] == "SUCCEEDED"
    assert standing.wait_job(script_id)["state"] == "SUCCEEDED"
    assert f"at import {VALUE} in the function {VALUE}" in logs_of(standing, job_id)
    assert f"a script sees {VALUE} 0" in logs_of(standing, script_id)
    assert standing.request("POST", "/f/teller", {"word": "it is"})["outputs"] == f"it is {VALUE}"
    # Another job of the same zygote has none of them.
    other_id = script(standing, "other", "import os\nprint('here', os.environ.get('HF_HOME'))\n")
    assert standing.wait_job(other_id)["state"] == "SUCCEEDED"
    assert "here None" in logs_of(standing, other_id)
    # A changed variable is a new revision, and the same request is none.
    for value, revision in ((VALUE, 1), ("/elsewhere", 2)):
        options = {"env": {"HF_HOME": value}, "min_replicas": 1}
        answer = standing.request("PUT", "/v1/services/teller", {"source": source, "options": options})
        assert answer["revision"] == revision


def test_names_are_told_and_values_are_not(standing: LivePlatform) -> None:
    job_id = script(standing, "quiet", "import time\ntime.sleep(60)\n", env={"TRACKER_URL": VALUE})
    standing.wait_job(job_id, states=("RUNNING",))
    wait_for(lambda: bool(standing.worker_pids()), 20.0, "its worker")
    told = [
        standing.request("GET", path) for path in (f"/v1/jobs/{job_id}", "/v1/status", f"/v1/workloads/{job_id}/why")
    ]
    assert told[0]["env"] == ["TRACKER_URL"]
    assert "its workers' environment has TRACKER_URL" in told[2]["evidence"]
    assert VALUE not in json.dumps(told)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert VALUE.encode() not in path.read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    standing.request("POST", f"/v1/jobs/{job_id}/cancel")


def test_what_the_platform_sets_is_refused(standing: LivePlatform) -> None:
    assert standing.http is not None
    source = {"filename": "job.py", "text": SCRIPT, "kind": "script"}
    for options, sentence in (
        ({"env": {"RANK": "7"}}, "options.env cannot set RANK: the platform sets it"),
        ({"env": {"A B": "7"}}, "which is no name of a variable"),
    ):
        answer = standing.http.post("/v1/jobs", json={"name": "x", "source": source, "options": options})
        assert answer.status_code == 422
        assert sentence in answer.json()["error"]["message"]
