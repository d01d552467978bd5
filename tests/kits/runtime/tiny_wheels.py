"""Wheels of one module, made without a network or a build."""

from __future__ import annotations

import zipfile
from pathlib import Path


def make_wheel(folder: Path, name: str, version: str, *, needs: tuple[str, ...] = (), num_bytes: int = 0) -> Path:
    """A wheel of the module `name`, which has its version and so many bytes of text."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        f"{name}.py": f"VERSION = {version!r}\n" + "#" * num_bytes,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(file, text)
    return path


def requirements_from(folder: Path, *lines: str) -> list[str]:
    """Requirements that only the wheels of a folder answer."""
    return ["--no-index", f"--find-links {folder}", *lines]
