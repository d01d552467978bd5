"""What an earlier control plane's secrets come to at the next start; the rest is in tests/end_to_end."""

from __future__ import annotations

from pathlib import Path

from kits.service.platform_double import PlatformDouble
from springtide.service.secrets_keeper import SecretsKeeper
from springtide.storage.secrets import folders_with_secrets, write_secrets


def test_what_belongs_to_no_workload_is_removed_at_the_start(tmp_path: Path) -> None:
    platform = PlatformDouble(tmp_path)
    left = platform.workload_dir("left-over")
    write_secrets(left, {"TOKEN": "value"})
    SecretsKeeper(platform).sweep()
    assert folders_with_secrets(left.parent) == []
