"""Pictures of pages that a test was asked to keep."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kits.end_to_end.browser import (
    Browser,
)

PICTURES = os.environ.get("SPRINGTIDE_PICTURES", "")
# How long the last minutes are before somebody looks at the pictures.
PICTURES_S = float(os.environ.get("SPRINGTIDE_PICTURES_S", "5"))


def keep_picture(browser: Browser, name: str, place: str = "#sharing") -> None:
    if PICTURES:
        time.sleep(PICTURES_S)
        browser.evaluate(f"document.querySelector('{place}').scrollIntoView()")
        browser.screenshot(Path(PICTURES) / f"{name}.png")
