"""A new version of a service on real processes: no request waits for it while there is a device for both."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kits.end_to_end.live_platform import ECHO, LivePlatform, ended_after, wait_for

NUM_UPDATES = int(os.environ.get("NUM_UPDATES", "6"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240 + 10 * NUM_UPDATES)]

# Loads once there is such a file.
LOAD = """
    def load(self):
        import os, time
        while not os.path.exists({path!r}):
            time.sleep(0.02)
"""


def version(factor: int, loads_at: object = "/") -> str:
    return ECHO.replace("2 *", f"{factor} *") + LOAD.format(path=str(loads_at))


def put(live: LivePlatform, text: str, release: dict | None = None, **options):
    source = {"filename": "echo.py", "text": text, "object_name": "Echo", "kind": "class"}
    options = {"min_replicas": 1, "max_replicas": 1, **options}
    body = {"source": source, "options": options, "release": release or {}}
    return live.http.put("/v1/services/echo", json=body)


def deploy(live: LivePlatform, text: str, **options) -> dict:
    answer = put(live, text, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


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


class OpenLoop:
    """Sends a request each `1 / per_s` seconds, on a thread of its own, and keeps what was answered."""

    def __init__(self, live: LivePlatform, per_s: float) -> None:
        self.answers: list[float] = []
        self.failures: list[str] = []
        self._live = live
        self._gap_s = 1.0 / per_s
        self._is_over = threading.Event()
        self._sender = threading.Thread(target=self._run)

    def __enter__(self) -> OpenLoop:
        self._sender.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._sender.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(64) as pool:
            while not self._is_over.wait(self._gap_s):
                pool.submit(self._call)

    def _call(self) -> None:
        try:
            self.answers.append(call(self._live))
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")


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
        told = deploy(live, version(3, tmp_path / "go"))
        assert (told["revision"], told["releasing"]) == (1, 2)
        wait_for(lambda: service(live)["num_starting"] == 1, 30.0, "the new version to load")
        told = service(live)
        assert told["reason"] == "1 of 1 replicas ready; revision 1 answers until revision 2 is ready"
        num_before = len(caller.answers)
        wait_for(lambda: len(caller.answers) > num_before + 5, 30.0, "answers while the new version loads")
        assert set(caller.answers) == {2.0}
        (tmp_path / "go").touch()
        wait_for(lambda: caller.answers[-1] == 3.0, 30.0, "the new version to answer")
        deploy(live, version(4, tmp_path / "never"), start_timeout_s=3.0)
        wait_for(lambda: service(live)["rolled_back"], 30.0, "the version that hangs to be given up")
    assert caller.failures == []
    assert set(caller.answers) == {2.0, 3.0}
    told = service(live)
    assert told["rolled_back"].startswith("revision 3 was rolled back: echo.2 was not ready within 3.0 s")
    assert [replica["replica_id"] for replica in told["replicas"] if replica["state"] == "READY"] == ["echo.1"]
    assert [(each["revision"], each["state"]) for each in told["revisions"]] == [
        (1, "retired"),
        (2, "current"),
        (3, "failed"),
    ]
    assert call(live) == 3.0
    # Its secrets and its file are there, so the first one comes back, with its number.
    live.request("POST", "/v1/services/echo/rollback", {"revision": 1})
    wait_for(lambda: service(live)["revision"] == 1 and call(live) == 2.0, 30.0, "the first version to answer")


def test_where_there_is_one_device_nothing_stops_unless_its_owner_says_so(platform, tmp_path):
    live = platform(slots=1)
    deploy(live, version(2))
    assert call(live) == 2.0
    refused = put(live, version(3), release={"when_full": "refuse"})
    assert refused.status_code == 409
    assert "could start only in its place" in refused.json()["error"]["message"]
    deploy(live, version(3))
    assert service(live)["reason"].endswith("revision 1 answers until revision 2 is ready, which waits for a device")
    assert call(live) == 2.0
    assert put(live, version(4, tmp_path / "go"), release={"when_full": "stop-first"}).status_code == 200
    wait_for(lambda: service(live)["num_starting"] == 1, 30.0, "the new version to load")
    (tmp_path / "go").touch()
    assert call(live) == 4.0, "the request waited for the new version"
    # A version that never gets ready gives way to the one before.
    put(live, version(5, tmp_path / "never"), start_timeout_s=3.0, release={"when_full": "stop-first"})
    assert call(live) == 4.0
    wait_for(lambda: "revision 4 was rolled back" in service(live)["reason"], 30.0, "it to be said")


def test_a_canary_that_fails_in_predict_is_rolled_back_by_its_own_answers(platform):
    live = platform(slots=2)
    deploy(live, version(2))
    assert call(live) == 2.0
    broken = version(3).replace("return", "raise RuntimeError('bad weights')\n        return")
    put(live, broken, release={"canary": 0.2, "watch": "errors<1%", "watch_for_s": 0})
    wait_for(lambda: service(live)["revisions"][-1]["state"] == "canary", 30.0, "the canary to be ready")
    pinned = live.http.post("/f/echo@2", json={"numbers": [1.0]})
    assert (pinned.status_code, pinned.headers["x-springtide-revision"]) == (500, "2")
    assert live.http.post("/f/echo@9", json={"numbers": [1.0]}).status_code == 404
    headers = {"X-Springtide-Revision": "1"}
    assert live.http.post("/f/echo", json={"numbers": [1.0]}, headers=headers).json()["outputs"] == [2.0]
    with Caller(live) as caller:
        wait_for(lambda: service(live)["rolled_back"], 60.0, "the canary to be given up")
    assert len(caller.failures) <= 10, caller.failures
    assert "revision 2 was rolled back: errors<1%:" in service(live)["rolled_back"]
    put(live, version(4), release={"canary": 0.5, "watch": "errors<5%", "watch_for_s": 0})
    with Caller(live) as caller:
        wait_for(lambda: service(live)["revision"] == 3, 90.0, "the good canary to be promoted")
    assert caller.failures == []
    assert set(caller.answers) == {2.0, 4.0}


COUNTS = """
import time

