"""The election on a real API server: one leads, nobody acts before the one before has stopped, whatever happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kits.kubernetes.api_proxy import ApiProxy
from kits.kubernetes.kube_http import wait_for
from kits.kubernetes.lab.lab import Cluster
from springtide.backends.kubernetes.client.kinds import Key
from springtide.backends.kubernetes.client.leases import Leadership, boot_s
from springtide.backends.kubernetes.client.thread import ApiThread

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(120)]
LEASE_S = 2.0


class Candidate:
    """One control plane, behind a proxy of its own."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, clock: Callable[[], float] = boot_s) -> None:
        self.proxy = ApiProxy(cluster.kubeconfig)
        self.events: list[str] = []
        self.leadership = Leadership(
            Key(namespace, "springtide"),
            lease_s=LEASE_S,
            identity=name,
            on_acquired=lambda: self.events.append("leads"),
            on_lost=self.events.append,
            clock=clock,
        )

    def __enter__(self) -> Candidate:
        self.proxy.__enter__()
        self.thread = ApiThread(self.proxy.connect)
        self.thread.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.close()
        self.proxy.__exit__()

    def stand(self) -> Candidate:
        self.thread.run(self.leadership.run)
        return self

    @property
    def acts(self) -> bool:
        return self.leadership.may_act()


class Watchman:
    """Looks all the time whether two may act at once."""

    def __init__(self, *candidates: Candidate) -> None:
        self._candidates = candidates
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watchman:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.001):
            self.most = max(self.most, sum(candidate.acts for candidate in self._candidates))


@pytest.fixture
def pair(cluster: Cluster, namespace: str) -> Iterator[tuple[Candidate, Candidate]]:
    with Candidate(cluster, namespace, "one") as one, Candidate(cluster, namespace, "two") as two:
        one.stand()
        wait_for("the first to lead", lambda: one.acts, 10)
        two.stand()
        yield one, two


def lease_of(cluster: Cluster, namespace: str) -> dict:
    return cluster.api.get(f"apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/springtide")["spec"]


def test_one_leads_and_renews_and_the_other_waits(cluster, namespace, pair):
    one, two = pair
    with Watchman(one, two) as watchman:
        first = lease_of(cluster, namespace)["renewTime"]
        wait_for("two renewals", lambda: lease_of(cluster, namespace)["renewTime"] > first, 10)
        time.sleep(1.5 * LEASE_S)
        assert one.acts
        assert not two.acts
    assert watchman.most == 1
    assert two.events == []
    assert two.leadership.holder == "one"


def test_it_is_handed_over_at_once(cluster, namespace, pair):
    one, two = pair
    with Watchman(one, two) as watchman:
        one.thread.call(one.leadership.release)
        assert not one.acts
        wait_for("the next", lambda: two.acts, LEASE_S)
    assert watchman.most == 1
    assert one.events == ["leads"]
    assert lease_of(cluster, namespace)["leaseTransitions"] == 2


def test_who_is_cut_off_stops_before_the_next_begins(pair):
    one, two = pair
    with Watchman(one, two) as watchman:
        one.proxy.go_away()
        wait_for("the next", lambda: two.acts, 5 * LEASE_S)
    assert watchman.most == 1
    assert not one.acts
    assert one.leadership.is_suspended
    assert one.events == ["leads"]
    # It finds out when it can ask, and never leads again: whoever lost has to begin anew.
    one.proxy.come_back()
    wait_for("that it is told", lambda: len(one.events) == 2, 5)
    assert "another control plane has taken over: two" in one.events[1]
    assert not one.leadership.is_leading
    assert not one.leadership.is_suspended


def test_who_is_alone_acts_again_when_the_server_is_back(cluster, namespace):
    with Candidate(cluster, namespace, "one") as one:
        one.stand()
        wait_for("it to lead", lambda: one.acts, 10)
        one.proxy.go_away()
        wait_for("that it may not act", lambda: one.leadership.is_suspended, 3 * LEASE_S)
        time.sleep(LEASE_S)
        assert not one.acts
        assert one.leadership.problem
        one.proxy.come_back()
        wait_for("that it acts again", lambda: one.acts, 3 * LEASE_S)
        assert one.events == ["leads"]
        assert one.leadership.problem == ""


def test_an_api_server_that_is_slow_or_away_for_a_moment_costs_nothing(pair):
    one, _ = pair
    one.proxy.answer(lambda request: request.method == "PUT", 500, times=1, reason="InternalError")
    one.proxy.cut()
    time.sleep(1.5 * LEASE_S)
    assert one.acts
    assert one.events == ["leads"]


def test_who_slept_through_its_lease_sends_nothing(cluster, namespace):
    """As after SIGSTOP, or on a machine that was suspended: the clock jumps, and no callback has run yet."""
    jump = 0.0
    with Candidate(cluster, namespace, "one", clock=lambda: boot_s() + jump) as one:
        one.stand()
        wait_for("it to lead", lambda: one.acts, 10)
        jump = 10 * LEASE_S
        assert one.leadership.is_leading
        assert not one.acts


def test_a_lease_that_somebody_else_took_or_deleted(cluster, namespace, pair):
    one, two = pair
    path = f"apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/springtide"
    cluster.api.delete(path)
    with Watchman(one, two) as watchman:
        wait_for("one of them to make it anew", lambda: cluster.api.find(path), 10)
        holder = lease_of(cluster, namespace)["holderIdentity"]
        wait_for("one that acts", lambda: one.acts or two.acts, 10)
        assert holder in ("one", "two")
    # Deleting the Lease ends the protection that it gives; the journal's term is what holds then. That both act for
    # long is what must not be.
    assert watchman.most <= 2
    wait_for("one alone", lambda: one.acts != two.acts, LEASE_S)
    cluster.api.patch(path, {"spec": {"holderIdentity": "a third", "leaseDurationSeconds": 60}})
    loser = one if one.acts else two
    wait_for("the loser to stop", lambda: not loser.acts, 2 * LEASE_S)
    wait_for("that it is told", lambda: "a third" in loser.events[-1], 5)


def test_an_acquisition_whose_answer_is_lost(cluster, namespace):
    with Candidate(cluster, namespace, "one") as one:
        one.proxy.lose_answer(lambda request: request.method == "POST", times=1)
        one.stand()
        wait_for("it to lead", lambda: one.acts, 10)
        assert one.events == ["leads"]
        assert lease_of(cluster, namespace)["holderIdentity"] == "one"
