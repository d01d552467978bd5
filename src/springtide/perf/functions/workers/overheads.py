"""What a run takes beside its steps: saving, hand-overs at the end of a lifetime, and functions that die.

Steps as measured hold none of it. How much it is comes from how functions are run (`docs/pipeline.md`), and from what
has been lost so far.
"""

from __future__ import annotations

import msgspec
import numpy as np

from springtide.perf.functions.workers.surface import Surface
from springtide.solvers.search.gaussian_process import Floats

# As the coordinator has it: saving costs at most this part of a step's time, unless more than so much would be redone.
_MAX_SAVE_FRACTION, _MAX_REDO_S, _MAX_SAVE_EVERY = 0.07, 60.0, 64
_MEAN_POWER = 2.0**0.5
# Until more is known: so many of a hundred functions die before their time.
DEATHS_PER_LIFE = 0.03
# Seconds until a death is noticed, and in which all workers park at a change.
_DETECTION_S, _PARK_S = 2.0, 1.0
# What was expected counts like so many seconds of what was seen.
_PRIOR_S = 600.0
# Two deviations above a Poisson mean m are near m + 2 sqrt(m + _TAIL); a mean far below _NEVER is as good as none.
_TAIL, _NEVER = 0.35, 0.05
_LEAST_SCALE, _MOST_SCALE = 0.5, 5.0


class RunOverheads(msgspec.Struct, frozen=True, kw_only=True):
    """For each configuration: seconds lost for each second of steps, how often functions die, what a death costs."""

    lost_fraction: Floats
    deaths_per_s: Floats
    death_s: Floats

    def luck(self, work_s: Floats) -> Floats:
        """The part by which `work_s` seconds of steps deviate because functions die more or less often.

        Counts of rare events have a longer tail than their deviation says: one more may always come.
        """
        deaths = self.deaths_per_s * work_s
        unlucky = np.sqrt(deaths + _TAIL * np.minimum(1.0, deaths / _NEVER))
        return np.asarray(unlucky * self.death_s / work_s)


def overheads_of(surface: Surface, step_s: Floats, lifetime_s: float, scale: float = 1.0) -> RunOverheads:
    """At steps of `step_s`; `scale` times as much as is usual."""
    save_s, n = surface.save_s, surface.workers[:, None].astype(np.float64)
    # Saving is put off by powers of two until it is cheap enough, or too much would be redone. Where the powers fall
    # is not known beforehand: their mean is what counts.
    wanted = np.where(save_s > _MAX_SAVE_FRACTION * step_s, _MEAN_POWER * save_s / (_MAX_SAVE_FRACTION * step_s), 1.0)
    every = np.minimum(np.minimum(wanted, np.maximum(_MAX_REDO_S / step_s, 1.0)), _MAX_SAVE_EVERY)
    deaths_per_s = scale * n * DEATHS_PER_LIFE / lifetime_s
    # Half of what lies between two saved states, half of a step, and the time until a successor has the state.
    each_s = 0.5 * every * step_s + _DETECTION_S + surface.start_s
    handing = (2.0 * save_s + _PARK_S) / lifetime_s
    return RunOverheads(
        lost_fraction=save_s / (every * step_s) + scale * handing + deaths_per_s * each_s,
        deaths_per_s=np.broadcast_to(deaths_per_s, step_s.shape),
        death_s=each_s,
    )


def seen_scale(lost_s: float, work_s: float, usual_s: float) -> float:
    """How many times the usual `usual_s` was lost in a run that worked for `work_s`; near 1 while it is young."""
    before_s = usual_s * _PRIOR_S / max(work_s, 1e-9)
    scale = (before_s + max(0.0, lost_s)) / max(before_s + usual_s, 1e-9)
    return min(_MOST_SCALE, max(_LEAST_SCALE, scale))
