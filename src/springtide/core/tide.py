"""The tide: how many devices services needed over many days, as the peak of each time bin."""

from __future__ import annotations

import msgspec

DAY_S = 86_400.0
# Four weeks, so that a weekly season is observed several times.
MAX_DAYS = 28


class Tide(msgspec.Struct, frozen=True, kw_only=True):
    """The history of a platform's need for serving devices; bins are numbered from the platform's second 0.

    `peaks[i]` is the most devices needed at once in the past bin `first_bin + i`. The bin after these is the open one,
    with its `peak` so far and the `level` needed at the last update (None: nothing is known). `midnight_s` is an
    instant of local midnight on the platform's clock (it may be negative).
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
        """Length of a bin, in seconds."""
        return self.day_s / self.bins_per_day

    @property
    def open_bin(self) -> int:
        """Number of the bin that is not over."""
        return self.first_bin + len(self.peaks)

    def bin_at(self, at_s: float) -> int:
        """Number of the bin that contains an instant. A boundary belongs to the later bin, despite rounding errors."""
        return int(at_s / self.bin_s + 1e-9)

    def clock(self, at_s: float) -> str:
        """The time of day at an instant, as text: hours and minutes, or seconds if the day is shorter than an hour."""
        within_s = (at_s - self.midnight_s) % self.day_s
        if self.day_s < 3600.0:
            return f"second {within_s:.0f} of the day"
        minutes = int(within_s // 60.0)
        return f"{minutes // 60:02d}:{minutes % 60:02d}"

    def as_long_as(self, wanted: Tide, now_s: float) -> Tide:
        """The tide in days as long as those of `wanted`; what was remembered in others is dropped."""
        if (self.day_s, self.bins_per_day) == (wanted.day_s, wanted.bins_per_day):
            return self
        new = msgspec.structs.replace(wanted, first_bin=0, peaks=(), peak=0, level=None)
        return new if self.level is None else new.noted(now_s, self.level)

    def noted(self, now_s: float, needed: int) -> Tide:
        """The tide with `needed` devices from now on; the same object if nothing changes."""
        current = self.bin_at(now_s)
        if self.level is None:
            return msgspec.structs.replace(self, first_bin=current, peak=needed, level=needed)
        num_over = current - self.open_bin
        if num_over <= 0:
            if needed == self.level and needed <= self.peak:
                return self
            return msgspec.structs.replace(self, peak=max(self.peak, needed), level=needed)
        most = MAX_DAYS * self.bins_per_day
        # In bins without an update the last level was in force.
        over = (self.peak, *[self.level] * min(num_over - 1, most))
        peaks = (*self.peaks, *over)[-most:]
        return msgspec.structs.replace(
            self, first_bin=current - len(peaks), peaks=peaks, peak=max(needed, self.level), level=needed
        )
