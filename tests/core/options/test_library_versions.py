"""Which installed releases of libraries are tested."""

from __future__ import annotations

import pytest

from springtide.core.options import library_versions
from springtide.core.options.library_versions import untested_package


@pytest.mark.parametrize(
    ("library", "package", "version", "tested"),
    [
        ("lightning", "lightning", "2.6.1", ""),
        ("lightning", "lightning", "2.60.0", "2.6.*"),
        ("lightning", "pytorch-lightning", "1.9.5", "2.6.*"),
        ("transformers", "transformers", "5.23.4", ""),
        ("transformers", "accelerate", "1.9.0", "1.15.*"),
        ("accelerate", "accelerate", "1.15.0", ""),
        ("accelerate", "accelerate", "1.16.0", "1.15.*"),
        ("accelerate", "transformers", "4.0.0", ""),
        # Of packages of the other library nothing is asked, nor for a plain script.
        ("transformers", "lightning", "1.0.0", ""),
        ("", "lightning", "1.0.0", ""),
    ],
)
def test_what_is_installed_and_not_tested_is_told(monkeypatch, library, package, version, tested):
    def version_of(name):
        if name == package:
            return version
        raise library_versions.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(library_versions.importlib.metadata, "version", version_of)
    told = f"{package} {version} is not tested for resizing in place; tested: {tested}" if tested else ""
    assert untested_package(library) == told
