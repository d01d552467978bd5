"""A new version of a service on real processes: no request waits for it while there is a device for both."""

from __future__ import annotations

import threading

import pytest

from kits.end_to_end.live_platform import ECHO, LivePlatform, ended_after, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Loads once there is such a file.
LOAD = """
    def load(self):
        import os, time
        while not os.path.exists({path!r}):
            time.sleep(0.02)
"""


def version(factor: int, loads_at: object = "/") -> str:
    return ECHO.replace("2 *", f"{factor} *") + LOAD.format(path=str(loads_at))


def deploy(live: LivePlatform, text: str, **options) -> dict:
    source = {"filename": "echo.py", "text": text, "object_name": "Echo", "kind": "class"}
    options = {"min_replicas": 1, "max_replicas": 1, **options}
    return live.request("PUT", "/v1/services/echo", {"source": source, "options": options})


def call(live: LivePlatform) -> float:
    return live.request("POST", "/f/echo", {"numbers": [1.0]})["outputs"][0]


def service(live: LivePlatform) -> dict:
    return live.request("GET", "/v1/services/echo")


class Caller:
    """Calls the service again and again, and keeps what it answered."""

    def __init__(self, live: LivePlatform) -> None:
        self.answers: list[float] = []
        self.failures: list[str] = []
        self._live = live
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Caller:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            try:
                self.answers.append(call(self._live))
            except AssertionError as error:
                self.failures.append(str(error))


@pytest.fixture
def platform(tmp_path):
    def start(slots: int) -> LivePlatform:
        live.slots = slots
        live.start()
        return live

    with ended_after(LivePlatform(tmp_path / "state")) as live:
        yield start


def test_the_old_version_answers_until_the_new_one_is_ready_and_goes_on_when_that_hangs(platform, tmp_path):
    live = platform(slots=2)
    deploy(live, version(2))
    assert call(live) == 2.0
    with Caller(live) as caller:
        assert deploy(live, version(3, tmp_path / "go"))["revision"] == 2
        wait_for(lambda: service(live)["num_starting"] == 1, 30.0, "the new version to load")
        told = service(live)
        assert (told["old_revision"], told["num_ready"]) == (1, 1)
        assert told["reason"] == "1 of 1 replicas ready; revision 1 answers until revision 2 is ready"
        num_before = len(caller.answers)
        wait_for(lambda: len(caller.answers) > num_before + 5, 30.0, "answers while the new version loads")
        assert set(caller.answers) == {2.0}
        (tmp_path / "go").touch()
        wait_for(lambda: caller.answers[-1] == 3.0, 30.0, "the new version to answer")
        deploy(live, version(4, tmp_path / "never"), start_timeout_s=3.0)
        wait_for(lambda: service(live)["rolled_back"], 30.0, "the version that hangs to be rolled back")
    assert caller.failures == []
    assert set(caller.answers) == {2.0, 3.0}
    told = service(live)
    assert told["rolled_back"].startswith("revision 3 was rolled back: echo.2 was not ready within 3.0 s")
    assert [replica["replica_id"] for replica in told["replicas"] if replica["state"] == "READY"] == ["echo.1"]
    assert call(live) == 3.0


def test_where_there_is_one_device_the_old_version_stops_first_and_it_is_said(platform, tmp_path):
    live = platform(slots=1)
    deploy(live, version(2))
    assert call(live) == 2.0
    deploy(live, version(3, tmp_path / "go"))
    wait_for(lambda: service(live)["state"] == "STARTING", 30.0, "the new version to load")
    assert service(live)["reason"].endswith("loading revision 2; nothing answers until then, requests wait")
    (tmp_path / "go").touch()
    assert call(live) == 3.0, "the request waited for the new version"
    history = live.request("GET", "/v1/workloads/echo/history")
    assert any("no further device on which that could load meanwhile" in str(entry) for entry in history), history
    # A version that never gets ready gives way to the one before.
    deploy(live, version(4, tmp_path / "never"), start_timeout_s=3.0)
    assert call(live) == 3.0
    assert "revision 3 was rolled back" in service(live)["reason"]
