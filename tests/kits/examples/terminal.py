"""The terminal of somebody who follows an example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"


class Terminal:
    """`springtide --state DIR ...` in a process of its own."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def type(self, *words: str, expect: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "springtide", "--state", str(self.state), *words],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == expect, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def ask(self, *words: str) -> dict:
        return json.loads(self.type(*words, "--json"))
