"""A program that does not train by its library, or with a version that is not tested, ends with a sentence."""

from __future__ import annotations

import pytest

from kits.runtime.library_plane import of_library
from springtide.core.errors import InvalidRequest
from springtide.core.wire.workers import Failed
from springtide.runtime.libraries import program


def failure(plane, library):
    of_library(plane, library).start("a")
    plane.wait(lambda: plane.of(Failed, "a"), "Failed")
    return plane.of(Failed, "a")[0].error


@pytest.mark.slow
def test_a_program_that_trains_nothing_fails(make_plane):
    assert "without Lightning's Trainer.fit()" in failure(make_plane("print('no loop')"), "lightning")


@pytest.mark.slow
def test_what_the_program_raises_and_its_exit_code_are_told(make_plane):
    assert failure(make_plane("raise KeyError('rate')"), "transformers").startswith("KeyError: 'rate' (user_code.py:1)")
    assert "exit code 3" in failure(make_plane("import sys\nsys.exit(3)"), "transformers")


@pytest.mark.parametrize(
    ("library", "package", "version", "is_tested"),
    [
        ("lightning", "lightning", "2.6.1", True),
        ("lightning", "lightning", "2.60.0", False),
        ("lightning", "pytorch-lightning", "1.9.5", False),
        ("transformers", "transformers", "5.23.4", True),
        ("transformers", "accelerate", "1.9.0", False),
        # Of packages of the other library nothing is asked.
        ("transformers", "lightning", "1.0.0", True),
    ],
)
def test_versions_that_are_not_tested_are_refused_with_what_to_do(monkeypatch, library, package, version, is_tested):
    def version_of(name):
        if name == package:
            return version
        raise program.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(program.importlib.metadata, "version", version_of)
    if is_tested:
        program._check_versions(library)
    else:
        with pytest.raises(InvalidRequest, match=rf"{package} {version} is not tested .*--workers 1"):
            program._check_versions(library)
