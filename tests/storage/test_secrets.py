"""Values of secrets on disk: for their owner alone, under a name that tells nothing, for as long as they are kept."""

from __future__ import annotations

import math
import stat
from pathlib import Path

import pytest

from springtide.core.errors import StorageError
from springtide.storage.secrets import folders_with_secrets, keep_secrets, read_secrets, remove_secrets, write_secrets

VALUES = {"TOKEN": "a value of its own", "OTHER": "ä\nb"}


def test_what_is_written_is_read_and_private(tmp_path: Path) -> None:
    reference = write_secrets(tmp_path / "job", VALUES)
    assert read_secrets(tmp_path / "job", reference) == VALUES
    path = tmp_path / "job" / "secrets" / reference
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    # The name is drawn: the same values have another one elsewhere.
    assert write_secrets(tmp_path / "other", VALUES) != reference


def test_the_same_values_keep_their_reference(tmp_path: Path) -> None:
    kept = keep_secrets(tmp_path, VALUES)
    assert kept is not None
    assert kept.names == ("OTHER", "TOKEN")
    assert keep_secrets(tmp_path, dict(reversed(VALUES.items())), kept) == kept
    changed = keep_secrets(tmp_path, {**VALUES, "TOKEN": "another"}, kept)
    assert changed is not None
    assert changed.reference != kept.reference
    assert keep_secrets(tmp_path, {}) is None


def test_what_cannot_be_read_is_told_without_a_value(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read: No such file or directory; submit it anew"):
        read_secrets(tmp_path, "0" * 32)
    reference = write_secrets(tmp_path, VALUES)
    (tmp_path / "secrets" / reference).write_text('{"TOKEN": "a value', encoding="utf-8")
    with pytest.raises(StorageError, match="are damaged") as refusal:
        read_secrets(tmp_path, reference)
    assert "a value" not in str(refusal.value)


def test_what_is_removed(tmp_path: Path) -> None:
    work_dir = tmp_path / "service"
    first, second = write_secrets(work_dir, VALUES), write_secrets(work_dir, {"A": "1"})
    assert folders_with_secrets(tmp_path) == [work_dir]
    remove_secrets(work_dir, [], before_unix_s=0.0)
    remove_secrets(work_dir, [second])
    assert read_secrets(work_dir, second) == {"A": "1"}
    with pytest.raises(StorageError):
        read_secrets(work_dir, first)
    remove_secrets(work_dir, before_unix_s=math.inf)
    remove_secrets(work_dir)
    assert not (work_dir / "secrets").exists()
    assert folders_with_secrets(tmp_path) == []
