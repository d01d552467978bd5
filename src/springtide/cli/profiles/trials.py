"""Trials of a search for a share as text, with its choice."""

from __future__ import annotations

from collections.abc import Sequence

from springtide.cli.tables.columns import align
from springtide.solvers.search.share_search import ShareTrial, limit_of


def trials_table(trials: Sequence[ShareTrial], best: ShareTrial | None) -> str:
    """The trials in order; * marks the chosen one."""
    rows = [
        (
            f"{number}{' *' if trial == best else ''}",
            str(trial.batch_size),
            f"{trial.share:.0%}",
            "could not run" if trial.latency_s is None else ms_text(trial.latency_s),
            rate_text(trial.efficacy),
            "yes" if trial.is_within else "no",
        )
        for number, trial in enumerate(trials, 1)
    ]
    return align(("TRIAL", "BATCH", "SHARE", "LATENCY", "EFFICACY", "IN TIME"), rows)


def chosen_text(best: ShareTrial) -> str:
    """The batch size, request and limit of the best trial."""
    return (
        f"batches of {best.batch_size}, request {best.share:.0%}, limit {limit_of(best.share):.0%} of a device; "
        f"{ms_text(best.latency_s or 0.0)} a batch, {rate_text(best.efficacy)} samples a second for a whole device"
    )


def rate_text(per_s: float) -> str:
    """Samples a second: 0.2683, 26.83, 2,683."""
    return f"{per_s:,.0f}" if per_s >= 1000.0 else f"{per_s:.4g}"


def ms_text(seconds: float) -> str:
    """Seconds as milliseconds: 12.34 ms."""
    return f"{seconds * 1e3:.4g} ms"
