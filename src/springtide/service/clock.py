"""The platform's clock: it goes on by the machine's boot clock, and asks the wall clock only across a reboot.

Each start and each hour leave an anchor in the journal: the same moment on all clocks. A wall clock that jumps is
reported, and changes nothing that is planned or charged.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from springtide.core.events import ClockAnchored
from springtide.core.quantities import format_duration

# A longer time down, by the wall clock, is taken for a clock that is wrong.
LONGEST_DOWN_S = 7 * 86400.0
# A time down up to this is believed of a wall clock that is not synchronised, too.
UNCHECKED_DOWN_S = 3600.0
# The wall clock may drift and be set right by so much without a word.
MAX_DRIFT_S = 60.0
ANCHOR_EVERY_S = 3600.0
# For so long after a reboot a wall clock that is not synchronised is waited for, if it says more.
SYNCHRONISE_S = 600.0
_TIME_ERROR = 5


class MachineClocks(NamedTuple):
    """What the machine's clocks say: the boot it is in (empty: unknown), the seconds since, and Unix time.

    `is_synchronised` is what the kernel says about Unix time; None where it does not say.
    """

    boot_id: str
    boot_s: float
    unix_s: float
    is_synchronised: bool | None


def read_machine() -> MachineClocks:
    """This machine's clocks now."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot_id = ""
    return MachineClocks(boot_id, time.clock_gettime(time.CLOCK_BOOTTIME), time.time(), _is_synchronised())


class PlatformClock:
    """Seconds since the platform was created, monotonic across restarts. Thread-safe.

    `began_unix_s` is when that was, and `lowest_s` the time of the journal's newest step. Until `resume` is called the
    clock goes on from there.
    """

    def __init__(self, began_unix_s: float, lowest_s: float, read: Callable[[], MachineClocks] = read_machine) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._boot_s, self._start_s = read().boot_s, lowest_s
        # Unix time less platform time, as far as it can be trusted.
        self._offset_s = began_unix_s
        self._anchored_at_s = lowest_s
        # Since when, in platform time, it is not known how long the platform was down, and the wall clock was wrong.
        self._doubted_at_s: float | None = None
        self._jumped_at_s: float | None = None
        self._notice = ""

    def now_s(self) -> float:
        """The present time."""
        return self._platform_s(self._read().boot_s)

    @property
    def wall_offset_s(self) -> float:
        """What has to be added to platform time to get Unix time."""
        return self._offset_s

    @property
    def notice(self) -> str:
        """What is wrong with the machine's wall clock, and what follows; empty if nothing is."""
        return self._notice

    def resume(self, anchor: ClockAnchored | None, lowest_s: float) -> ClockAnchored:
        """Continue from the newest anchor of the journal and the time of its last step; return the anchor of now.

        Within one boot the boot clock tells how long the platform was down. After a reboot the wall clock does, if
        what it says can be.
        """
        with self._lock:
            now, skipped_s = self._read(), 0.0
            if anchor is not None:
                self._offset_s = anchor.unix_s - anchor.at_s
            if anchor is not None and anchor.boot_id == now.boot_id != "":
                self._set(now, max(lowest_s, anchor.at_s + now.boot_s - anchor.boot_s))
                self._doubted_at_s = anchor.at_s if anchor.is_in_doubt else None
            elif anchor is None and lowest_s == 0.0:
                self._offset_s = now.unix_s - self._platform_s(now.boot_s)
            else:
                down_s = now.unix_s - self._offset_s - lowest_s
                if _can_be(down_s, is_settled=now.is_synchronised is not False):
                    skipped_s = max(0.0, down_s)
                else:
                    self._doubted_at_s = lowest_s
                self._set(now, lowest_s + skipped_s)
            self._compare(now)
            return self._anchor(now, skipped_s)

    def review(self) -> ClockAnchored | None:
        """Look at the wall clock again, about once a minute. Returns an anchor to record, or None."""
        with self._lock:
            now, skipped_s = self._read(), 0.0
            platform_s = self._platform_s(now.boot_s)
            if self._doubted_at_s is not None:
                behind_s = now.unix_s - self._offset_s - platform_s
                has_waited = platform_s - self._doubted_at_s >= SYNCHRONISE_S
                if _can_be(behind_s, is_settled=has_waited or now.is_synchronised is not False):
                    self._doubted_at_s, skipped_s = None, max(0.0, behind_s)
                    self._set(now, platform_s + skipped_s)
            self._compare(now)
            if skipped_s == 0.0 and platform_s - self._anchored_at_s < ANCHOR_EVERY_S:
                return None
            return self._anchor(now, skipped_s)

    def anchor(self) -> ClockAnchored:
        """The present moment on all clocks."""
        with self._lock:
            return self._anchor(self._read(), 0.0)

    def _platform_s(self, boot_s: float) -> float:
        return self._start_s + boot_s - self._boot_s

    def _set(self, now: MachineClocks, platform_s: float) -> None:
        self._boot_s, self._start_s = now.boot_s, platform_s

    def _compare(self, now: MachineClocks) -> None:
        """Compare the wall clock with platform time."""
        platform_s = self._platform_s(now.boot_s)
        jump_s = now.unix_s - self._offset_s - platform_s
        if self._doubted_at_s is not None:
            self._notice = (
                f"after a reboot the wall clock says that the platform was down for {_signed(jump_s)}, which is not "
                "believed: platform time goes on from its last step, and is put right once the clock is"
            )
            return
        if abs(jump_s) > MAX_DRIFT_S:
            self._jumped_at_s = platform_s if self._jumped_at_s is None else self._jumped_at_s
            has_stayed = platform_s - self._jumped_at_s >= ANCHOR_EVERY_S and now.is_synchronised is not False
            if not has_stayed:
                self._notice = (
                    f"the wall clock jumped by {_signed(jump_s)}: platform time goes on by the machine's boot clock"
                )
                return
        self._offset_s += jump_s
        self._jumped_at_s, self._notice = None, ""

    def _anchor(self, now: MachineClocks, skipped_s: float) -> ClockAnchored:
        at_s = self._anchored_at_s = self._platform_s(now.boot_s)
        return ClockAnchored(
            boot_id=now.boot_id,
            boot_s=now.boot_s,
            unix_s=at_s + self._offset_s,
            at_s=at_s,
            skipped_s=skipped_s,
            is_in_doubt=self._doubted_at_s is not None,
        )


def _can_be(down_s: float, *, is_settled: bool) -> bool:
    return -MAX_DRIFT_S <= down_s <= (LONGEST_DOWN_S if is_settled else UNCHECKED_DOWN_S)


def _signed(duration_s: float) -> str:
    size_s = abs(duration_s)
    size = f"{size_s / 86400.0:.0f} days" if size_s >= 2 * 86400.0 else format_duration(size_s)
    return f"{'-' if duration_s < 0 else '+'}{size}"


def _is_synchronised() -> bool | None:
    """Whether the kernel takes the wall clock for synchronised; None where it does not say."""
    try:
        # struct timex is 208 bytes; all zero only reads.
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(256))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _TIME_ERROR
