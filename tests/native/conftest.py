"""The stub driver and the library, built once in a session, whoever uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from native_build import Native, RunProgram

from springtide.backends.gpu.build import find_compiler, find_headers
from springtide.core.errors import BackendError


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a session."""
    base = factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    """Everything native without sanitizers."""
    try:
        find_compiler()
        headers = find_headers()
    except BackendError as error:
        pytest.skip(f"the native parts cannot be compiled here: {error}")
    return Native(shared_folder(tmp_path_factory) / "native", headers)


@pytest.fixture(scope="session")
def native_asan(native: Native, tmp_path_factory: pytest.TempPathFactory) -> Native:
    """The same, under AddressSanitizer and UndefinedBehaviorSanitizer."""
    return Native(shared_folder(tmp_path_factory) / "native-asan", native.headers, sanitize=True)


@pytest.fixture(scope="session")
def run_program(native: Native) -> RunProgram:
    """Runs a C program against the stub driver with the library preloaded."""
    return native.run
