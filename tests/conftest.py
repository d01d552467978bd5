"""What holds for all tests: drawn examples are the same in every run; `SPRINGTIDE_DRAWS=new` draws others."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", derandomize=False, deadline=None)
settings.load_profile("new" if os.environ.get("SPRINGTIDE_DRAWS") == "new" else "same")
