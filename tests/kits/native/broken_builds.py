"""Every deliberately broken build of the interposition library: the tables of kits.native.broken."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple


class Broken(NamedTuple):
    """One point of the source and the test that guards it."""

    what: str
    file: str
    old: str
    new: str
    test: str


def all_broken() -> list[list[Broken]]:
    """Those of each file."""
    names = sorted(path.stem for path in Path(__file__).with_name("broken").glob("*.py"))
    return [[Broken(*each) for each in importlib.import_module(f"kits.native.broken.{name}").BROKEN] for name in names]


BROKEN_BY_FILE = all_broken()
ALL_BROKEN = [broken for of_file in BROKEN_BY_FILE for broken in of_file]
