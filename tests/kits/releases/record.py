"""`python -m kits.releases.record PYTHON OUT.tar.gz`, in tests/: the state directory of the version that PYTHON runs.

One job has succeeded, one is paused at a checkpoint, one was training and a service was answering when control plane
and workers were killed. A set is recorded for each release, and every later version must open it and lose nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from kits.end_to_end.live_platform import ECHO, LivePlatform, wait_for

# The journal names sources by their place, so the recording stands where every test can put it again.
PLACE = Path(tempfile.gettempdir()) / "springtide-release"
_LEFT_OUT = {
    "logs",
    "lock",
    "journal.db-shm",
    "platform.json",
    "platform.log",
    "token",
    "rendezvous",
    "control.sock",
    "zygote.sock",
}


def record(python: str, out: Path) -> None:
    """Play the story with the interpreter's version and pack what is left of it."""
    live = LivePlatform(PLACE / "state", python=python)
    try:
        live.start(policy="springtide")
        done = live.submit("done", num_epochs=2)
        live.wait_job(done)
        body = {
            "source": {"filename": "echo.py", "text": ECHO, "object_name": "Echo", "kind": "class"},
            "options": {"max_replicas": 2, "min_replicas": 1},
        }
        live.request("PUT", "/v1/services/echo", body)
        assert live.request("POST", "/f/echo", {"numbers": [1.0]})["outputs"] == [2.0]
        paused = live.submit("paused", num_epochs=200, shard_s=0.02, max_workers=2)
        wait_for(lambda: live.job(paused)["step"] >= 20, 60.0, "the job to train")
        live.request("POST", f"/v1/jobs/{paused}/pause")
        live.wait_job(paused, states=("PAUSED",))
        training = live.submit("training", num_epochs=100, shard_s=0.01, max_workers=2, deadline_s=3600.0)
        wait_for(lambda: live.job(training)["step"] >= 40, 60.0, "the job to train")
        time.sleep(1.0)
    finally:
        live.kill()
        for pid in live.worker_pids().values():
            os.kill(pid, signal.SIGKILL)
    with tarfile.open(out, "w:gz") as archive:
        for path in sorted(live.state_dir.rglob("*")):
            if path.is_file() and not _LEFT_OUT & set(path.relative_to(live.state_dir).parts):
                archive.add(path, arcname=str(path.relative_to(live.state_dir)))


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
