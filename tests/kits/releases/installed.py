"""A wheel installed in an environment of its own, beside what else is installed here."""

from __future__ import annotations

import io
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def build_wheels(folder: Path, *sources: Path) -> dict[str, Path]:
    """The wheels of these source trees, by the name of their distribution."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(folder), *map(str, sources)], check=True)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def install(wheel: Path, folder: Path) -> Path:
    """The interpreter of an environment with the wheel and links to what else is installed here."""
    venv.create(folder, symlinks=True)
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "springtide" not in path.name:
            (site / path.name).symlink_to(path)
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    return folder / "bin" / "python"


def install_revision(revision: str, folder: Path) -> Path:
    """The interpreter of an environment with the product as it was at a revision. Skips where that is not known."""
    found = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"the revision {revision} is not in this clone: {found.stderr.decode().strip()}")
    source = folder / "source"
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(source, filter="data")
    return install(build_wheels(folder / "wheels", source)["springtide"], folder / "installed")
