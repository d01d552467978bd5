"""The Kubernetes bench without a cluster: its report, and the wire that is slow on purpose."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from springtide.core.errors import BackendError
from springtide_studies.kubernetes import cluster as kubernetes_bench_cluster
from springtide_studies.kubernetes.bench import _at
from springtide_studies.kubernetes.cluster import SlowWire, api_server
from springtide_studies.kubernetes.report import BenchRun, BindRates, make_report

BINDS = BindRates(one_by_one=100.0, together=150.0, one_by_one_afar=40.0, together_afar=200.0)


def run(
    turn_s: float = 0.02,
    hand_over_s: float = 0.001,
    lag_s: float = 0.05,
    own_lag_s: float = 0.01,
    num_bound: int = 8000,
) -> BenchRun:
    turns = [(turn_s, turn_s / 2, 1, hand_over_s)] * 99 + [(9.0, 9.0, 0, 0.0)]
    return BenchRun(num_bound, 40.0, 20.0, 0.02, [lag_s] * 100, [own_lag_s] * 100, turns)


def report(
    whole: BenchRun | None = None, quick: BenchRun | None = None, slow: BenchRun | None = None, binds: BindRates = BINDS
):
    return make_report(whole or run(), quick or run(), slow or run(), binds, 1000, 2000, "springtide")


def test_the_rows_say_what_was_measured() -> None:
    said = report()
    rows = {row["case"]: row for row in said["rows"]}
    assert said["passed"]
    assert rows["pods made and bound a second, 10 ms a call"]["ratio"] == 5.0
    assert rows["pods bound a second, 1000 nodes x 8, 2000 jobs"]["ours"] == 200.0
    assert rows["CPU of the control plane a pod bound"]["ours"] == 2.5
    # A turn that began nothing decided nothing either.
    assert rows["one turn of the loop, p99"]["ours"] == pytest.approx(20.0)
    assert rows["CPU of one turn of the loop, p99"]["ours"] == pytest.approx(10.0)


@pytest.mark.parametrize(
    "said",
    [
        lambda: report(binds=BINDS._replace(together_afar=39.0)),
        lambda: report(whole=run(lag_s=1.5)),
        lambda: report(whole=run(own_lag_s=1.5)),
        lambda: report(whole=run(own_lag_s=0.0)),
        lambda: report(slow=run(hand_over_s=0.5)),
        lambda: report(slow=run(turn_s=0.52)),
        lambda: report(whole=run(num_bound=0)),
    ],
    ids=[
        "no faster",
        "late news",
        "late news within",
        "no news within",
        "a hand-over that waits",
        "turns that wait",
        "nothing bound",
    ],
)
def test_what_does_not_pass(said) -> None:
    assert not said()["passed"]


def test_bytes_are_late_both_ways_and_in_order(monkeypatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def echo() -> None:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(1024):
                connection.sendall(data)

    threading.Thread(target=echo, daemon=True).start()
    wire = SlowWire(f"https://127.0.0.1:{server.getsockname()[1]}", 0.05)
    late: list[tuple[float, bytes]] = []
    later = wire._loop.call_later

    def call_later(delay_s, function, *arguments, **options):
        if len(arguments) == 2:
            late.append((delay_s, arguments[1]))
        return later(delay_s, function, *arguments, **options)

    monkeypatch.setattr(wire._loop, "call_later", call_later)
    with wire, socket.create_connection(("127.0.0.1", wire.port), timeout=10) as client:
        for word in (b"one ", b"two ", b"three"):
            client.sendall(word)
        received = b""
        while len(received) < 13:
            received += client.recv(1024)
    server.close()
    assert received == b"one two three"
    assert b"".join(data for _, data in late).count(b"two") == 2
    assert {delay_s for delay_s, _ in late} == {0.05}


def test_the_kubeconfig_of_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text('clusters: [{name: lab, cluster: {server: "https://127.0.0.1:6443", other: 1}}]\nusers: []\n')
    assert _at(path, 99, tmp_path).read_text() == (
        'clusters: [{name: lab, cluster: {server: "https://127.0.0.1:99", other: 1}}]\nusers: []\n'
    )


def test_without_an_api_server_it_says_how_to_come_by_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv(kubernetes_bench_cluster.LAB_VARIABLE, str(tmp_path))
    with pytest.raises(BackendError, match="KUBECONFIG"), api_server():
        raise AssertionError("there is none")
