"""How much of a sweep is played: all of it, or in CI a fixed part (see SAMPLE in the Makefile)."""

from __future__ import annotations

import os

# Every how manieth place of a sweep over crash points and steps is tried.
STRIDE = int(os.environ.get("SPRINGTIDE_SWEEP_STRIDE", "1"))
