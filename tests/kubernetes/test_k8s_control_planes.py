"""Two control planes of one platform on a real API server: one leads, the other waits; nothing is ever done twice."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from kits.kubernetes.api_proxy import ApiProxy
from kits.kubernetes.kube_http import Refused, wait_for
from kits.kubernetes.lab.lab import Cluster, free_ports
from kits.servers import missing_postgres, running_postgres
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions
from springtide.backends.kubernetes.settings import NODE_LABEL
from springtide.control.journal.journal import read_journal
from springtide.service.server import CRASH_AT

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(missing_postgres()), reason=missing_postgres() or "none"),
]
DEVICE = "springtide.dev/device"
LEASE_S = 4.0
JOB = {
    "name": "digits",
    "source": {"filename": "digits.py", "text": "def fit(ctx):\n    ...\n", "object_name": "fit", "kind": "function"},
    "options": {"global_batch_size": 64, "num_epochs": 1, "max_workers": 2},
}


@pytest.fixture(scope="module")
def journal_server():
    with running_postgres() as server:
        yield server


@pytest.fixture
def journal_url(journal_server, namespace):
    name = namespace.replace("-", "_")
    with psycopg.connect(journal_server.postgres_url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return journal_server.postgres_url(name)


@pytest.fixture(scope="module", autouse=True)
def definitions(cluster):
    for definition in custom_resource_definitions():
        path = f"apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition['metadata']['name']}"
        cluster.api.patch(f"{path}?fieldManager=test&force=true", definition, "apply")
        wait_for("the definitions", lambda path=path: _is_established(cluster.api.find(path)))


def _is_established(found: dict[str, Any] | None) -> bool:
    conditions = ((found or {}).get("status") or {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


class ControlPlane:
    """`springtide k8s serve` with a state directory of its own."""

    def __init__(
        self, kubeconfig: Path, folder: Path, settings: dict[str, Any], password: str, crash_at: str = ""
    ) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.port, control_port = free_ports(2)
        (folder / "settings.yaml").write_text(
            yaml.safe_dump({**settings, "port": self.port, "control_port": control_port})
        )
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "springtide", "k8s", "serve", "--host", "127.0.0.1"),
                    *("--settings", str(folder / "settings.yaml"), "--state", str(folder / "state")),
                ],
                env={
                    **os.environ,
                    "KUBECONFIG": str(kubeconfig),
                    "OMP_NUM_THREADS": "1",
                    "PGPASSWORD": password,
                    CRASH_AT: crash_at,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.log = folder / "log"

    def ask(self, verb: str, path: str, body: object = None, token: str = "") -> tuple[int, dict[str, Any]]:
        """Status 0: nobody answers."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=verb)
        request.data = None if body is None else json.dumps(body).encode()
        if body is not None:
            request.add_header("Content-Type", "application/json")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")
        except OSError:
            return 0, {}

    @property
    def role(self) -> str:
        """`leading`, `standby`, `starting`, or nothing where nobody answers."""
        return str(self.ask("GET", "/readyz")[1].get("status", ""))

    def wait_for_role(self, role: str) -> None:
        wait_for(f"{self.folder.name} {role}", lambda: self.role == role or self._fails_if_ended(), 60.0)

    def _fails_if_ended(self) -> bool:
        assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.said()}"
        return False

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def settings(namespace, journal_url, journal_server, tmp_path):
    return {
        "name": namespace,
        "namespace": namespace,
        "namespaces": [namespace],
        "advertise": "127.0.0.1",
        "device_resource": DEVICE,
        "device_kind": "cpu",
        "node_selector": {NODE_LABEL: namespace},
        "store_url": f"file://{tmp_path}/objects",
        # Passwords belong into the environment: the settings are no secret.
        "journal_url": journal_url.replace(f":{journal_server.password}@", "@"),
        "lease_s": LEASE_S,
        "share_directory": "",
    }


@pytest.fixture
def start(cluster, tmp_path, settings, journal_server):
    started: list[ControlPlane] = []

    def start(name: str, kubeconfig: Path = cluster.kubeconfig, crash_at: str = "") -> ControlPlane:
        started.append(ControlPlane(kubeconfig, tmp_path / name, settings, journal_server.password, crash_at))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def proxy(cluster, tmp_path):
    """A way to the API server on which every request is seen, and the kubeconfig that leads there."""
    with ApiProxy(cluster.kubeconfig) as running:
        path = tmp_path / "proxied.kubeconfig"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "x",
                    "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
                    "clusters": [{"name": "x", "cluster": {"server": running.url}}],
                    "users": [{"name": "x", "user": {}}],
                }
            )
        )
        yield running, path


def num_writes(proxy: ApiProxy) -> int:
    return sum(request.method != "GET" for request in proxy.requests)


