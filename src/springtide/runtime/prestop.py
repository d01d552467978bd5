"""`python -m springtide.runtime prestop`: the hook before a container's end. It asks its worker to save and leave.

It imports nothing beyond the standard library: the seconds that it takes to start are taken from the worker's grace.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SPEC_VARIABLE = "SPRINGTIDE_SPEC"
WORK_DIR_NAME = "springtide"
SOCKET_NAME = "prestop.sock"
_DEFAULT_GRACE_S = 15.0


def run_prestop(environment: Mapping[str, str] | None = None, grace_s: float | None = None) -> int:
    """Ask the worker of this container to end, and return 0 when it has, or when its grace is over.

    1 where there is no worker to ask, which then hears of its end by TERM alone.
    """
    environment = os.environ if environment is None else environment
    try:
        spec = json.loads(environment.get(SPEC_VARIABLE, ""))
        work_dir = spec.get("work_dir") or Path(tempfile.gettempdir()) / WORK_DIR_NAME
        wait_s = grace_s if grace_s is not None else float(spec["workload"].get("grace_s", _DEFAULT_GRACE_S))
        directory = os.open(work_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
            knock.settimeout(wait_s)
            knock.connect(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
            # The worker's keeper answers by closing, once the worker is gone.
            while knock.recv(64):
                continue
    except TimeoutError:
        sys.stderr.write(f"springtide: the worker has not ended within its grace of {wait_s:g} s\n")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        sys.stderr.write(f"springtide: there is no worker here that could be asked to leave: {error}\n")
        return 1
    return 0