class Echo:
    def predict(self, count: int):
        for number in range(count):
            time.sleep(0.1)
            yield FACTOR * number
"""


def test_a_stream_goes_on_to_its_end_while_new_versions_take_over(platform):
    live = platform(slots=2)
    deploy(live, COUNTS.replace("FACTOR", "1"))
    with live.http.stream("POST", "/f/echo", json={"count": 40}) as answer:
        lines = answer.iter_lines()
        numbers = [int(next(lines))]
        for factor in (2, 3):
            wanted = deploy(live, COUNTS.replace("FACTOR", str(factor)))["releasing"]
            if factor == 2:
                wait_for(lambda wanted=wanted: state_of(live, wanted) == "current", 30.0, "it to take over")
                assert [int(line) for line in _lines(live, 3)] == [0, 2, 4]
        numbers += [int(line) for line in lines]
    assert numbers == list(range(40))
    wait_for(lambda: is_decided(live, 3) and state_of(live, 3) == "current", 60.0, "the last version to take over")


def _lines(live: LivePlatform, count: int) -> list[str]:
    return live.http.post("/f/echo", json={"count": count}).text.split()


BROKEN_AT_START = """
    def load(self):
        raise RuntimeError("weights missing")
"""
NEVER_READY = """
    def ready(self):
        return False
"""
READY_LATER = """
    num_asked = 0

    def ready(self):
        self.num_asked += 1
        return self.num_asked > 2
"""


@pytest.mark.parametrize("options", [{"min_replicas": 2, "max_replicas": 2}, {"share": {"request": 0.2, "limit": 0.4}}])
def test_no_request_fails_over_many_updates_broken_ones_among_them(platform, options):
    """Open loop: requests come by the clock, whatever becomes of the ones before.

    NUM_UPDATES in the environment says how many updates.
    """
    live = platform(slots=3)
    deploy(live, ECHO.replace("2 *", "100 *"), **options)
    assert call(live) == 100.0
    good = {100.0}
    with OpenLoop(live, per_s=20.0) as load:
        for number in range(1, NUM_UPDATES + 1):
            factor, kind = 100 + number, number % 3
            text = ECHO.replace("2 *", f"{factor} *")
            text += (NEVER_READY, READY_LATER, BROKEN_AT_START)[kind]
            answered = put(live, text, start_timeout_s=3.0 if kind == 0 else 60.0, **options).json()
            wanted = answered["releasing"]
            if kind == 1:
                good.add(float(factor))
            wait_for(lambda wanted=wanted: is_decided(live, wanted), 120.0, f"revision {wanted} to be decided about")
            assert state_of(live, wanted) == ("current" if kind == 1 else "failed"), service(live)["revisions"]
    assert load.failures == []
    assert set(load.answers) == good, "a broken revision has answered, or a good one has not"


def is_decided(live: LivePlatform, revision: int) -> bool:
    told = service(live)
    return told["releasing"] is None and told["old_revision"] is None


def state_of(live: LivePlatform, revision: int) -> str:
    return next(each["state"] for each in service(live)["revisions"] if each["revision"] == revision)
