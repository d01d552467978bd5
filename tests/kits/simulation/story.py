"""What a run of the models did, as text."""

from __future__ import annotations

import os
import subprocess
import sys


def story(seed: int, policy: str, hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "springtide_studies.fault_seeds", "--seed", str(seed), "--policy", policy],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout
