"""The executor on the processes of one machine: LocalExecutor, and the devices it finds there."""

from __future__ import annotations

from springtide.backends.local.devices import discover_node, split_node
from springtide.backends.local.driver import CRASH_POINTS
from springtide.backends.local.executor import LocalExecutor

__all__ = ["CRASH_POINTS", "LocalExecutor", "discover_node", "split_node"]
