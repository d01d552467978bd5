"""A stand-in for nvidia-smi on machines without a GPU: it tells of the GPUs that it was made with."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

# The devices of the stub driver, as native/stub gives them.
STUB_UUIDS = tuple(f"GPU-53545542-0000-4000-8000-{number:012x}" for number in range(1, 9))
STUB_MEMORY_MIB = 16384


def install_nvidia_smi(folder: Path, uuids: Sequence[str] = STUB_UUIDS[:2], memory_mib: int = STUB_MEMORY_MIB) -> Path:
    """Write the program into a folder that is put on PATH. It answers the two questions that this platform asks."""
    listed = [f"GPU {number}: Stub GPU (UUID: {uuid})" for number, uuid in enumerate(uuids)]
    queried = [f"{uuid}, {memory_mib}, [N/A], Stub GPU" for uuid in uuids]
    program = folder / "nvidia-smi"
    lines = {name: "\n".join(text) for name, text in (("listed", listed), ("queried", queried))}
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f"  -L) printf '%s\\n' {shlex.quote(lines['listed'])} ;;\n"
        "  --query-gpu=uuid,memory.total,mig.mode.current,name\\ --format=csv,noheader,nounits)\n"
        f"    printf '%s\\n' {shlex.quote(lines['queried'])} ;;\n"
        "  *) exit 2 ;;\n"
        "esac\n"
    )
    program.chmod(0o755)
    return program
