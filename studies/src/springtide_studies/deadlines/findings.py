"""Findings of ElasticFlow's evaluation about the order of policies, and how they are held against values from here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

# EDF twice: as the paper describes it, and as its numbers were made, with up to 64 devices even where that is slower.
EDF_SHOWN = "edf:caps=no"
# The published simulator is right to 3 % (section 6.1): policies that are closer than that have no order there.
CLOSE = 0.03


class FigureFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something the paper finds, and whether it holds here: what speaks against it, and what is too close to tell."""

    text: str
    against: tuple[str, ...] = ()
    close: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.against


def ordered(text: str, pairs: Sequence[tuple[str, str]], values: Mapping[str, float | None]) -> FigureFinding:
    """Whether the second of each pair has the higher value here; within CLOSE of each other it cannot be told."""
    against, close = [], []
    for low, high in pairs:
        low_here, high_here = values.get(low), values.get(high)
        if low_here is None or high_here is None:
            against += [f"{policy} has no value" for policy in (low, high) if values.get(policy) is None]
        elif low_here > high_here + CLOSE:
            against.append(f"{low} {low_here:.3f} is above {high} {high_here:.3f}")
        elif low_here > high_here - CLOSE:
            close.append(f"{low} {low_here:.3f} and {high} {high_here:.3f}")
    return FigureFinding(text=text, against=tuple(dict.fromkeys(against)), close=tuple(close))


def remarks(finding: Mapping[str, Any]) -> str:
    """What speaks against a finding and what is too close to tell, in brackets."""
    parts = list(finding["against"])
    if finding["close"]:
        parts.append(f"within {CLOSE:.0%} of each other: " + ", ".join(finding["close"]))
    return f" ({'; '.join(parts)})" if parts else ""
