"""The tide: how many devices services needed, over many days, as the highest of each bin of a day."""

from __future__ import annotations

import msgspec

DAY_S = 86_400.0
# Four weeks, so that a week's season is seen a few times.
MAX_DAYS = 28


class Tide(msgspec.Struct, frozen=True, kw_only=True):
    """The past of a platform's need for serving devices; bins are counted from the platform's second 0.

    `peaks[i]` is the most that was needed at once in bin `first_bin + i`, all of them over; the bin after them is the
    open one, with `peak` so far and `level` needed at the last moment that was noted. `level` None: nothing is known.
    `midnight_s` is a moment at which a day begins on the clock that people read (it may be negative).
    """

    day_s: float = DAY_S
    bins_per_day: int = 96
    first_bin: int = 0
    peaks: tuple[int, ...] = ()
    peak: int = 0
    level: int | None = None
    midnight_s: float = 0.0

    @property
    def bin_s(self) -> float:
        """How long a bin is."""
        return self.day_s / self.bins_per_day

    @property
    def open_bin(self) -> int:
        """The number of the bin that is not over."""
        return self.first_bin + len(self.peaks)

    def bin_at(self, at_s: float) -> int:
        """The number of the bin in which a moment lies; where a bin ends, the next one has begun, rounding or not."""
        return int(at_s / self.bin_s + 1e-9)

    def clock(self, at_s: float) -> str:
        """A moment as people read it: hours and minutes of the day, or seconds of a short one."""
        within_s = (at_s - self.midnight_s) % self.day_s
        if self.day_s < 3600.0:
            return f"second {within_s:.0f} of the day"
        minutes = int(within_s // 60.0)
        return f"{minutes // 60:02d}:{minutes % 60:02d}"

    def noted(self, now_s: float, needed: int) -> Tide:
        """The tide with `needed` devices from now on; the same object if that is nothing new."""
        current = self.bin_at(now_s)
        if self.level is None:
            return msgspec.structs.replace(self, first_bin=current, peak=needed, level=needed)
        num_over = current - self.open_bin
        if num_over <= 0:
            if needed == self.level and needed <= self.peak:
                return self
            return msgspec.structs.replace(self, peak=max(self.peak, needed), level=needed)
        most = MAX_DAYS * self.bins_per_day
        # While nothing was reported, the last level held.
        over = (self.peak, *[self.level] * min(num_over - 1, most))
        peaks = (*self.peaks, *over)[-most:]
        return msgspec.structs.replace(
            self, first_bin=current - len(peaks), peaks=peaks, peak=max(needed, self.level), level=needed
        )
