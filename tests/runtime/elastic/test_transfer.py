"""What a member meets when the place where its group meets cannot be written, or is gone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from springtide.core.errors import PeerLost
from springtide.runtime.elastic.group import Group
from springtide.runtime.elastic.training_cursor import Cursor
from springtide.runtime.elastic.transfer import synchronise


class FullDisk:
    """A store whose directory takes nothing from the `num_before`-th call on."""

    def __init__(self, num_before: int) -> None:
        self.num_left = num_before

    def _use(self) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("the meeting place is gone: No space left on device")

    def set(self, key: str, value: str) -> None:
        self._use()

    def check(self, keys: list[str]) -> bool:
        self._use()
        return True

    def get(self, key: str) -> bytes:
        self._use()
        return b"0"


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("num_before", range(5))
def test_a_meeting_place_on_a_full_disk_breaks_the_group_and_not_the_job(num_before, has_state):
    group = SimpleNamespace(rank=0, world_size=2, store=FullDisk(num_before))
    for name in ("use_store", "set_flag"):
        setattr(group, name, getattr(Group, name).__get__(group))
    with pytest.raises(PeerLost, match="No space left"):
        synchronise(group, None, None, Cursor() if has_state else None, lambda: True, lambda: None)
