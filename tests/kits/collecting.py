"""What a run of tests need not import. Each worker of a lane collects all of the lane's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over a file without the one mark that is asked for (`-m slow`): neither it nor a conftest names the mark."""
    mark = str(config.getoption("markexpr"))
    if collection_path.suffix != ".py" or not mark.isidentifier():
        return None
    folders = [folder for folder in collection_path.parents if folder.is_relative_to(config.rootpath)]
    files = [collection_path, *(folder / "conftest.py" for folder in folders)]
    is_named = any(f"mark.{mark}" in file.read_text(encoding="utf-8") for file in files if file.exists())
    return None if is_named else True
