"""Fixtures for tests with real worker processes."""

from __future__ import annotations

import pytest

from kits.runtime.runtime_plane import TRAIN, Plane, ZygoteProcess, make_job


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    zygote = ZygoteProcess(tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()


@pytest.fixture
def make_plane(zygote, tmp_path):
    """A function that makes a plane with a fresh work directory."""
    planes = []

    def make(source=TRAIN, *, step_s=0.0, optimizer="sgd", environment=None, work_dir=None, lease_s=30.0, **fields):
        directory = work_dir or tmp_path / f"w{len(planes)}"
        directory.mkdir(exist_ok=True)
        variables = {"STEP_S": str(step_s), "OPTIMIZER": optimizer, **(environment or {})}
        job = make_job(directory, source, **fields)
        planes.append(Plane(zygote.path, directory, job, environment=variables, lease_s=lease_s))
        return planes[-1]

    yield make
    for plane in planes:
        plane.close()
