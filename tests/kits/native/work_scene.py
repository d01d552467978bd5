"""Scenes of the C programs about work and graphs: each plays its own daemon and says in JSON what was counted."""

from __future__ import annotations

from pathlib import Path

from kits.native.native_build import Native


def play(
    native: Native, tmp_path: Path, program: str, scene: str = "", *, stub: Path | None = None, **env: object
) -> dict[str, int]:
    """Run one scene on the stub driver (or another one of the stubs) with the library preloaded."""
    around = {"SPRINGTIDE_GPU_SOCKET": tmp_path / "s", **env}
    outcome = native.run(program, *([scene] if scene else []), env=around, stub=stub)
    found: dict[str, int] = outcome.json()
    return found
