"""Overheads of a run besides its steps: saving states, handovers at the end of a lifetime, and deaths of functions.

Measured step times do not include them. They are estimated from how functions run (`docs/pipeline.md`), and from the
time that the run has lost so far.
"""

from __future__ import annotations

import msgspec
import numpy as np

from springtide.perf.functions.workers.surface import Surface
from springtide.solvers.search.gaussian_process import Floats

# As in the coordinator: saving takes at most this fraction of the time of steps, unless more than this many seconds, or
# this many steps, would have to be repeated.
_MAX_SAVE_FRACTION, _MAX_REDO_S, _MAX_SAVE_EVERY = 0.07, 60.0, 64
_MEAN_POWER = 2.0**0.5
# The prior of how many functions die per lifetime.
DEATHS_PER_LIFE = 0.03
# Seconds until a death is detected, and until all workers are parked at a change.
_DETECTION_S, _PARK_S = 2.0, 1.0
# The prior counts like this many seconds of observation.
_PRIOR_S = 600.0
# The upper 2-sigma quantile of a Poisson distribution with mean m is about m + 2 sqrt(m + _TAIL). The tail is scaled
# down for means below _NEVER.
_TAIL, _NEVER = 0.35, 0.05
_LEAST_SCALE, _MOST_SCALE = 0.5, 5.0


class RunOverheads(msgspec.Struct, frozen=True, kw_only=True):
    """For each configuration: seconds lost per second of steps, the rate of deaths, and the seconds lost per death."""

    lost_fraction: Floats
    deaths_per_s: Floats
    death_s: Floats

    def luck(self, work_s: Floats) -> Floats:
        """The relative deviation of `work_s` seconds of steps due to the random number of deaths.

        Counts of rare events have a longer tail than their standard deviation suggests.
        """
        deaths = self.deaths_per_s * work_s
        unlucky = np.sqrt(deaths + _TAIL * np.minimum(1.0, deaths / _NEVER))
        return np.asarray(unlucky * self.death_s / work_s)


def overheads_of(surface: Surface, step_s: Floats, lifetime_s: float, scale: float = 1.0) -> RunOverheads:
    """The overheads with steps of `step_s`; `scale` multiplies the usual losses."""
    save_s, n = surface.save_s, surface.workers[:, None].astype(np.float64)
    # The interval of saves is doubled until saving is cheap enough, or too much would have to be repeated. The exact
    # power of two is not known beforehand, so the mean is used.
    wanted = np.where(save_s > _MAX_SAVE_FRACTION * step_s, _MEAN_POWER * save_s / (_MAX_SAVE_FRACTION * step_s), 1.0)
    every = np.minimum(np.minimum(wanted, np.maximum(_MAX_REDO_S / step_s, 1.0)), _MAX_SAVE_EVERY)
    deaths_per_s = scale * n * DEATHS_PER_LIFE / lifetime_s
    # Half of the interval between saves, the detection of a death, and the start of the successor.
    each_s = 0.5 * every * step_s + _DETECTION_S + surface.start_s
    handing = (2.0 * save_s + _PARK_S) / lifetime_s
    return RunOverheads(
        lost_fraction=save_s / (every * step_s) + scale * handing + deaths_per_s * each_s,
        deaths_per_s=np.broadcast_to(deaths_per_s, step_s.shape),
        death_s=each_s,
    )


def seen_scale(lost_s: float, work_s: float, usual_s: float) -> float:
    """The ratio of lost to usual time in a run that worked for `work_s`; close to 1 at its beginning."""
    before_s = usual_s * _PRIOR_S / max(work_s, 1e-9)
    scale = (before_s + max(0.0, lost_s)) / max(before_s + usual_s, 1e-9)
    return min(_MOST_SCALE, max(_LEAST_SCALE, scale))
