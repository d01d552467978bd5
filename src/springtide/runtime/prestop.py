"""`python -m springtide.runtime prestop`: the preStop hook of a container, which asks the worker to save and leave.

It imports only the standard library, because its own start takes time from the worker's grace.
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
    """Ask the worker of this container to leave; returns 0 once it has ended or its grace is over.

    Returns 1 if no worker can be reached; a worker then learns of the container's end only by SIGTERM.
    """
    environment = os.environ if environment is None else environment
    try:
        spec = json.loads(environment.get(SPEC_VARIABLE, ""))
        work_dir = spec.get("work_dir") or Path(tempfile.gettempdir()) / WORK_DIR_NAME
        wait_s = grace_s if grace_s is not None else float(spec["workload"].get("grace_s", _DEFAULT_GRACE_S))
        directory = os.open(work_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(wait_s)
            connection.connect(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
            # The container's first process closes the connection once the worker has ended.
            while connection.recv(64):
                continue
    except TimeoutError:
        sys.stderr.write(f"springtide: the worker has not ended within its grace of {wait_s:g} s\n")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        sys.stderr.write(f"springtide: there is no worker here that could be asked to leave: {error}\n")
        return 1
    return 0
