"""A serving replica in a container: it listens for gateways at its own address, and they must prove its secret.

This module does not import torch; the user's file imports what its model needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from springtide.core.errors import BackendError, SpringtideError
from springtide.core.tokens import gateway_token
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import InferenceService
from springtide.runtime.process.control_link import ControlLink
from springtide.runtime.process.exits import EXIT_UNFIT
from springtide.runtime.process.pod_place import KEY_FILE_VARIABLE, fetch_source
from springtide.runtime.process.user_environment import set_user_environment
from springtide.runtime.serving.health import HealthServer
from springtide.runtime.serving.listeners import HandshakeGuard
from springtide.runtime.serving.replica import run_replica
from springtide.serving.frames import HEALTH_PORT, SERVING_PORT

# Override the default ports, for replicas that share an address.
SERVING_PORT_VARIABLE = "SPRINGTIDE_SERVING_PORT"
HEALTH_PORT_VARIABLE = "SPRINGTIDE_HEALTH_PORT"


def run_serving_pod(spec: WorkerSpec, key: str, *, prepare: Callable[[], WorkerSpec] | None = None) -> int:
    """Serve at `spec.listen_host` and return the exit code, as run_replica does. Call it on the main thread.

    `key` is the workload's key. Health probes are answered from the beginning; `prepare` then fetches what is needed
    and returns the spec to serve. Raises BackendError if there is no address or no key, OSError if a port is taken.
    """
    service = spec.workload
    assert isinstance(service, InferenceService), "run_serving_pod is for services"
    if not spec.listen_host or not key:
        raise BackendError("a replica that others reach over a network needs an address and its service's key")
    health = HealthServer(spec.listen_host, _port(HEALTH_PORT_VARIABLE, HEALTH_PORT), service)
    try:
        if prepare is not None:
            spec = prepare()
        os.environ.update(spec.environment)
        set_user_environment(spec)
        guard = HandshakeGuard(spec.listen_host, _port(SERVING_PORT_VARIABLE, SERVING_PORT), gateway_token(key))
        link = ControlLink(spec)
        link.start()
        try:
            return run_replica(spec, link, guard=guard, on_serving=health.attach)
        finally:
            link.close()
    finally:
        health.close()


def main(spec: WorkerSpec) -> int:
    """Run the worker of a service's container and return its exit code; 5 if the container lacks what it needs."""
    try:
        key_file = os.environ.get(KEY_FILE_VARIABLE, "")
        key = Path(key_file).read_text().strip() if key_file else ""
        return run_serving_pod(spec, key, prepare=lambda: fetch_source(spec))
    except (SpringtideError, OSError) as error:
        sys.stderr.write(f"springtide: {error}\n")
        return EXIT_UNFIT


def _port(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if text and not (text.isdecimal() and int(text) < 1 << 16):
        raise BackendError(f"{variable} is {text!r:.40}, which is no port")
    return int(text or default)
