"""The versions of other packages that Springtide is tested with, and what is installed instead of them."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from springtide.cli.doctor.functions import Check

# By package. Of torch it is the release that springtide[runtime] pins; the others are needed by nothing.
TESTED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "torch": ("2.13.0",),
        "transformers": ("5.23.0",),
        "lightning": ("2.6.6",),
        "accelerate": ("1.15.0",),
    }
)
_PIN = re.compile(r"torch\s*==\s*(?P<version>[^;\s,]+)")


def check_torch_version(version: str) -> Check:
    """The version of the torch that can be imported, against the tested ones and the one that is pinned."""
    pinned = pinned_torch()
    if _release(version) in (*TESTED["torch"], pinned):
        return Check("torch", "ok", version)
    mend = "pip install 'springtide[runtime]'"
    if pinned and _came_along("torch"):
        told = f"{version}, and springtide[runtime] pins {pinned}: the installation of another package has replaced it"
        return Check("torch", "warn", told, f"{mend}; give a job its packages with --requirements instead")
    return Check("torch", "warn", f"{version} is not tested; tested: {', '.join(TESTED['torch'])}", mend)


def check_library_versions() -> Iterator[Check]:
    """The libraries that are installed and of which some versions are tested, torch excepted."""
    for name, tested in TESTED.items():
        version = _installed(name)
        if name == "torch" or version is None:
            continue
        if _release(version) in tested:
            yield Check(name, "ok", version)
        else:
            told = f"{version} is not tested; tested: {', '.join(tested)}"
            yield Check(name, "warn", told, f"if it makes trouble: pip install '{name}=={tested[-1]}'")


def pinned_torch() -> str:
    """The release that springtide's own metadata pins; empty if it pins none, or is not installed."""
    try:
        required = importlib.metadata.requires("springtide") or ()
    except importlib.metadata.PackageNotFoundError:
        return ""
    found = (match["version"] for line in required if (match := _PIN.match(line)))
    return next(found, "")


def _release(version: str) -> str:
    """The version without the build that it is of: 2.13.0+cpu is 2.13.0."""
    return version.partition("+")[0]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _came_along(name: str) -> bool:
    """Whether the package was installed because another one needs it, and not because it was asked for."""
    try:
        return importlib.metadata.distribution(name).read_text("REQUESTED") is None
    except importlib.metadata.PackageNotFoundError:
        return False
