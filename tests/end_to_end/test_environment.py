"""The environment of workloads on a real platform: variables before the file is imported, and where values are not."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, ended_after, wait_for
from kits.runtime.tiny_wheels import make_wheel, requirements_from

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
        assert (answer["releasing"] or answer["revision"]) == revision


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


SECRET = "hf_a-value-that-is-nowhere-else"
SECRET_JOB = """
import hashlib, os, subprocess, sys, torch

TOKEN = os.environ["HF_TOKEN"]


def fit(ctx):
    print("digest", hashlib.sha256(TOKEN.encode()).hexdigest())
    print("it is", TOKEN, file=sys.stderr)
    subprocess.run(["sh", "-c", 'echo "a program has $HF_TOKEN"'])
    model, _ = ctx.prepare(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1))
    for batch in ctx.batches((torch.ones(32, 2), torch.ones(32, 1))):
        if ctx.params.get("sleep") and ctx.step_number == 1:
            import time
            time.sleep(float(ctx.params["sleep"]))
        ctx.step(((model(batch.x) - batch.y) ** 2).mean())
    if ctx.params.get("fails"):
        raise ValueError(f"401 for {TOKEN}")
"""


def places_of(live: LivePlatform, value: str) -> list[str]:
    """The files of the state directory, and the command lines and first environments of processes, that have it."""
    found = []
    for path in live.state_dir.rglob("*"):
        if path.is_file() and value.encode() in path.read_bytes():
            found.append(str(path.relative_to(live.state_dir)))
    for path in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
        try:
            if value.encode() in path.read_bytes():
                found.append(str(path))
        except OSError:
            continue
    return found


def answers_of(live: LivePlatform, job_id: str) -> str:
    assert live.http is not None
    paths = ["/v1/status", "/v1/jobs", "/v1/export", "/v1/timeline", f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/series"]
    paths += [f"/v1/workloads/{job_id}/{part}" for part in ("why", "history", "logs")]
    return "".join(live.http.get(path).raise_for_status().text for path in paths)


@pytest.mark.parametrize("zygote", ["function", "script"])
def test_a_secret_is_nowhere_but_in_the_worker(standing: LivePlatform, zygote: str) -> None:
    secrets = {"HF_TOKEN": SECRET}
    if zygote == "function":
        job_id = standing.submit(
            "secret", text=SECRET_JOB, secrets=secrets, params={"sleep": "0.8"}, max_workers=1, key=f"key-{zygote}"
        )
    else:
        text = "import os, time\nprint('it is', os.environ['HF_TOKEN'], flush=True)\ntime.sleep(3)\n"
        job_id = script(standing, "secret", text, secrets=secrets)
    wait_for(lambda: "***HF_TOKEN***" in logs_of(standing, job_id), 30.0, "its output")
    # While it runs, the one place is the file that workers read.
    (place,) = places_of(standing, SECRET)
    assert place.startswith(f"workloads/{job_id}/secrets/")
    assert SECRET not in answers_of(standing, job_id)
    assert standing.job(job_id)["secrets"] == ["HF_TOKEN"]
    assert standing.wait_job(job_id)["state"] == "SUCCEEDED"
    wait_for(lambda: places_of(standing, SECRET) == [], 20.0, "the value to be removed at the job's end")
    assert SECRET not in answers_of(standing, job_id)
    log = logs_of(standing, job_id)
    assert "it is ***HF_TOKEN***" in log
    if zygote == "function":
        assert hashlib.sha256(SECRET.encode()).hexdigest() in log
        assert "a program has ***HF_TOKEN***" in log


def test_an_error_with_a_secret_in_it_is_told_without(standing: LivePlatform) -> None:
    options = {"secrets": {"HF_TOKEN": SECRET}, "params": {"fails": "1"}, "max_workers": 1}
    job_id = standing.submit("fails", text=SECRET_JOB, **options)
    ended = standing.wait_job(job_id)
    assert ended["state"] == "FAILED"
    assert "401 for ***HF_TOKEN***" in ended["reason"]
    wait_for(lambda: places_of(standing, SECRET) == [], 20.0, "the value to be removed at the job's end")


def test_a_service_keeps_its_secrets_until_another_revision_is_ready(standing: LivePlatform) -> None:
    source = {"filename": "serve.py", "text": SERVICE.replace("HF_HOME", "HF_TOKEN"), "object_name": "Teller"}

    def deploy(value: str) -> int:
        options = {"secrets": {"HF_TOKEN": value}, "min_replicas": 1}
        told = standing.request("PUT", "/v1/services/safe", {"source": source, "options": options})
        return int(told["releasing"] or told["revision"])

    def says() -> str:
        return str(standing.request("POST", "/f/safe", {"word": "it is"})["outputs"])

    assert deploy(SECRET) == 1
    assert says() == f"it is {SECRET}"
    assert deploy(SECRET) == 1
    assert deploy("another-value") == 2
    wait_for(lambda: says() == "it is another-value", 30.0, "the new revision")
    standing.request("DELETE", "/v1/services/safe")
    wait_for(lambda: places_of(standing, "another-value") == [], 20.0, "the values to be removed with the service")
    assert places_of(standing, SECRET) == []


def test_a_restarted_platform_and_worker_have_the_secret_still(tmp_path: Path) -> None:
    with ended_after(LivePlatform(tmp_path / "state")) as live:
        live.start()
        options = {"secrets": {"HF_TOKEN": SECRET}, "params": {"sleep": "2"}, "max_workers": 1}
        job_id = live.submit("again", text=SECRET_JOB, checkpoint_interval_s=0.05, **options)
        wait_for(lambda: "digest" in logs_of(live, job_id), 30.0, "its first start")
        live.kill()
        for pid in live.worker_pids().values():
            os.kill(pid, signal.SIGKILL)
        live.start()
        assert live.wait_job(job_id)["state"] == "SUCCEEDED"
        assert logs_of(live, job_id).count("it is ***HF_TOKEN***") == 2
        wait_for(lambda: places_of(live, SECRET) == [], 20.0, "the value to be removed at the job's end")
        exported = tmp_path / "journal.jsonl"
        live.stop()
        state = ("--state", str(live.state_dir))
        subprocess.run([sys.executable, "-m", "springtide", "journal", "export", str(exported), *state], check=True)
        assert b"HF_TOKEN" in exported.read_bytes()
        assert SECRET.encode() not in exported.read_bytes()


def test_a_refusal_of_a_secret_does_not_repeat_it(standing: LivePlatform) -> None:
    assert standing.http is not None
    source = {"filename": "job.py", "text": SCRIPT, "kind": "script"}
    for secrets in ({"A": 7_000_000_123}, {"RANK": SECRET}, {"A": SECRET + "\0"}, {"A": SECRET * 2000}, [SECRET]):
        body = {"name": "x", "source": source, "options": {"secrets": secrets}}
        answer = standing.http.post("/v1/jobs", json=body)
        assert answer.status_code == 422
        assert SECRET not in answer.text
        assert "7000000123" not in answer.text


PACKAGED = """
import os, sys
import tiny, torch
print("has tiny", tiny.VERSION, "and torch", torch.__version__, os.environ.get("HF_TOKEN"), flush=True)
"""
PACKAGED_JOB = PACKAGED + TRAINING.replace("HF_HOME", "PATH")


def test_workloads_have_packages_of_their_own(standing: LivePlatform, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path, "tiny", version)
    first = script(
        standing, "first", PACKAGED, requirements=requirements_from(tmp_path, "tiny==1.0"), secrets={"HF_TOKEN": SECRET}
    )
    assert standing.wait_job(first)["state"] == "SUCCEEDED"
    log = logs_of(standing, first)
    assert "making an environment: 1 package" in log
    assert f"has tiny 1.0 and torch {importlib.metadata.version('torch')} ***HF_TOKEN***" in log
    history = standing.request("GET", f"/v1/workloads/{first}/history")
    assert [entry["text"] for entry in history if entry["kind"] in ("held-up", "begun")] == [
        f"{first}.0 cannot begin yet: making an environment: 1 package",
        f"{first}.0 has begun",
    ]
    assert standing.job(first)["packages"][-1] == "tiny==1.0"
    # The same packages are there already; two workers of a training function begin at once, and a service.
    options = {"requirements": requirements_from(tmp_path, "tiny==1.0")}
    second = standing.submit("second", text=PACKAGED_JOB, min_workers=2, max_workers=2, **options)
    source = {"filename": "serve.py", "text": "import tiny\n" + SERVICE, "object_name": "Teller"}
    answer = {"source": source, "options": {"min_replicas": 1, "env": {"HF_HOME": VALUE}, **options}}
    standing.request("PUT", "/v1/services/packaged", answer)
    assert standing.wait_job(second)["state"] == "SUCCEEDED"
    assert "has tiny 1.0" in logs_of(standing, second)
    assert "making an environment" not in logs_of(standing, second)
    assert standing.request("POST", "/f/packaged", {"word": "it is"})["outputs"] == f"it is {VALUE}"
    standing.request("DELETE", "/v1/services/packaged")
    other = script(standing, "other", PACKAGED, requirements=requirements_from(tmp_path, "tiny==2.0"))
    assert standing.wait_job(other)["state"] == "SUCCEEDED"
    assert "has tiny 2.0" in logs_of(standing, other)


def test_packages_that_cannot_be_had_fail_the_job_at_once(standing: LivePlatform, tmp_path: Path) -> None:
    make_wheel(tmp_path, "tiny", "1.0", needs=("torch<2",))
    job_id = script(standing, "conflict", PACKAGED, requirements=requirements_from(tmp_path, "tiny"))
    ended = standing.wait_job(job_id)
    assert (ended["state"], ended["num_restarts"]) == ("FAILED", 0)
    assert "its packages cannot be installed: Cannot install" in ended["reason"]
    assert f"workers keep the platform's torch=={importlib.metadata.version('torch')}" in ended["reason"]


def test_a_job_whose_environment_is_being_made_says_so_and_can_be_cancelled(
    standing: LivePlatform, tmp_path: Path
) -> None:
    # An index that never answers.
    with socket.create_server(("127.0.0.1", 0)) as index:
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        job_id = script(standing, "making", PACKAGED, requirements=[f"--index-url {url}", "tiny", "other"])
        reason = "making an environment: 2 packages"
        wait_for(lambda: standing.job(job_id)["reason"] == reason, 30.0, "what it waits for")
        assert standing.job(job_id)["state"] == "STARTING"
        why = standing.request("GET", f"/v1/workloads/{job_id}/why")
        assert why["reason"] == reason
        index.settimeout(30.0)
        connection, _ = index.accept()
        standing.request("POST", f"/v1/jobs/{job_id}/cancel")
        assert standing.wait_job(job_id)["state"] == "CANCELLED"
        # pip has ended with it.
        connection.settimeout(30.0)
        while connection.recv(4096):
            pass
        connection.close()


def test_a_control_plane_that_dies_while_an_environment_is_made_finds_it_again(tmp_path: Path) -> None:
    with ended_after(LivePlatform(tmp_path / "state")) as live, socket.create_server(("127.0.0.1", 0)) as index:
        live.start()
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        make_wheel(tmp_path, "tiny", "1.0")
        lines = [f"--index-url {url}", f"--find-links {tmp_path}", "tiny"]
        job_id = script(live, "making", PACKAGED, requirements=lines)
        index.settimeout(30.0)
        connection, _ = index.accept()
        wait_for(lambda: bool(live.worker_pids()), 20.0, "the process that makes it")
        before = live.worker_pids()
        live.kill()
        live.start()
        wait_for(lambda: live.job(job_id)["reason"] == "making an environment: 1 package", 30.0, "what it waits for")
        assert live.worker_pids() == before
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()
        ended = live.wait_job(job_id)
        assert (ended["state"], ended["num_restarts"]) == ("SUCCEEDED", 0)
        assert "has tiny 1.0" in logs_of(live, job_id)
