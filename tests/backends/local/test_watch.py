"""Who is silent, and whose silence proves nothing."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from springtide.backends.control_channel.members import MemberPhase
from springtide.backends.control_channel.reactor import Reactor
from springtide.backends.local import watch
from springtide.backends.local.members import ProcessHandle, Worker
from springtide.backends.processes import ProcessStat, identify
from springtide.core.workload import ReplicaId, WorkloadId


class Table:
    """Stands for the table of workers: remembers who was given up, and why."""

    def __init__(self, *replicas: Worker) -> None:
        self.replicas = {replica.replica_id: replica for replica in replicas}
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.reactor = SimpleNamespace(after=lambda delay_s, function: None)

    def lose(self, replica: Worker, reason: str) -> None:
        self.lost.append(reason)


def make_replica(phase: MemberPhase = MemberPhase.RUNNING, *, silent_s: float) -> Worker:
    return Worker(
        replica_id=ReplicaId("r0"),
        workload_id=WorkloadId("job"),
        generation=1,
        action=None,
        work_dir=Path("/nonexistent"),
        log_path=Path("/nonexistent/log"),
        token_sha256="",
        phase=phase,
        handle=ProcessHandle(identity=identify(os.getpid())),
        born_at_s=time.monotonic() - silent_s,
        heard_at_s=time.monotonic() - silent_s,
    )


@pytest.mark.parametrize(
    ("silent_s", "is_starved", "ticks", "is_lost"),
    [
        (0.5, False, 0, False),
        (1.5, False, 0, False),
        (2.5, False, 0, True),
        (2.5, False, 7, False),
        (2.5, True, 0, False),
        (11.0, True, 7, True),
    ],
)
def test_silence_counts_unless_the_worker_starves(
    monkeypatch: pytest.MonkeyPatch, silent_s: float, is_starved: bool, ticks: int, is_lost: bool
) -> None:
    replica = make_replica(silent_s=silent_s)
    replica.suspect_ticks = 100
    monkeypatch.setattr(watch, "live_stat", lambda identity: ProcessStat("S", 0, 100 + ticks, 0))
    monkeypatch.setattr(watch, "is_starved", lambda identity: is_starved)
    table = Table(replica)
    watch.SilenceMonitor(table)._tick()  # type: ignore[arg-type]
    assert bool(table.lost) == is_lost


def test_an_adopted_worker_has_a_longer_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "live_stat", lambda identity: ProcessStat("S", 0, 0, 0))
    monkeypatch.setattr(watch, "is_starved", lambda identity: False)
    for silent_s, is_lost in ((2.5, False), (3.5, True)):
        table = Table(make_replica(MemberPhase.ADOPTING, silent_s=silent_s))
        watch.SilenceMonitor(table)._tick()  # type: ignore[arg-type]
        assert bool(table.lost) == is_lost


def test_who_is_asked_to_stop_has_its_grace_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "live_stat", lambda identity: ProcessStat("T", 0, 0, 0))
    replica = make_replica(silent_s=60.0)
    replica.asked_to_stop = True
    table = Table(replica)
    watch.SilenceMonitor(table)._tick()  # type: ignore[arg-type]
    assert not table.lost


def test_a_worker_that_never_connects_is_given_up() -> None:
    table = Table(make_replica(MemberPhase.SPAWNING, silent_s=watch.START_TIMEOUT_S + 1))
    watch.SilenceMonitor(table)._tick()  # type: ignore[arg-type]
    assert "did not connect" in table.lost[0]


def test_after_a_pause_of_its_own_the_watch_forgives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "live_stat", lambda identity: ProcessStat("T", 0, 0, 0))
    table = Table(make_replica(silent_s=60.0))
    looker = watch.SilenceMonitor(table)  # type: ignore[arg-type]
    looker.reset_silence()
    looker._tick()
    assert not table.lost


def test_the_reactor_notices_that_it_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.backends.control_channel.reactor.LATE_S", 0.05)
    reactor = Reactor()
    order: list[str] = []
    reactor.on_late = lambda: order.append("late")
    reactor.after(0.0, lambda: time.sleep(0.2))
    reactor.after(0.1, lambda: order.append("timer"))
    reactor.after(0.1, reactor.stop)
    thread = threading.Thread(target=reactor.run)
    thread.start()
    thread.join()
    reactor.close()
    # Forgiveness comes before the timers that would judge.
    assert order == ["late", "timer"]


def test_a_failing_callback_stops_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    reactor = Reactor()
    done: list[int] = []

    def fail() -> None:
        raise ValueError("a bug")

    reactor.call(fail)
    reactor.call(lambda: done.append(1))
    reactor.stop()
    reactor.run()
    reactor.close()
    assert (done, reactor.num_errors) == ([1], 1)
    assert "a bug" in caplog.text
