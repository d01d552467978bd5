"""What the description of the API says in words alone, for schemathesis: a source is Python."""

from __future__ import annotations

import schemathesis
from hypothesis import strategies

SOURCES = (
    "def fit(ctx):\n    pass\n",
    "class Echo:\n    def predict(self, x: int) -> int:\n        return x\n",
    "x = 1\n",
)

schemathesis.openapi.format("python", strategies.sampled_from(SOURCES))
