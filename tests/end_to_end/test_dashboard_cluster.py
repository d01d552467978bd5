"""A real browser on a platform that stands on a cluster: who leads, what is wrong, and the pods that wait with why."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kits.end_to_end.browser import (
    CHROMIUM,
    DRAWN,
    EVIL,
    PlatformDouble,
    browsing,
    busy_status,
    busy_timeline,
    count,
    serving,
    text,
)
from kits.end_to_end.pictures import keep_picture
from springtide.core.status.platform import JobStatus, PlatformStatus
from springtide.core.status.pods import ClusterStatus, PodStatus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install -y chromium"),
]
CLUSTER = ClusterStatus(
    server="https://10.0.0.1:6443", leader="springtide-0_1_ab", term=7, num_nodes=3, num_pods=45, watch_age_s=2.0
)
SHOWN = f"{DRAWN} && !document.querySelector('#cluster').hidden"


def pod(job: JobStatus, number: int, phase: str = "running", reason: str = "") -> PodStatus:
    return PodStatus(
        workload_id=job.job_id, replica_id=f"{job.job_id}.{number}", namespace="ml", pod=f"{job.job_id}-{number}",
        node_id=f"node-{number}", phase=phase, reason=reason, since_s=75.0,
    )  # fmt: skip


def clustered(cluster: ClusterStatus = CLUSTER, num_pods: int = 2) -> PlatformStatus:
    plain = busy_status()
    first, *others = plain.jobs
    pods = tuple(pod(first, number) for number in range(num_pods - 1))
    pods += (pod(first, num_pods - 1, "starting", f"ImagePullBackOff: {EVIL}"),)
    return replace(plain, jobs=(replace(first, pods=pods), *others), cluster=cluster)


@pytest.mark.parametrize("dark", [False, True])
def test_the_pods_that_wait_come_first_with_their_reasons(tmp_path: Path, dark: bool) -> None:
    double = PlatformDouble(clustered(), busy_timeline())
    with serving(double) as address, browsing(address, tmp_path, dark=dark) as browser:
        browser.wait_for(SHOWN)
        told = text(browser, "#cluster-summary")
        assert told == "https://10.0.0.1:6443: 3 nodes, 45 pods; led by springtide-0_1_ab in term 7"
        assert count(browser, "#pods tbody tr") == 2
        first = text(browser, "#pods tbody tr")
        job_id = clustered().jobs[0].job_id
        for part in (f"ml/{job_id}-1", "node-1", "starting", "ImagePullBackOff", EVIL):
            assert part in first
        assert count(browser, "#cluster img") == 0, "a reason is text"
        assert browser.evaluate("document.querySelector('#cluster-problem').hidden")
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at 1280"
        keep_picture(browser, f"cluster-{'dark' if dark else 'light'}", "#cluster")


def test_what_keeps_the_platform_from_its_cluster_is_said(tmp_path: Path) -> None:
    double = PlatformDouble(clustered(replace(CLUSTER, problem="the API server does not answer")), busy_timeline())
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(SHOWN)
        assert text(browser, "#cluster-problem") == "the API server does not answer"
        assert not browser.evaluate("document.querySelector('#cluster-problem').hidden")


def test_many_pods_are_counted_where_they_are_not_shown(tmp_path: Path) -> None:
    double = PlatformDouble(clustered(num_pods=45), busy_timeline())
    with serving(double) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(SHOWN)
        assert count(browser, "#pods tbody tr") == 40
        assert "and 5 pods more" in text(browser, "#pods-more")


def test_a_platform_of_one_machine_has_no_such_part(tmp_path: Path) -> None:
    with serving(PlatformDouble(busy_status(), busy_timeline())) as address, browsing(address, tmp_path) as browser:
        browser.wait_for(DRAWN)
        assert browser.evaluate("document.querySelector('#cluster').hidden")
