"""What a job leaves behind, as users are told."""

from __future__ import annotations

import msgspec


class ArtifactStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One file that a job left: its name (a path below the job's artifacts) and its size.

    `modified_unix_s` is when it was last written to, where that is known. `sha256` is the digest of its content
    (hexadecimal), where that was asked for; empty as well for a file that is being written.
    """

    name: str
    num_bytes: int
    modified_unix_s: float | None = None
    sha256: str = ""
