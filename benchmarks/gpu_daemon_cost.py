"""What the GPU share daemon costs: its part of a core while tenants use all that they are granted, and while none does.

    python benchmarks/gpu_daemon_cost.py --devices 8 --tenants 3 --seconds 10

No GPU is needed: this program counts launches in the tenants' place, in the shared memory that the library would use.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from springtide.backends.processes import identify, process_clock_s
from springtide.backends.sharing.gpu.segments import (
    GRANT_FIELDS,
    SEGMENT_BYTES,
    USAGE_FIELDS,
    offsets_of,
    segment_directory,
)
from springtide.backends.sharing.gpu.table import SOCKET_NAME, STATUS_NAME, GpuDaemonStatus, GpuTable, GpuTenantEntry
from springtide.backends.sharing.table import read_whole
from springtide.core.resources import DeviceId
from springtide.core.shares import Share
from springtide.core.wire.workers import encode_frame
from springtide.core.workload import ReplicaId, WorkloadId

LAUNCH_NS = 1_000_000
GRANTED, USED = offsets_of(GRANT_FIELDS)["granted_ns"] // 8, offsets_of(USAGE_FIELDS)["used_ns"] // 8


def entries(leaders: list[int], num_devices: int, num_tenants: int) -> tuple[GpuTenantEntry, ...]:
    """This many tenants on each device, the first of them a service."""
    found = []
    for number, pid in enumerate(leaders):
        device, place = divmod(number, num_tenants)
        process = identify(pid)
        assert process is not None
        found.append(
            GpuTenantEntry(
                workload_id=WorkloadId(f"w{place}"),
                replica_id=ReplicaId(f"r{number}"),
                device_id=DeviceId(f"local/{device}"),
                device_uuid=f"GPU-{uuid.UUID(int=device + 1)}",
                share=Share(request=0.9 / num_tenants, limit=1.5 / num_tenants, memory_mb=1000),
                process=process,
                is_slo=place == 0,
            )
        )
    assert len(found) == num_devices * num_tenants
    return tuple(found)


def busy(place: Path, seconds: float) -> int:
    """For every tenant, launch as much as its tokens allow; returns the number of launches."""
    tenants = []
    for path in place.glob("*.grant"):
        grant, usage = os.open(path, os.O_RDONLY), os.open(path.with_suffix(".usage"), os.O_RDWR)
        words = mmap.mmap(grant, SEGMENT_BYTES, prot=mmap.PROT_READ), mmap.mmap(usage, SEGMENT_BYTES)
        tenants.append(tuple(memoryview(each).cast("Q") for each in words))
    num_launches = 0
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for granted, used in tenants:
            while used[USED] < granted[GRANTED]:
                used[USED] += LAUNCH_NS
                num_launches += 1
        time.sleep(0.002)
    return num_launches


def main() -> int:
    """Measure both and print them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--tenants", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        daemon = subprocess.Popen([sys.executable, "-m", "springtide.backends.sharing.gpu.daemon", name])
        leaders = [subprocess.Popen(["sleep", "3600"]) for _ in range(asked.devices * asked.tenants)]
        try:
            while read_whole(directory / STATUS_NAME, GpuDaemonStatus) is None:
                time.sleep(0.01)
            with socket.socket(socket.AF_UNIX) as platform:
                platform.connect(str(directory / SOCKET_NAME))
                table = GpuTable(tenants=entries([each.pid for each in leaders], asked.devices, asked.tenants))
                platform.sendall(encode_frame(table))
                time.sleep(1.0)
                figures: dict[str, float] = {}
                for what in ("idle", "busy"):
                    begin_s, used_s = time.monotonic(), process_clock_s(daemon.pid) or 0.0
                    if what == "busy":
                        figures["launches"] = busy(segment_directory(directory), asked.seconds)
                    else:
                        time.sleep(asked.seconds)
                    used_s = (process_clock_s(daemon.pid) or 0.0) - used_s
                    figures[f"{what}_cores"] = used_s / (time.monotonic() - begin_s)
                status = read_whole(directory / STATUS_NAME, GpuDaemonStatus)
                assert status is not None
                figures["tick_s"], figures["late_p99_s"] = status.sharing.tick_s, status.sharing.late_p99_s
                print(json.dumps({"devices": asked.devices, "tenants": asked.tenants, **figures}))
        finally:
            daemon.terminate()
            daemon.wait()
            for leader in leaders:
                leader.kill()
                leader.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
