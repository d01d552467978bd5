"""Where a platform of this machine keeps its state, and how that was found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

# What the first start of a platform makes in its state directory.
_TOKEN = "token"


class StateDirectory(NamedTuple):
    """A state directory. `note` says why it is not where the environment would have it; empty where it is."""

    path: Path
    note: str = ""


def default_state_directory() -> Path:
    """SPRINGTIDE_STATE, else `springtide` in XDG_STATE_HOME, else ~/.local/state/springtide.

    A platform at the last of these is still found where XDG_STATE_HOME names a place that has none.
    """
    return find_state_directory().path


def find_state_directory() -> StateDirectory:
    """The state directory that default_state_directory returns, with a note where an earlier platform decides it."""
    given = os.environ.get("SPRINGTIDE_STATE")
    if given:
        return StateDirectory(Path(given).expanduser())
    usual = Path.home() / ".local" / "state" / "springtide"
    base = Path(os.environ.get("XDG_STATE_HOME") or "")
    # The XDG specification has relative paths ignored.
    if not base.is_absolute():
        return StateDirectory(usual)
    wanted = base / "springtide"
    if _has_platform(wanted) or not _has_platform(usual):
        return StateDirectory(wanted)
    return StateDirectory(
        usual,
        f"there is a platform in {usual} and none in {wanted}, where XDG_STATE_HOME would have it; to move it, stop it "
        f"(`springtide down`) and move the directory",
    )


def _has_platform(directory: Path) -> bool:
    return (directory / _TOKEN).exists()
