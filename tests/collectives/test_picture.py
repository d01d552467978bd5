"""The picture of the schedules is that of the schedules as they are."""

from __future__ import annotations

import runpy
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_the_picture_is_up_to_date():
    drawn = runpy.run_path(str(IMAGES / "draw_collectives.py"))["draw"]()
    assert (IMAGES / "collectives.svg").read_text(encoding="utf-8") == drawn
