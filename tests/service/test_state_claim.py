"""One platform at a time has a state directory, also if the directory is removed below it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from springtide.core.errors import BackendError
from springtide.service.state_claim import StateClaim


def test_another_one_is_told_who_has_the_directory(tmp_path: Path) -> None:
    first = StateClaim(tmp_path)
    address = {"pid": os.getpid(), "url": "http://127.0.0.1:8787"}
    (tmp_path / "platform.json").write_text(json.dumps(address))
    with pytest.raises(BackendError) as refused:
        StateClaim(tmp_path)
    assert str(refused.value) == (
        f"another platform (pid {os.getpid()}, http://127.0.0.1:8787) runs on {tmp_path}; stop it with `springtide "
        "down` or choose another --state"
    )
    first.close()
    StateClaim(tmp_path).close()


@pytest.mark.skipif(sys.platform != "linux", reason="it has no abstract sockets")
def test_a_directory_that_was_removed_below_a_platform_is_still_in_use(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    first = StateClaim(state_dir)
    shutil.rmtree(state_dir)
    state_dir.mkdir()
    with pytest.raises(BackendError, match=f"pid {os.getpid()}.*stop it with `kill {os.getpid()}`"):
        StateClaim(state_dir)
    StateClaim(tmp_path).close()
    first.close()
    StateClaim(state_dir).close()
