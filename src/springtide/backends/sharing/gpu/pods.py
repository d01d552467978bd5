"""Finds the pod of a process of this node by the names of the process's control groups.

The kubelet creates groups for each pod whose path contains the pod's uid; a container can neither leave nor rename
them unless it may write the node's control groups. It may create any groups inside its own, so the outermost name
counts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from pathlib import Path

# `pod<uid>` under the cgroupfs driver; `kubepods-burstable-pod<uid with underscores>.slice` under systemd's.
_POD = re.compile(r"pod([0-9a-fA-F]{8}[-_][0-9a-fA-F]{4}[-_][0-9a-fA-F]{4}[-_][0-9a-fA-F]{4}[-_][0-9a-fA-F]{12})")
_PART = re.compile(r"(?:kubepods(?:-[a-z]+)*-)?pod[0-9a-fA-F_-]{36}(?:\.slice)?")


def uids_of(groups: str) -> list[str]:
    """The uids of pods in the text of /proc/<pid>/cgroup, the outermost of each hierarchy first."""
    found = []
    for line in groups.splitlines():
        path = line.split(":", 2)[-1]
        for part in path.split("/"):
            match = _POD.search(part) if _PART.fullmatch(part) else None
            if match is not None:
                found.append(match[1].replace("_", "-").lower())
    return found


def pod_of(pid: int, known: Collection[str], proc: Path = Path("/proc")) -> str | None:
    """The known pod that the process belongs to; None if to none or to several, which no container's process does."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    outermost = set()
    for line in groups.splitlines():
        uid = next((uid for uid in uids_of(line) if uid in known), None)
        if uid is not None:
            outermost.add(uid)
    return outermost.pop() if len(outermost) == 1 else None


def pods_seen(proc: Path = Path("/proc")) -> set[str]:
    """The uids of all pods with a process that is visible from here."""
    found: set[str] = set()
    for path in proc.glob("[0-9]*/cgroup"):
        # Processes may end during this loop.
        with contextlib.suppress(OSError):
            found.update(uids_of(path.read_text(errors="replace")))
    return found
