"""The places at which a control plane can be killed."""

from __future__ import annotations

LOOP_CRASH_POINTS = (
    "journal.append.before",
    "journal.append.after",
    "loop.acknowledge.before",
    "loop.acknowledge.after",
    *(
        f"loop.start.{action}.{side}"
        for action in ("StartReplica", "StopReplica", "ResizeJob", "PreemptJob", "EndJob")
        for side in ("before", "after")
    ),
)
# Those that only a platform with pools reaches.
LOAN_CRASH_POINTS = tuple(
    f"loop.start.{action}.{side}" for action in ("DrainNode", "LabelNode") for side in ("before", "after")
)
