"""The stub driver and the library, built once in a session, whoever uses them.

Every test that asks for `native` runs a second time in the slow lane, with everything built under AddressSanitizer and
UndefinedBehaviorSanitizer; a module that says SANITIZED = False is left out of that.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kits.native.native_build import BROKEN_TREE, SHARED_BUILD, Native, RunProgram
from springtide.backends.sharing.gpu.build import find_compiler, find_headers
from springtide.core.errors import BackendError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "native" in metafunc.fixturenames:
        ways: list[object] = ["plain"]
        if getattr(metafunc.module, "SANITIZED", True):
            ways.append(pytest.param("sanitized", marks=pytest.mark.slow))
        metafunc.parametrize("native", ways, indirect=True, scope="session")


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture(scope="session")
def cuda_headers() -> Path:
    """The folder with cuda.h; without it or without a compiler the test is skipped."""
    try:
        find_compiler()
        return find_headers()
    except BackendError as error:
        pytest.skip(f"the native parts cannot be compiled here: {error}")


@pytest.fixture(scope="session")
def native(request: pytest.FixtureRequest, native_folder: Path, cuda_headers: Path) -> Native:
    """Everything native: as it is used, or under sanitizers. A test of broken builds names a tree of its own."""
    tree = os.environ.get(BROKEN_TREE)
    if tree is not None:
        shared = Path(os.environ[SHARED_BUILD])
        return Native(native_folder / "native-broken", cuda_headers, native=Path(tree) / "native", shared=shared)
    is_sanitized = request.param == "sanitized"
    return Native(native_folder / f"native-{request.param}", cuda_headers, sanitize=is_sanitized)


@pytest.fixture(scope="session")
def native_asan(native_folder: Path, cuda_headers: Path) -> Native:
    """Everything native, under sanitizers whatever the lane."""
    return Native(native_folder / "native-sanitized", cuda_headers, sanitize=True)


@pytest.fixture(scope="session")
def run_program(native: Native) -> RunProgram:
    """Runs a C program against the stub driver with the library preloaded."""
    return native.run
