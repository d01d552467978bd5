"""The standard output of a program that goes through what is over."""

from __future__ import annotations

import os
import sys
from typing import Any


class QuietOutput:
    """Drops what the program writes to its standard output while it is quiet."""

    def __init__(self) -> None:
        self._before: Any = None

    def set(self, is_quiet: bool) -> None:
        """Begin or cease to drop it."""
        if is_quiet and self._before is None:
            self._before, sys.stdout = sys.stdout, open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        elif not is_quiet and self._before is not None:
            sys.stdout.close()
            sys.stdout, self._before = self._before, None
