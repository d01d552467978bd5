"""Other ways to search the share and the batch size of an inference model, to be compared with ours: every setting in
turn, and Dilu's hybrid growth search as its artifact has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from springtide.solvers.search.share_search import EfficacyOptimum, Measure, ShareTrial, make_trial

# A step up that loses more than this much efficacy ends the published search: in samples per second and percent.
_PUBLISHED_DROP = 0.2


def search_everything(
    measure: Measure, bound_s: float, batch_sizes: Sequence[int], shares: Sequence[float]
) -> EfficacyOptimum:
    """Try every setting (Dilu, Table 2: traversal)."""
    trials = [make_trial(size, share, measure(size, share), bound_s) for size in batch_sizes for share in shares]
    return _optimum(bound_s, trials)


def search_by_growth(
    measure: Measure, bound_s: float, batch_sizes: Sequence[int], shares: Sequence[float]
) -> EfficacyOptimum:
    """Hybrid growth search as the artifact of Dilu plays it back (HGSS): grow the share by one step until one sample
    meets the bound; then double the batch, with one step more of the device wherever it misses; stop where that
    misses too, or where the efficacy falls by more than 0.2 per percent of the device.
    """
    trials: list[ShareTrial] = []

    def is_on_grid(place: tuple[int, int]) -> bool:
        return place[0] < len(batch_sizes) and place[1] < len(shares)

    def attempt(place: tuple[int, int]) -> ShareTrial:
        size, share = batch_sizes[place[0]], shares[place[1]]
        trials.append(make_trial(size, share, measure(size, share), bound_s))
        return trials[-1]

    best: ShareTrial | None = None
    size_at, share_at = 0, 0
    while best is None and is_on_grid((0, share_at)):
        trial = attempt((0, share_at))
        if trial.is_within:
            best = trial
        else:
            share_at += 1
    while best is not None and is_on_grid((size_at + 1, share_at)):
        size_at += 1
        trial = attempt((size_at, share_at))
        if not trial.is_within:
            share_at += 1
            if not is_on_grid((size_at, share_at)):
                break
            trial = attempt((size_at, share_at))
            if not trial.is_within or trial.efficacy / 100.0 < best.efficacy / 100.0 - _PUBLISHED_DROP:
                break
        best = trial
    return _optimum(bound_s, trials, best, is_given=True)


def _optimum(
    bound_s: float, trials: list[ShareTrial], best: ShareTrial | None = None, *, is_given: bool = False
) -> EfficacyOptimum:
    if not is_given:
        # The first of equals: the smaller batch on the smaller share.
        best = max((trial for trial in trials if trial.is_within), key=lambda trial: trial.efficacy, default=None)
    return EfficacyOptimum(
        bound_s=bound_s,
        best=best,
        trials=tuple(trials),
        num_checks=0,
        left_fraction=0.0,
        reason="settled" if best is not None else "out of reach",
    )
