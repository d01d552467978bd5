"""A guaranteed minimum takes a slot from training and gives it back, and the control plane dies on the way.

After every restart each slot has one label, that of the journal, and what was under way is brought to its end.
"""

from __future__ import annotations

import subprocess

import httpx2
import pytest

from kits.end_to_end.live_platform import ECHO, assert_exactly_once, wait_for
from kits.service.crash_points import LOAN_CRASH_POINTS
from kits.simulation.sweeps import sampled
from springtide.control.controller import Controller
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import recover
from springtide.core.resources import admits
from springtide.scheduling.registry import make_policy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
POLICY = "two-way/elastic"
POOLS = ("--pools", "inference=1")
# Long enough for a loan and a reclaim, twice where the control plane dies.
NUM_EPOCHS = 80


class Nobody:
    """An executor that does nothing: for reading a journal as a restart would."""

    def recover(self, standing):
        """Take nothing over."""


def labels_in_journal(platform):
    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    controller = Controller(make_policy(POLICY))
    recover(controller, Nobody(), journal)
    journal.close()
    return {node_id: node.pool for node_id, node in controller.state.nodes.items()}


def labels_told(platform):
    return {node["node_id"]: node["pool"] for node in platform.request("GET", "/v1/status")["nodes"]}


def assert_everyone_is_where_he_may_be(platform):
    """The labels of the journal are those that are told, and nobody holds a slot that is not for him."""
    status = platform.request("GET", "/v1/status")
    told = {node["node_id"]: node["pool"] for node in status["nodes"]}
    assert told.keys() == {f"local-{number}" for number in range(4)}
    draining = {node["node_id"] for node in status["nodes"] if node["drain"] is not None}
    jobs = {job["job_id"] for job in status["jobs"]}
    for device in status["devices"]:
        if device["workload_id"] is not None and device["node_id"] not in draining:
            assert admits(told[device["node_id"]], is_job=device["workload_id"] in jobs), device


def service_body(minimum):
    return {
        "source": {"filename": "e.py", "text": ECHO, "object_name": "Echo", "kind": "class"},
        "options": {"min_replicas": minimum, "max_replicas": 2, "idle_s": 1.0},
    }


def num_serving(platform):
    return sum(pool == "inference" for pool in labels_told(platform).values())


def provoke(platform, name):
    """A minimum of two takes a slot that training owns and holds; without it that slot goes back.

    Returns the job's id; asked a second time it goes on with the same job.
    """
    job_id = platform.submit(name, key=name, num_epochs=NUM_EPOCHS, shard_s=0.05)
    services = platform.request("GET", "/v1/services")
    if all(service["state"] == "REMOVED" for service in services):
        # Else the request for the service got through before the control plane died, and its slots are on their way.
        wait_for(lambda: platform.job(job_id)["num_workers"] >= 3, 60.0, "training to have its slots")
    platform.request("PUT", "/v1/services/echo", service_body(minimum=2))
    wait_for(lambda: platform.request("GET", "/v1/services/echo")["num_ready"] == 2, 60.0, "both guaranteed replicas")
    assert num_serving(platform) == 2
    assert_everyone_is_where_he_may_be(platform)
    platform.request("POST", "/v1/workloads/echo/scale", {"minimum": 0, "maximum": 1})
    wait_for(lambda: platform.job(job_id)["num_workers"] >= 3, 60.0, "training to have its slot back")
    assert_everyone_is_where_he_may_be(platform)
    return job_id


def has_died(platform):
    """Whether the process is gone, or about to be: its sockets close a moment before."""
    try:
        platform.process.wait(5.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def test_the_control_plane_dies_around_every_change_of_a_label(platform):
    points, reached = sampled(LOAN_CRASH_POINTS), []
    for number, point in enumerate(points):
        platform.start(crash_at=f"{point}:1", policy=POLICY, options=POOLS)
        name = f"job{number}"
        try:
            job_id = provoke(platform, name)
        except (httpx2.HTTPError, AssertionError):
            if not has_died(platform):
                raise
            reached.append(point)
            before = labels_in_journal(platform)
            platform.start(policy=POLICY, options=POOLS)
            assert set(before) == set(labels_told(platform))
            assert_everyone_is_where_he_may_be(platform)
            job_id = provoke(platform, name)
        ended = platform.wait_job(job_id)
        assert (ended["state"], ended["num_restarts"]) == ("SUCCEEDED", 0), ended["reason"]
        assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=NUM_EPOCHS)
        platform.request("DELETE", "/v1/services/echo")
        wait_for(lambda: not platform.worker_pids(), 30.0, "every replica to be gone")
        platform.stop()
    assert reached == points


def test_a_guarantee_beyond_what_there_is(platform):
    platform.start(policy=POLICY, options=POOLS)
    body = service_body(minimum=2)
    body["options"] |= {"min_replicas": 5, "max_replicas": 6}
    answer = platform.http.put("/v1/services/echo", json=body)
    assert answer.status_code == 409
    assert "cannot be guaranteed 5 replicas: the platform has 4 devices" in answer.json()["error"]["message"]
    platform.request("PUT", "/v1/services/echo", service_body(minimum=2))
    wait_for(lambda: platform.request("GET", "/v1/services/echo")["num_ready"] == 2, 60.0, "both guaranteed replicas")
    answer = platform.http.post("/v1/workloads/echo/scale", json={"minimum": 5, "maximum": 5})
    assert answer.status_code == 409
    assert platform.request("GET", "/v1/services/echo")["min_replicas"] == 2


def test_a_machine_that_is_cut_anew_ends_who_is_left_on_slots_of_before(platform):
    platform.start(policy=POLICY, options=POOLS)
    job_id = platform.submit("kept", num_epochs=NUM_EPOCHS, shard_s=0.05)
    wait_for(lambda: platform.job(job_id)["step"] >= 5, 60.0, "some steps")
    before = platform.worker_pids()
    platform.kill()
    platform.start()
    nodes = {device["node_id"] for device in platform.request("GET", "/v1/status")["devices"]}
    assert nodes == {"local"}
    assert platform.request("GET", "/v1/status")["nodes"] == []
    wait_for(lambda: not set(before) & set(platform.worker_pids()), 30.0, "the workers of before to end")
    ended = platform.wait_job(job_id)
    assert ended["state"] == "SUCCEEDED", ended["reason"]
    assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=NUM_EPOCHS)
