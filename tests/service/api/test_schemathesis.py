"""Requests that schemathesis draws from the API's own description, with all of its checks, on a real platform."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kits.end_to_end.live_platform import PATIENCE_S, LivePlatform, wait_for
from kits.simulation.sweeps import STRIDE, only_in_full
from springtide.storage.datasets.cut import checked_arrays, cut

COUNT = """
class Count:
    def predict(self, numbers: list[float]) -> int:
        return len(numbers)
"""
TESTS = Path(__file__).parents[2]
# A platform that is played for its whole life: `make full` draws more.
NUM_EXAMPLES = 30 if STRIDE == 1 else 8
CONFIG = """
seed = 26
request-timeout = 40
continue-on-failure = true
max-stream-events = 1
# One that the platform has; of names the hooks take some that it has.
parameters = {{ "path.id" = "{job_id}" }}
hooks = "kits.service.schemathesis_hooks"

[generation]
max-examples = {num_examples}
database = "none"
"""
# A valid one ends the platform: it comes last, in a run of its own.
SHUTDOWN = "/v1/shutdown"
NOT_YET = f"""
[[operations]]
include-path = "{SHUTDOWN}"
generation.mode = "negative"
phases.examples.enabled = false
phases.stateful.enabled = false
"""


@pytest.fixture(params=["machines", pytest.param("functions", marks=only_in_full)])
def platform(request, tmp_path):
    live = LivePlatform(tmp_path / "state", slots=2)
    options = ()
    if request.param == "functions":
        settings = tmp_path / "settings.json"
        settings.write_text('{"provider": "emulator"}')
        options = ("--functions", str(settings))
    live.start(options=options)
    try:
        yield live
    finally:
        live.stop()


def prepared_job(platform):
    job_id = platform.submit("seen", num_epochs=1, max_workers=1)
    assert platform.wait_job(job_id)["state"] == "SUCCEEDED"
    return job_id


def deploy_count(platform):
    source = {"filename": "count.py", "text": COUNT, "object_name": "Count", "kind": "class"}
    options = {"min_replicas": 1, "max_replicas": 1}
    platform.request("PUT", "/v1/services/count", {"source": source, "options": options})


def closed_dataset(platform):
    """A dataset to which nothing can be appended any more; returns the digest of its shard."""
    ((frame, count),) = cut(checked_arrays({"x": np.arange(8, dtype="float32")}))
    sha256 = hashlib.sha256(frame).hexdigest()
    answer = platform.http.put(f"/v1/data/points/shards/{sha256}", content=frame)
    assert answer.status_code == 200, answer.text
    arrays = [{"name": "x", "dtype": "F32", "shape": []}]
    shards = [[sha256, count, len(frame)]]
    platform.request("POST", "/v1/data/points", {"verb": "append", "part_id": "a", "arrays": arrays, "shards": shards})
    platform.request("POST", "/v1/data/points", {"verb": "close", "part_id": "b"})
    return sha256


def run_schemathesis(platform, config, sha256, *options):
    url = str(platform.http.base_url)
    return subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{url}/openapi.json"),
            *("--url", url, "-H", f"Authorization: {platform.http.headers['authorization']}", "--checks", "all"),
            *options,
        ],
        cwd=config.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS), "NO_COLOR": "1", "KNOWN_NAME": "points", "KNOWN_SHA256": sha256},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_drawn_from_the_description_meets_all_checks(platform, tmp_path):
    job_id = prepared_job(platform)
    deploy_count(platform)
    wait_for(lambda: platform.http.post("/f/count", json={"numbers": [1]}).status_code == 200, PATIENCE_S, "an answer")
    sha256 = closed_dataset(platform)
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG.format(job_id=job_id, num_examples=NUM_EXAMPLES) + NOT_YET)
    ran = run_schemathesis(platform, config, sha256)
    assert ran.returncode == 0, ran.stdout[-20_000:]
    assert platform.is_alive
    config.write_text(CONFIG.format(job_id=job_id, num_examples=1))
    ran = run_schemathesis(platform, config, sha256, "--include-path", SHUTDOWN, "--phases", "examples")
    assert ran.returncode == 0, ran.stdout[-20_000:]
    wait_for(lambda: not platform.is_alive, PATIENCE_S, "the platform to end")
    assert "Traceback" not in platform.log()