@pytest.fixture
def token(cluster, namespace):
    """The token that the first control plane made."""

    def read() -> str:
        secret = cluster.api.get(f"api/v1/namespaces/{namespace}/secrets/{namespace}-token")
        return base64.b64decode(secret["data"]["token"]).decode()

    return read


def steps_of(url: str) -> list[tuple[int, int]]:
    """Number and term of every step, also of those in segments."""
    with contextlib.closing(read_journal(url, Path())) as journal:
        return [(row.seq, row.term) for row in journal.rows()]


def holder_of(cluster: Cluster, namespace: str) -> str:
    lease = cluster.api.get(f"apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{namespace}")
    return str(lease["spec"]["holderIdentity"])


def test_one_leads_the_other_stands_by_and_takes_over_with_nothing_of_its_own(
    cluster, namespace, start, token, journal_url
):
    first = start("first")
    first.wait_for_role("leading")
    second = start("second")
    second.wait_for_role("standby")
    assert second.ask("GET", "/healthz")[1]["role"] == "standby"
    status, said = second.ask("POST", "/v1/jobs", JOB, token())
    assert status == 503
    assert "stands by" in said["error"]["message"]
    assert first.ask("GET", "/v1/status")[0] == 401
    status, cluster_status = first.ask("GET", "/v1/cluster", token=token())
    assert status == 200
    assert (cluster_status["term"], cluster_status["leader"]) == (1, holder_of(cluster, namespace))
    status, job = first.ask("POST", "/v1/jobs", JOB, token())
    assert status in (200, 201), job

    first.signal(signal.SIGTERM)
    assert first.process.wait(30.0) == 0, first.said()
    second.wait_for_role("leading")
    # Its state directory was empty: what it knows is from the journal, the source from the object store.
    status, found = second.ask("GET", f"/v1/jobs/{job['job_id']}", token=token())
    assert status == 200
    assert found["name"] == "digits"
    assert not (second.folder / "state" / "workloads" / job["job_id"] / "source").exists()
    status, again = second.ask("GET", "/v1/cluster", token=token())
    assert again["term"] == 2
    steps = steps_of(journal_url)
    assert [seq for seq, _ in steps] == list(range(1, len(steps) + 1))
    assert {term for _, term in steps} == {1, 2}
    assert [term for _, term in steps] == sorted(term for _, term in steps)


def test_a_leader_that_slept_past_its_lease_appends_nothing_acts_no_more_and_ends_with_3(
    cluster, namespace, start, token, journal_url, proxy
):
    seen, kubeconfig = proxy
    first = start("first", kubeconfig)
    first.wait_for_role("leading")
    second = start("second")
    second.wait_for_role("standby")
    assert num_writes(seen) > 0
    first.signal(signal.SIGSTOP)
    try:
        second.wait_for_role("leading")
        status, job = second.ask("POST", "/v1/jobs", JOB, token())
        assert status in (200, 201), job
        before = steps_of(journal_url)
        assert before[-1][1] == 2
        writes = num_writes(seen)
    finally:
        first.signal(signal.SIGCONT)
    assert first.process.wait(30.0) == 3, first.said()
    assert num_writes(seen) == writes, "it sent something to the API server after it woke"
    assert "another control plane has taken over" in first.said()
    after = steps_of(journal_url)
    # What the first had written is before what the second wrote, and nothing of it came later.
    assert [term for _, term in after] == sorted(term for _, term in after)
    assert sum(term == 1 for _, term in after) == sum(term == 1 for _, term in before)
    assert second.role == "leading"
    assert holder_of(cluster, namespace).rpartition("_")[0].endswith(f"_{second.process.pid}")
    # And the platform goes on.
    assert second.ask("POST", f"/v1/jobs/{job['job_id']}/cancel", {}, token())[0] == 200


def test_a_leader_that_is_killed_is_followed_when_its_lease_has_run_out(start, token, journal_url):
    first = start("first")
    first.wait_for_role("leading")
    known = token()
    second = start("second")
    second.wait_for_role("standby")
    first.signal(signal.SIGKILL)
    first.process.wait()
    second.wait_for_role("leading")
    # Both have the same token and master key: the first one's Secrets hold.
    assert token() == known
    assert second.ask("GET", "/v1/status", token=known)[0] == 200
    second.signal(signal.SIGTERM)
    assert second.process.wait(30.0) == 0


