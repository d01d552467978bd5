"""A worker whose environment cannot be made says so and ends; making one is in tests/end_to_end/test_environment.py."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

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
        while data := connection.recv(4096):
            for report in decoder.feed(data):
                found.append(report)
                if report.seq:
                    connection.sendall(encode_frame(Acknowledge(seq=report.seq)))
        connection.close()
    return found


def test_a_failure_is_a_report_of_its_own_after_what_the_start_waits_for(tmp_path: Path, capfd) -> None:
    job = replace(make_job(tmp_path, "def fit(ctx): ..."), packages=Packages(python="/none/python"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "c.sock"))
    listener.listen()
    spec = WorkerSpec(
        workload=job,
        replica_id=ReplicaId("job.0"),
        generation=1,
        control_address=f"unix://{tmp_path / 'c.sock'}",
        token="t",
        work_dir=str(tmp_path),
        log_path="",
        lease_s=5.0,
    )
    found: list[Report] = []
    thread = threading.Thread(target=lambda: found.extend(reports_to(listener, Failed)))
    thread.start()
    assert run_in_environment(spec, tmp_path / "cache") == 1
    thread.join()
    listener.close()
    told = [report for report in found if isinstance(report, Preparing | Failed)]
    assert [type(report) for report in told] == [Preparing, Failed]
    assert told[0].reason == "making an environment"
    assert "/none/python is no interpreter here" in told[1].error
    # Numbers go on, so that the second is not taken for the first again.
    assert 0 < told[0].seq < told[1].seq
    assert sum(isinstance(report, Hello) for report in found) == 2
    assert "/none/python is no interpreter here" in capfd.readouterr().out
