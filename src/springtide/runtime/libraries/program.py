"""Running a whole program whose loop a library runs, as a worker of an elastic job."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType

from springtide.core.errors import InvalidRequest
from springtide.core.workload import Entrypoint, Library
from springtide.runtime.elastic.trainer import Trainer
from springtide.runtime.libraries.loop import LOOP, LibraryLoop
from springtide.runtime.script import run_file

# By library, the packages and the releases with which it is tested.
_TESTED: Mapping[Library, Mapping[str, str]] = MappingProxyType(
    {
        "lightning": MappingProxyType({"lightning": "2.6", "pytorch-lightning": "2.6"}),
        "transformers": MappingProxyType({"transformers": "5.23", "accelerate": "1.15"}),
    }
)
_CALLS = {"lightning": "Lightning's Trainer.fit()", "transformers": "train() of a Trainer of transformers"}
# What tells libraries that other processes train with them.
_WORLD = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_program(trainer: Trainer, entrypoint: Entrypoint) -> None:
    """Run the program to its end: its library believes that it is alone, and `trainer` carries its loop.

    Raises WorkerExit, what the program raises, InvalidRequest for a version that is not tested, and RuntimeError if it
    has trained nothing.
    """
    _check_versions(entrypoint.library)
    LOOP.loop = loop = LibraryLoop(trainer)
    for name in _WORLD:
        os.environ.pop(name, None)
    if entrypoint.library == "transformers":
        from springtide.runtime.libraries.transformers import TrainerFinder

        sys.meta_path.insert(0, TrainerFinder())
    try:
        code = run_file(entrypoint)
    except Exception:
        # The library may have made another error of it.
        if loop.exit is not None:
            raise loop.exit from None
        raise
    if loop.exit is not None:
        raise loop.exit
    if code:
        raise RuntimeError(f"the script ended with exit code {code}")
    if not loop.is_attached:
        raise RuntimeError(
            f"the script ended without {_CALLS[entrypoint.library]}, so that nothing was trained in place; give the "
            "job one number of workers, as --workers 1, to run it as it is"
        )
    loop.end()


def _check_versions(library: Library) -> None:
    for package, release in _TESTED[library].items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            if not version.startswith(f"{release}."):
                raise InvalidRequest(
                    f"{package} {version} is not tested in jobs that are resized in place; install "
                    f"'{package}=={release}.*', or give the job one number of workers, as --workers 1"
                )
