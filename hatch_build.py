"""What building a wheel does beyond packing: the sources of the CUDA interposition library, and the library itself.

Where there is no C compiler, or no cuda.h, the wheel is made without the library and says so: where it is installed the
library is then built at its first use on a machine with GPUs.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = "springtide/backends/sharing/gpu"


class InterpositionLibrary(BuildHookInterface):  # type: ignore[type-arg]
    """Adds native/ and, where it can be built, libspringtide_gpu.so to a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is packed. One that only points to this folder (`pip install -e`) needs nothing."""
        if version == "editable":
            return
        root = Path(self.root)
        included = build_data["force_include"]
        for folder in ("include", "src"):
            included[str(root / "native" / folder)] = f"{PLACE}/native/{folder}"
        sys.path.insert(0, str(root / "src"))
        try:
            # Nothing but the standard library is there while a wheel is built; these two need no more.
            from springtide.backends.sharing.gpu.library import LIBRARY_NAME, compile_library
            from springtide.core.errors import BackendError
        finally:
            sys.path.pop(0)
        self._folder = tempfile.TemporaryDirectory(prefix="springtide-wheel-")
        library = Path(self._folder.name) / LIBRARY_NAME
        try:
            compile_library(library)
        except BackendError as error:
            self.app.display_warning(
                f"this wheel comes without {LIBRARY_NAME}, which is built at its first use where there are a C "
                f"compiler and springtide[gpu]: {error}"
            )
            return
        included[str(library)] = f"{PLACE}/lib/{LIBRARY_NAME}"
        # Any Python 3 takes it, but only machines of this kind.
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After the wheel is packed."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()
