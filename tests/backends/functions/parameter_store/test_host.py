"""Parameter stores that live as long as somebody synchronises: who holds them, what they cost, who takes them over."""

from __future__ import annotations

import threading

import pytest

from springtide.backends.functions.parameter_store.address import make_parameter_host, parse_hosted
from springtide.backends.functions.parameter_store.host import FixedHost, HostedParameters, ParameterStoreHost
from springtide.core.errors import BackendError, InvalidRequest, StorageError


class Clock:
    """Unix time as a test sets it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class ScriptedServers:
    """Servers that are there as long as they are in `up`; addresses are kept by those that come after one."""

    def __init__(self, clock: Clock, *, keeps_address: bool = True) -> None:
        self.clock = clock
        self.keeps_address = keeps_address
        self.up: set[str] = set()
        self.num_started = 0
        self.ended = threading.Event()
        self.refuses = ""

    def start(self, job_id, before):
        if self.refuses:
            raise BackendError(self.refuses)
        self.num_started += 1
        identity = f"server-{self.num_started}"
        self.up.add(identity)
        url = before.url if before is not None and self.keeps_address else f"redis://:pw@h:{self.num_started}/0"
        return ParameterStoreHost(url=url, identity=identity, began_at_s=self.clock.now_s)

    def is_alive(self, server):
        return server.identity in self.up

    def end(self, server):
        self.up.discard(server.identity)
        self.ended.set()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def servers(clock):
    return ScriptedServers(clock)


def host_of(servers, folder, *, linger_s=60.0, adoption_s=60.0):
    return HostedParameters(servers, folder, linger_s=linger_s, now_s=servers.clock, check_s=0.0, adoption_s=adoption_s)


def test_each_job_has_a_server_of_its_own_while_it_holds_it(servers, tmp_path):
    host = host_of(servers, tmp_path)
    one, two = host.acquire("a"), host.acquire("b")
    assert one != two
    assert host.acquire("a") == one, "asking again changes nothing"
    assert host.is_alive("a")
    host.release("a", lingers=False)
    assert servers.up == {"server-2"}
    assert not host.is_alive("a")
    host.close(ends=True)
    assert servers.up == set()


def test_one_that_is_released_lingers_for_those_who_come_back(servers, tmp_path):
    host = host_of(servers, tmp_path)
    url = host.acquire("a")
    host.release("a")
    assert servers.up == {"server-1"}
    assert host.acquire("a") == url
    assert servers.num_started == 1
    host.close(ends=True)


def test_it_ends_when_nobody_comes_back(servers, tmp_path):
    host = host_of(servers, tmp_path, linger_s=0.01)
    host.acquire("a")
    host.release("a")
    assert servers.ended.wait(30.0)
    assert servers.up == set()
    assert host.acquire("a") != ""
    assert servers.num_started == 2
    host.close(ends=True)


def test_the_bill_counts_the_seconds_that_it_was_up(servers, tmp_path, clock):
    host = host_of(servers, tmp_path)
    assert host.used_s("a") == 0.0
    host.acquire("a")
    clock.now_s += 30.0
    assert host.used_s("a") == 30.0
    host.release("a", lingers=False)
    clock.now_s += 1000.0
    assert host.used_s("a") == 30.0, "a job that idles pays for no store"
    host.acquire("a")
    clock.now_s += 5.0
    assert host.used_s("a") == 35.0
    assert host.used_s("b") == 0.0
    host.close(ends=True)


def test_one_that_died_is_started_anew_at_its_address(servers, tmp_path, clock):
    host = host_of(servers, tmp_path)
    url = host.acquire("a")
    servers.up.clear()
    clock.now_s += 10.0
    assert not host.is_alive("a")
    assert host.renew("a") == url
    assert host.is_alive("a")
    assert host.renew("a") == url
    assert servers.num_started == 2, "one that lives is left alone"
    clock.now_s += 10.0
    assert host.used_s("a") == 20.0
    host.close(ends=True)


def test_a_service_may_give_another_address(clock, tmp_path):
    servers = ScriptedServers(clock, keeps_address=False)
    host = host_of(servers, tmp_path)
    url = host.acquire("a")
    servers.up.clear()
    assert host.acquire("a") != url
    host.close(ends=True)


def test_what_cannot_be_started_is_said_and_may_be_tried_again(servers, tmp_path):
    host = host_of(servers, tmp_path)
    servers.refuses = "no room"
    with pytest.raises(BackendError, match="no room"):
        host.acquire("a")
    servers.refuses = ""
    assert host.acquire("a")
    host.close(ends=True)


def test_a_platform_that_is_restarted_takes_over_what_runs(servers, tmp_path, clock):
    before = host_of(servers, tmp_path)
    url = before.acquire("a/b c")
    clock.now_s += 10.0
    before.close(ends=False)
    after = host_of(servers, tmp_path)
    assert after.acquire("a/b c") == url
    assert servers.num_started == 1
    assert after.used_s("a/b c") == 10.0
    after.close(ends=True)
    assert not list(tmp_path.glob("*.json"))


def test_what_lingers_ends_with_the_platform(servers, tmp_path):
    host = host_of(servers, tmp_path)
    host.acquire("a")
    host.release("a")
    host.close(ends=False)
    assert servers.up == set()


def test_what_nobody_takes_over_ends(servers, tmp_path):
    host_of(servers, tmp_path).acquire("a")
    host = host_of(servers, tmp_path, adoption_s=0.01)
    assert servers.ended.wait(30.0)
    assert not host.is_alive("a")


def test_notes_that_cannot_be_read_stop_nobody(servers, tmp_path):
    (tmp_path / "a.json").write_bytes(b"{")
    host = host_of(servers, tmp_path)
    assert host.acquire("a")
    host.close(ends=True)


def test_a_store_that_is_always_there_is_billed_while_it_is_held(clock):
    alive = [True]
    host = FixedHost("redis://h:1/0", now_s=clock, ping=lambda url, limit_s: alive[0])
    assert host.acquire("a") == host.acquire("a") == host.renew("a") == "redis://h:1/0"
    clock.now_s += 7.0
    host.release("a")
    clock.now_s += 7.0
    assert host.used_s("a") == 7.0
    alive[0] = False
    assert not host.is_alive("a")
    with pytest.raises(StorageError, match="start it again"):
        host.renew("a")
    host.close(ends=True)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("redis?lingre=5s", "no option lingre"),
        ("redis?linger=soon", "linger"),
        ("redis?memory=lots", "memory"),
        ("redis?linger", "cannot be read"),
        ("ecs://cluster", "ecs://CLUSTER/TASK"),
        ("ecs://cluster/redis:1?subnets=subnet-1", "needs region"),
        ("ecs://cluster/redis:1?region=us-east-1", "needs subnets"),
        ("ecs://cluster/redis:1?region=us-east-1&subnets=a&port=x", "is no port"),
        ("ecs://cluster/redis:1?region=us-east-1&subnets=a&public=maybe", "true or false"),
        ("redis?binary=/no/such/redis-server", "apt install redis-server"),
    ],
)
def test_addresses_that_cannot_be_say_why(address, said, tmp_path):
    with pytest.raises(InvalidRequest, match=said):
        make_parameter_host(address, tmp_path)


def test_addresses_become_their_hosts(tmp_path):
    assert make_parameter_host("", tmp_path) is None
    assert isinstance(make_parameter_host("redis://h:6379/0", tmp_path), FixedHost)
    assert isinstance(make_parameter_host("shm://wire", tmp_path), FixedHost)
    assert parse_hosted("redis://h:1/0") is None
    hosted = parse_hosted("ecs://cluster/redis:1?region=us-east-1&subnets=a,b&linger=30s&memory=2GiB")
    assert (hosted.kind, hosted.path, hosted.seconds(0.0), hosted.memory_mb()) == ("ecs", "cluster/redis:1", 30.0, 2048)
