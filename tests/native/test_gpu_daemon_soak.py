"""What dies at drawn moments, many times over: nothing leaks, and no launch hangs longer than the stated bound."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kits.native.gpu_daemon_kit import (
    HANGS_NS,
    LIMIT_S,
    UUIDS,
    Client,
    Daemon,
    ask,
    entry,
    fork_asker,
    kill_asker,
    running_daemon,
    until,
)
from kits.native.native_build import Native
from kits.simulation.sweeps import part
from springtide.backends.sharing.gpu.segments import OK

# They measure: see ALONE in the Makefile.
pytestmark = pytest.mark.xdist_group("gpu daemon")
SANITIZED = False
NUM_RECONNECTS = part(1000)
NUM_KILLS = part(50, least=12)
SEED = 9


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path) as found:
        yield found


def report(**figures: object) -> None:
    """For whoever runs this for its figures (pytest -s)."""
    print(json.dumps(figures))


def ask_for(daemon: Daemon, seconds: float) -> int:
    """Ask as fast as possible; 0 if the answer was always yes."""
    end_s = time.monotonic() + seconds
    try:
        while time.monotonic() < end_s:
            found = ask(daemon.address, UUIDS[0])
            if found is None or found.status != OK:
                return 1
            found.close()
    except BaseException:
        return 2
    return 0


def memory_kb(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0])


@pytest.mark.slow
def test_a_thousand_processes_come_and_go(daemon: Daemon, native: Native) -> None:
    """Each is a program of its own with the library in it, that connects, launches and ends; every second is killed."""
    keeper = daemon.leader()
    drawn = random.Random(SEED)
    longest_ns = num_launches = 0
    for number in range(NUM_RECONNECTS):
        client = Client(native, daemon)
        daemon.send(entry(keeper.pid, "keeper", device=1), entry(client.pid, f"r{number}", share=(0.5, 1.0)))
        told = client.say("launch 3")
        longest_ns = max(longest_ns, told["longest_ns"])
        num_launches += told["launches"]
        if number % 2:
            client.begin("launch 5")
            time.sleep(drawn.random() * 0.002)
            client.kill()
        else:
            client.close()
        client.forget()
        if number == NUM_RECONNECTS // 10:
            num_files, rss_kb = daemon.num_files(), memory_kb(daemon.pid)
    daemon.send(entry(keeper.pid, "keeper", device=1))
    until(lambda: daemon.next_status().num_processes == 0, "nobody has a slot")
    status = daemon.next_status()
    grown_kb = memory_kb(daemon.pid) - rss_kb
    report(
        reconnects=NUM_RECONNECTS,
        launches=num_launches,
        answers=status.num_answers,
        longest_ms=longest_ns / 1e6,
        files=(num_files, daemon.num_files()),
        grown_kb=grown_kb,
    )
    assert status.num_answers >= NUM_RECONNECTS
    assert daemon.num_files() <= num_files
    assert len(list(daemon.place.iterdir())) == 2
    assert grown_kb < 4000
    assert longest_ns < HANGS_NS


@pytest.mark.slow
def test_one_tenant_reconnects_a_thousand_times(daemon: Daemon) -> None:
    """Processes of one replica, one after the other: none of its 64 slots stays taken."""
    daemon.send(entry(os.getpid()))
    num_files = daemon.num_files()
    for _ in range(NUM_RECONNECTS):
        pid, status = fork_asker(daemon)
        assert status == OK
        kill_asker(pid)
    until(lambda: daemon.next_status().num_processes == 0, "nobody has a slot")
    status_now = daemon.next_status()
    report(reconnects=NUM_RECONNECTS, deaths=status_now.num_deaths)
    assert status_now.num_deaths == NUM_RECONNECTS
    assert daemon.num_files() <= num_files


@pytest.mark.slow
def test_fifty_clients_are_killed_at_drawn_moments(daemon: Daemon, native: Native) -> None:
    """While they allocate, launch or wait; beside them one that lives: it has what it is promised all along."""
    drawn = random.Random(SEED + 1)
    steady = Client(native, daemon)
    lasting = entry(steady.pid, "steady", share=(0.3, 0.3), memory_mb=100)
    daemon.send(lasting)
    steady.say("alloc 60")
    steady.say("launch 100")
    num_files = daemon.num_files()
    longest_ns = 0
    late_s: list[float] = []
    for number in range(NUM_KILLS):
        client = Client(native, daemon, device=number % 2)
        steady.begin("run 200")
        daemon.send(lasting, entry(client.pid, f"r{number}", device=number % 2, share=(0.2, 0.5), memory_mb=50))
        client.begin(drawn.choice(["run 1000", "alloc 40", "launch 1000"]))
        time.sleep(drawn.random() * 0.1)
        client.kill()
        killed_s = time.monotonic()
        until(lambda: daemon.next_status().num_processes == 1, "its slot is free")
        late_s.append(time.monotonic() - killed_s)
        client.forget()
        longest_ns = max(longest_ns, steady.end()["longest_ns"])
    told = daemon.tenant("steady")
    report(
        kills=NUM_KILLS, longest_ms=longest_ns / 1e6, seen_after_s=max(late_s), files=(num_files, daemon.num_files())
    )
    assert told.memory_used_mb == 60
    assert told.num_open == 0
    assert daemon.num_files() <= num_files
    assert len(list(daemon.place.iterdir())) == 2
    assert longest_ns < HANGS_NS


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fifty_daemons_are_killed_at_drawn_moments(daemon: Daemon, native: Native) -> None:
    """Two launch all the while. Nobody stops, nobody's memory is forgotten, and shares hold after each."""
    drawn = random.Random(SEED + 2)
    clients = [Client(native, daemon), Client(native, daemon)]
    entries = [
        entry(clients[0].pid, "r0", share=(0.3, 0.3), memory_mb=100),
        entry(clients[1].pid, "r1", share=(0.4, 0.6), memory_mb=100),
    ]
    daemon.send(*entries)
    for client in clients:
        assert client.say("alloc 60")["result"] == 0
        client.say("launch 50")
    files = {path.name: path.stat().st_ino for path in daemon.place.iterdir()}
    num_files = daemon.num_files()
    longest_ns, num_launches, num_adopted = 0, [50, 50], 0
    for _ in range(NUM_KILLS):
        for client in clients:
            client.begin("run 600")
        time.sleep(drawn.random() * 0.15)
        daemon.kill()
        time.sleep(drawn.random() * 0.15)
        daemon.start(connect=False)
        if drawn.random() < 0.5:
            daemon.connect()
            daemon.send(*entries)
        for number, client in enumerate(clients):
            told = client.end()
            longest_ns = max(longest_ns, told["longest_ns"])
            num_launches[number] += told["launches"]
        status = daemon.next_status()
        num_adopted += status.num_adopted
        assert (status.num_processes, status.num_made) == (2, 0)
        assert [tenant.memory_used_mb for tenant in status.sharing.tenants] == [60, 60]
    assert {path.name: path.stat().st_ino for path in daemon.place.iterdir()} == files
    rates = []
    for client in clients:
        client.begin("run 2000")
    for client in clients:
        told = client.end()
        rates.append(told["launches"] / 1000 / (told["took_ns"] / 1e9))
    tenants = {tenant.replica_id: tenant for tenant in daemon.next_status().sharing.tenants}
    report(
        kills=NUM_KILLS,
        longest_ms=longest_ns / 1e6,
        rates=rates,
        opened=[tenants[name].num_open for name in ("r0", "r1")],
        launches=num_launches,
        files=(num_files, daemon.num_files()),
    )
    assert num_adopted == 2 * NUM_KILLS
    assert longest_ns < HANGS_NS
    assert rates[0] == pytest.approx(0.3, abs=0.05)
    assert rates[1] == pytest.approx(0.6, abs=0.08)
    assert daemon.num_files() <= num_files


@pytest.mark.slow
def test_many_ask_at_once_and_turns_go_on(daemon: Daemon) -> None:
    """Forty processes ask as fast as they can for two seconds: everybody is answered, and grants rise in time."""
    daemon.send(entry(os.getpid(), share=(0.3, 0.6)))
    mine = ask(daemon.address)
    assert mine is not None
    children = []
    for _ in range(40):
        child = os.fork()
        if child == 0:
            os._exit(ask_for(daemon, 2.0))
        children.append(child)
    begin_s, before_ns, stale = time.monotonic(), mine.granted("granted_ns"), 0
    while time.monotonic() - begin_s < 1.8:
        mine.use(mine.granted("granted_ns"))
        stale += time.monotonic_ns() - mine.granted("heartbeat_ns") > 100_000_000
        time.sleep(0.002)
    rate = (mine.granted("granted_ns") - before_ns) / 1e9 / (time.monotonic() - begin_s)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 40
    status = daemon.next_status()
    report(answers=status.num_answers, stale=stale, rate=rate, late_p99_s=status.sharing.late_p99_s)
    until(lambda: daemon.next_status().num_processes == 1, "their slots are free", LIMIT_S)
    assert rate > 0.3
    mine.close()
