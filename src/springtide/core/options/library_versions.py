"""Which releases of libraries are tested in jobs that are resized in place, and whether those installed here are."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from types import MappingProxyType

from springtide.core.workload import Library

# By library, its packages and the release of each with which it is tested.
TESTED_RELEASES: Mapping[Library, Mapping[str, str]] = MappingProxyType(
    {
        "lightning": MappingProxyType({"lightning": "2.6", "pytorch-lightning": "2.6", "lightning-fabric": "2.6"}),
        "transformers": MappingProxyType({"transformers": "5.23", "accelerate": "1.15"}),
        "accelerate": MappingProxyType({"accelerate": "1.15"}),
    }
)


def untested_package(library: Library) -> str:
    """`lightning 2.7.0 is not tested for resizing in place; tested: 2.6.*`, of what this interpreter has installed.

    Empty if all of the library's packages that are installed are tested releases.
    """
    for package, release in TESTED_RELEASES.get(library, {}).items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not version.startswith(f"{release}."):
            return f"{package} {version:.60} is not tested for resizing in place; tested: {release}.*"
    return ""
