"""A submitted folder on a real platform: no edit reaches a job, and no replica of a service another one."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kits.end_to_end.live_platform import LivePlatform, wait_for
from springtide.client.api import connect
from springtide.client.folders.send import deploy_with_folder, submit_with_folder
from springtide.client.sources.source import read_source

pytestmark = pytest.mark.slow
SCRIPT = """
import os, time
import helper
from pkg import deep

out = os.environ["SPRINGTIDE_OUT"]
with open(os.path.join(out, "seen.txt"), "a") as seen:
    seen.write(f"{helper.VALUE} {deep.VALUE} {open('data/x.txt').read()} {os.path.basename(os.getcwd())}\\n")
with open("relative.txt", "a") as relative:
    relative.write("x")
with open("data/x.txt", "w") as own:
    own.write("changed")
while not os.path.exists(os.path.join(out, "go")):
    time.sleep(0.02)
"""


def test_a_job_that_starts_again_runs_what_was_submitted(
    platform: LivePlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "data").mkdir()
    files = {"run.py": SCRIPT, "helper.py": "VALUE = 1\n", "pkg/deep.py": "VALUE = 2\n", "data/x.txt": "data"}
    for name, text in files.items():
        (folder / name).write_text(text)
    platform.start()
    source = read_source(folder / "run.py", "", "script")
    with connect(state_dir=platform.state_dir) as client:
        asked = {"name": "run", "source": source, "options": {"max_restarts": 3}}
        job_id = submit_with_folder(client, asked).job_id
    seen = platform.workload(job_id) / "artifacts" / "seen.txt"
    wait_for(lambda: seen.exists() and seen.read_text() == "1 2 data folder\n", 60.0, "the job to begin")
    for name in files:
        (folder / name).write_text("VALUE = 99\n")
    [pid] = platform.worker_pids().values()
    os.kill(pid, signal.SIGKILL)
    # It has the copy that it had, with what it has written there itself, and the results of before.
    wait_for(lambda: seen.read_text() == "1 2 data folder\n1 2 changed folder\n", 60.0, "the job to begin again")
    seen.with_name("go").touch()
    assert platform.wait_job(job_id)["state"] == "SUCCEEDED"
    copy = platform.workload(job_id) / "folder"
    assert (copy / "relative.txt").read_text() == "xx"
    assert (copy / "helper.py").read_text() == "VALUE = 1\n"
    assert not (folder / "relative.txt").exists()


SERVED = """
import os
from pathlib import Path

import helper
import springtide as st

HERE = Path(__file__).parent

@st.serve(scale=(2, 2))
class Echo:
    def load(self):
        self.weights = open("data/x.txt").read() + (HERE / "data" / "x.txt").read_text()
        with open("data/x.txt", "w") as own:
            own.write(f"changed by {os.getpid()}")
        Path("cache.txt").write_text("x")

    def predict(self, numbers: list[int]) -> list[str]:
        seen = [str(helper.VALUE), self.weights, os.getcwd(), __file__, str(os.getpid())]
        return ["|".join(seen) for _ in numbers]
"""


def answers(live: LivePlatform, num_pids: int, value: str) -> dict[str, list[str]]:
    """What each of so many replicas of the version says, by its process."""
    found: dict[str, list[str]] = {}

    def ask() -> bool:
        assert live.http is not None
        answer = live.http.post("/f/echo", json={"numbers": [1]})
        if answer.status_code == 200:
            said = answer.json()["outputs"][0].split("|")
            if said[0] == value:
                found[said[4]] = said
        return len(found) >= num_pids

    with ThreadPoolExecutor(4) as pool:
        wait_for(lambda: any(pool.map(lambda _: ask(), range(8))), 60.0, lambda: f"{num_pids} replicas: {found}")
    return found


def test_each_replica_of_a_service_works_in_a_copy_of_its_own(
    platform: LivePlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    for name, text in {"serve.py": SERVED, "helper.py": "VALUE = 1\n", "data/x.txt": "data"}.items():
        (folder / name).write_text(text)
    platform.start()

    def deploy() -> None:
        with connect(state_dir=platform.state_dir) as client:
            asked = {"name": "echo", "source": read_source(folder / "serve.py", "Echo", "class")}
            deploy_with_folder(client, {**asked, "options": {"min_replicas": 2, "max_replicas": 2}})

    deploy()
    copies = platform.workload("echo") / "folders"
    first = answers(platform, 2, "1")
    assert {said[1] for said in first.values()} == {"datadata"}, "each begins with what was sent"
    assert {Path(said[2]).parent for said in first.values()} == {copies}
    assert all(said[3] == f"{said[2]}/serve.py" for said in first.values())
    assert len({said[2] for said in first.values()}) == 2
    service = platform.request("GET", "/v1/services/echo")
    assert (service["revision"], service["folder"]) == (1, str(folder))
    deploy()
    assert platform.request("GET", "/v1/services/echo")["revision"] == 1

    # A new control plane finds them where they are, and what a killed one leaves goes when the next one starts.
    platform.kill()
    platform.start()
    assert answers(platform, 2, "1").keys() == first.keys()
    killed = first[next(iter(first))]
    os.kill(int(killed[4]), signal.SIGKILL)
    wait_for(lambda: len(answers(platform, 2, "1").keys() - {killed[4]}) == 2, 60.0, "another replica")
    wait_for(lambda: not Path(killed[2]).exists(), 30.0, "the copy of the killed one to go")
    assert [said[1] for pid, said in answers(platform, 2, "1").items() if pid not in first] == ["datadata"]

    (folder / "helper.py").write_text("VALUE = 2\n")
    deploy()
    answers(platform, 2, "2")
    wait_for(lambda: len(list(copies.glob("*.lock"))) == 2, 60.0, "the copies of the older version to go")
    platform.request("DELETE", "/v1/services/echo")
    wait_for(lambda: list(copies.iterdir()) == [], 60.0, "all copies to go")
    assert (folder / "data/x.txt").read_text() == "data"
