"""Running a whole program whose loop a library runs, as a worker of an elastic job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from springtide.core.workload import Entrypoint, Library
from springtide.runtime.elastic.trainer import Trainer
from springtide.runtime.libraries.import_hook import patch_module
from springtide.runtime.libraries.loop import LOOP, LibraryLoop, NotDivisible
from springtide.runtime.libraries.part_loader import watch_loaders
from springtide.runtime.libraries.turns import watch_clipping
from springtide.runtime.script import WORLD_VARIABLES, run_file

_CALLS: Mapping[Library, str] = MappingProxyType(
    {
        "lightning": "Lightning's Trainer.fit() or a loop over what fabric.setup_dataloaders() has returned",
        "transformers": "train() of a Trainer of transformers",
        "accelerate": "a loop over a DataLoader that accelerator.prepare() has returned",
    }
)


class CannotBeResized(Exception):
    """What the program does cannot be divided. The text says why."""


def run_program(trainer: Trainer, entrypoint: Entrypoint) -> None:
    """Run the program to its end: its library believes that it is alone, and `trainer` carries its loop.

    Raises WorkerExit, CannotBeResized, what the program raises, and RuntimeError if it has trained nothing.
    """
    LOOP.loop = loop = LibraryLoop(trainer)
    for name in WORLD_VARIABLES:
        os.environ.pop(name, None)
    _install(entrypoint.library, loop)
    try:
        code = run_file(entrypoint)
    except Exception as error:
        # The library may have made another error of it.
        if loop.exit is not None:
            raise loop.exit from None
        if isinstance(error, NotDivisible):
            raise CannotBeResized(error.reason) from error
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
    if loop.ends_by_program:
        loop.agree_on_end()
    loop.end()


def _install(library: Library, loop: LibraryLoop) -> None:
    """Have the library's loop run by `loop` once the program imports it."""
    watch_clipping(lambda parameters: loop.before_clip(parameters))
    watch_loaders(loop.note_other_batch)
    if library == "lightning":
        # For its Trainer Lightning asks by itself.
        from springtide.runtime.libraries.fabric import patch_fabric

        for package in ("lightning.fabric", "lightning_fabric"):
            patch_module(f"{package}.fabric", lambda module: patch_fabric(module, loop))
    elif library == "transformers":
        from springtide.runtime.libraries.transformers import patch_trainer

        patch_module("transformers.trainer", patch_trainer)
    elif library == "accelerate":
        from springtide.runtime.libraries.accelerate import patch_accelerator

        def patch(module: Any) -> None:
            patch_accelerator(module, loop)

        patch_module("accelerate.accelerator", patch)
