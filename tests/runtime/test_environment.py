"""A worker whose environment cannot be made says so and ends; making one is in tests/end_to_end/test_environment.py."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kits.runtime.runtime_plane import make_job
from springtide.core.wire.workers import (
    Acknowledge,
    Failed,
    FrameDecoder,
    Hello,
    Preparing,
    Report,
    WorkerSpec,
    encode_frame,
)
from springtide.core.workload import Packages, ReplicaId
from springtide.runtime.environment import run_in_environment


def reports_to(listener: socket.socket, until: type[Report]) -> list[Report]:
    """What a worker reports over one connection after the other, each report acknowledged, until one of a kind."""
    found: list[Report] = []
    while not any(isinstance(report, until) for report in found):
        connection, _ = listener.accept()
        decoder: FrameDecoder[Report] = FrameDecoder(Report)
        # A worker that has nothing more to say may be gone before its last report is acknowledged.
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(4096):
                for report in decoder.feed(data):
                    found.append(report)
                    if report.seq:
                        connection.sendall(encode_frame(Acknowledge(seq=report.seq)))
        connection.close()
    return found


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "c.sock"))
        listener.listen()
        yield listener


def run(platform: socket.socket, tmp_path: Path, packages: Packages, **how: Any) -> list[Report]:
    """What a worker reports whose environment cannot be made."""
    spec = WorkerSpec(
        workload=replace(make_job(tmp_path, "def fit(ctx): ..."), packages=packages, env=how.pop("env", {})),
        replica_id=ReplicaId("job.0"),
        generation=1,
        control_address=f"unix://{tmp_path / 'c.sock'}",
        token="t",
        work_dir=str(tmp_path),
        log_path="",
        lease_s=5.0,
    )
    found: list[Report] = []
    thread = threading.Thread(target=lambda: found.extend(reports_to(platform, Failed)))
    thread.start()
    assert run_in_environment(spec, tmp_path / "cache", **how) == 1
    thread.join()
    return found


def test_a_failure_is_a_report_of_its_own_after_what_the_start_waits_for(
    platform: socket.socket, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = run(platform, tmp_path, Packages(python="/none/python"))
    told = [report for report in found if isinstance(report, Preparing | Failed)]
    assert isinstance(told[0], Preparing)
    assert isinstance(told[1], Failed)
    assert told[0].reason == "making an environment"
    assert "/none/python is no interpreter here" in told[1].error
    # Numbers go on, so that the second is not taken for the first again.
    assert 0 < told[0].seq < told[1].seq
    assert sum(isinstance(report, Hello) for report in found) == 2
    assert "/none/python is no interpreter here" in capfd.readouterr().out


@pytest.mark.slow
def test_what_takes_longer_than_its_start_may_take_is_ended_and_told(platform: socket.socket, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {"PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/", "PIP_CACHE_DIR": str(tmp_path)}
        found = run(platform, tmp_path, Packages(requirements=("tiny",)), env=env, limit_s=20.0)
        silent.settimeout(10.0)
        connection, _ = silent.accept()
        with connection:
            # Its end: pip and what it has started are gone.
            connection.settimeout(10.0)
            while connection.recv(4096):
                pass
    (failed,) = [report for report in found if isinstance(report, Failed)]
    assert failed.error.startswith("its environment was not made within 20.0 s, which is all that its start may take")