@pytest.mark.parametrize("point", ["journal.append.before", "journal.append.after", "loop.acknowledge.before"])
def test_a_leader_that_dies_around_a_step_leaves_a_journal_that_the_next_one_goes_on_with(
    start, token, journal_url, point
):
    first = start("first", crash_at=f"{point}:3")
    wait_for("its first steps", lambda: first.role == "leading" or first.process.poll() is not None)
    with contextlib.suppress(Refused):
        # Whatever is asked of it: the third step is its last.
        for _ in range(3):
            first.ask("POST", "/v1/jobs", JOB, token())
    assert first.process.wait(30.0) == 137, first.said()
    second = start("second")
    second.wait_for_role("leading")
    status, job = second.ask("POST", "/v1/jobs", JOB, token())
    assert status in (200, 201), job
    steps = steps_of(journal_url)
    assert [seq for seq, _ in steps] == list(range(1, len(steps) + 1))
    assert sum(term == 1 for _, term in steps) == (2 if point == "journal.append.before" else 3)
    status, jobs = second.ask("GET", "/v1/jobs", token=token())
    assert status == 200
    assert len({found["job_id"] for found in jobs}) == len(jobs)


def test_who_is_started_again_where_the_leader_died_does_not_wait_for_its_lease(start, settings, token, journal_url):
    settings["lease_s"] = 3600.0
    first = start("first")
    first.wait_for_role("leading")
    first.signal(signal.SIGKILL)
    first.process.wait()
    again = start("first")
    again.wait_for_role("leading")
    assert again.ask("GET", "/v1/cluster", token=token())[1]["term"] == 2
    # On the directory of one that lives there is no room for another.
    third = start("first")
    assert third.process.wait(30.0) == 1
    assert "another control plane runs on" in third.said()
    assert again.role == "leading"


def test_who_stands_by_ends_at_once_when_it_is_told(start):
    first = start("first")
    first.wait_for_role("leading")
    second = start("second")
    second.wait_for_role("standby")
    second.signal(signal.SIGTERM)
    assert second.process.wait(15.0) == 0
    assert first.role == "leading"


def test_a_journal_that_is_away_halts_decisions_and_not_the_platform(start, token, journal_server, journal_url):
    """The database restarts under a leader: it goes on in the same term, and no step is lost or doubled."""
    first = start("first")
    first.wait_for_role("leading")
    with psycopg.connect(journal_server.postgres_url(), autocommit=True) as connection:
        name = journal_url.rpartition("/")[2]
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))
        status, said = first.ask("POST", "/v1/jobs", JOB, token())
        assert status in (0, 503), said
        assert first.role == "leading"
        assert first.ask("GET", "/readyz")[0] == 503
        assert first.ask("GET", "/readyz?for=requests")[0] == 200
        assert "decisions wait" in first.said()
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    wait_for("decisions", lambda: first.ask("GET", "/readyz")[0] == 200)
    # What was answered with 503 was not taken in: it is sent again.
    assert first.ask("POST", "/v1/jobs", JOB, token())[0] == 201
    assert len(first.ask("GET", "/v1/jobs", token=token())[1]) == 1
    steps = steps_of(journal_url)
    assert [seq for seq, _ in steps] == list(range(1, len(steps) + 1))
    assert {term for _, term in steps} == {1}


def test_an_api_server_that_is_away_for_longer_than_the_lease_ends_nothing(start, token, proxy, journal_url):
    """Nobody else took the lease: the same control plane goes on in the same term, and takes requests meanwhile."""
    seen, kubeconfig = proxy
    first = start("first", kubeconfig)
    first.wait_for_role("leading")
    known = token()

    def cluster_status() -> dict[str, Any]:
        return first.ask("GET", "/v1/cluster", token=known)[1]

    seen.rules.is_away = True
    seen.cut()
    wait_for("the lease to run out", lambda: cluster_status().get("watch_age_s", 0.0) > 2 * LEASE_S)
    assert cluster_status()["problem"]
    assert first.role == "leading"
    before = num_writes(seen)
    status, said = first.ask("POST", "/v1/jobs", JOB, known)
    assert status != 201, said
    assert num_writes(seen) == before, "nobody may act on a lease that has run out"
    seen.rules.is_away = False
    # A job over REST has an object of its own: that it is taken says that it acts again.
    wait_for("a job to be taken", lambda: first.ask("POST", "/v1/jobs", JOB, known)[0] in (200, 201))
    assert first.role == "leading"
    assert {term for _, term in steps_of(journal_url)} == {1}


def test_a_leader_that_is_cut_off_from_the_api_server_alone_learns_from_the_journal_that_another_leads(
    start, token, proxy, journal_url
):
    """Nothing happens on its platform, so that it appends nothing, and still it must not keep the workers."""
    seen, kubeconfig = proxy
    first = start("first", kubeconfig)
    first.wait_for_role("leading")
    second = start("second")
    second.wait_for_role("standby")
    seen.rules.is_away = True
    seen.cut()
    second.wait_for_role("leading")
    assert first.process.wait(60.0) == 3, first.said()
    assert "another control plane has taken over" in first.said()
    steps = steps_of(journal_url)
    assert [term for _, term in steps] == sorted(term for _, term in steps)
    assert second.ask("GET", "/v1/cluster", token=token())[1]["term"] == 2
