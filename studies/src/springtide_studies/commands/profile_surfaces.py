"""`springtide profile --surface`: the search for a share played on recorded latencies, beside every setting tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from springtide.cli.profiles.trials import chosen_text, ms_text, rate_text, trials_table
from springtide.cli.session import Session, refuse
from springtide.cli.tables.columns import align
from springtide.core.quantities import parse_duration_s
from springtide.perf.share_profile import EXECUTION_FRACTION, unreachable
from springtide.solvers.search.share_search import EfficacyOptimum, ShareTrial, limit_of, search_efficacy
from springtide_studies.rivals.solvers.share_search_rivals import search_by_growth, search_everything
from springtide_studies.workloads.share_surfaces import ShareSurface, read_share_surface

_RANGE = ".."
# A range of SLOs is gone through in steps of this.
_STEP_MS = 2
_EXACT = 1e-9


class SurfaceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One search on one surface: ours, the published one, and the optimum of all settings (None: none meets it).

    `missed_fraction` and `published_missed_fraction` are how far the answers are below the optimum's efficacy (1:
    nothing was found). `capacity_per_s` is samples a second on the limit, the request's double (None where the surface
    has no such share).
    """

    surface: str
    slo_s: float
    search: EfficacyOptimum
    optimum: ShareTrial | None
    missed_fraction: float
    published: EfficacyOptimum
    published_missed_fraction: float
    capacity_per_s: float | None = None


class SweepAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Searches on one surface for a range of SLOs: those that some setting meets are counted in `num_slos`.

    Of both searches how many answers were the optimum, how far they were below it, and the trials they took.
    `num_out_of_reach` more were met by no setting, and `num_told` of them were told so.
    """

    surface: str
    num_slos: int
    num_exact: int
    mean_missed_fraction: float
    most_missed_fraction: float
    mean_trials: float
    most_trials: int
    published_num_exact: int
    published_mean_missed_fraction: float
    published_most_missed_fraction: float
    published_mean_trials: float
    published_most_trials: int
    num_out_of_reach: int
    num_told: int


def profile_surfaces(session: Session, paths: Sequence[str], slos: Sequence[str], execs: Sequence[str]) -> None:
    """Play the search on each surface and show what it found. Raises InvalidRequest."""
    surfaces = [read_share_surface(Path(path).expanduser()) for path in paths]
    if len(slos) == 1 and _RANGE in slos[0] and not execs:
        rows = [_sweep(surface, *_range_ms(slos[0])) for surface in surfaces]
        session.answer(rows, sweep_text(rows, slos[0]))
        return
    bounds = _slos(slos, execs, len(surfaces))
    answers = [play(surface, slo_s) for surface, slo_s in zip(surfaces, bounds, strict=True)]
    if len(answers) == 1:
        session.answer(answers[0], surface_text(answers[0]))
        return
    session.answer(answers, surfaces_table(answers))


def play(surface: ShareSurface, slo_s: float) -> SurfaceAnswer:
    """Search one surface for one SLO, of which execution has half."""
    bound_s = slo_s * EXECUTION_FRACTION
    grid = (surface.batch_sizes, surface.shares)
    search = search_efficacy(surface.at, bound_s, *grid)
    published = search_by_growth(surface.at, bound_s, *grid)
    optimum = search_everything(surface.at, bound_s, *grid).best
    return SurfaceAnswer(
        surface=surface.name,
        slo_s=slo_s,
        search=search,
        optimum=optimum,
        missed_fraction=_missed(search.best, optimum),
        published=published,
        published_missed_fraction=_missed(published.best, optimum),
        capacity_per_s=_capacity(surface, search.best),
    )


def _missed(found: ShareTrial | None, optimum: ShareTrial | None) -> float:
    if optimum is None:
        return 0.0
    return 1.0 if found is None else max(0.0, 1.0 - found.efficacy / optimum.efficacy)


def _capacity(surface: ShareSurface, best: ShareTrial | None) -> float | None:
    if best is None or round(limit_of(best.share) * 100) not in surface.percents:
        return None
    return best.batch_size / surface.at(best.batch_size, limit_of(best.share))


def _slos(slos: Sequence[str], execs: Sequence[str], count: int) -> list[float]:
    """One SLO for each surface. Raises InvalidRequest."""
    if bool(slos) == bool(execs):
        refuse(
            "say what is to be kept, in one of two ways: --slo 120ms (a batch may take half of it) or --exec 60ms (a "
            "batch may take that)"
        )
    given = [parse_duration_s(text, "slo") for text in slos]
    given += [parse_duration_s(text, "exec") / EXECUTION_FRACTION for text in execs]
    if len(given) not in (1, count):
        refuse(f"{len(given)} times for {count} surfaces; give one for all, or one for each in their order")
    return given * count if len(given) == 1 else given


def _range_ms(text: str) -> tuple[int, int]:
    low, _, high = text.partition(_RANGE)
    bounds = [round(parse_duration_s(part, "slo") * 1e3) for part in (low, high)]
    if not 0 < bounds[0] <= bounds[1] <= 100_000:
        refuse(f"--slo {text} is no range; write it like 20ms..300ms")
    return bounds[0], bounds[1]


def _sweep(surface: ShareSurface, low_ms: int, high_ms: int) -> SweepAnswer:
    answers = [play(surface, ms / 1e3) for ms in range(low_ms, high_ms + 1, _STEP_MS)]
    met = [answer for answer in answers if answer.optimum is not None]
    unmet = [answer for answer in answers if answer.optimum is None]
    ours = [(answer.missed_fraction, len(answer.search.trials)) for answer in met]
    published = [(answer.published_missed_fraction, len(answer.published.trials)) for answer in met]
    count = max(1, len(met))
    return SweepAnswer(
        surface=surface.name,
        num_slos=len(met),
        num_exact=sum(missed < _EXACT for missed, _ in ours),
        mean_missed_fraction=sum(missed for missed, _ in ours) / count,
        most_missed_fraction=max((missed for missed, _ in ours), default=0.0),
        mean_trials=sum(num for _, num in ours) / count,
        most_trials=max((num for _, num in ours), default=0),
        published_num_exact=sum(missed < _EXACT for missed, _ in published),
        published_mean_missed_fraction=sum(missed for missed, _ in published) / count,
        published_most_missed_fraction=max((missed for missed, _ in published), default=0.0),
        published_mean_trials=sum(num for _, num in published) / count,
        published_most_trials=max((num for _, num in published), default=0),
        num_out_of_reach=len(unmet),
        num_told=sum(answer.search.best is None for answer in unmet),
    )


def surface_text(answer: SurfaceAnswer) -> str:
    """One surface: the trials in their order, the answer, and the optimum of all settings."""
    search, optimum = answer.search, answer.optimum
    slo = f"{ms_text(answer.slo_s)} (a batch may take {ms_text(search.bound_s)})"
    lines = [f"{answer.surface}: SLO {slo}", "", trials_table(search.trials, search.best), ""]
    if search.best is None:
        lines.append(unreachable(search, answer.slo_s))
    else:
        lines.append(f"after {trials_text(search)}: {chosen_text(search.best)}")
        if answer.capacity_per_s is not None:
            limit = f"on the limit a replica answers {rate_text(answer.capacity_per_s)} samples a second"
            lines.append(f"{limit}, on the request {rate_text(_throughput(search.best))}")
        lines.append(_left_text(search))
    num_all = _setting_text(optimum) if optimum is not None else "none meets it"
    lines += ["", f"every setting tried: {num_all}{_missed_text(answer.missed_fraction)}"]
    published = _setting_text(answer.published.best) if answer.published.best is not None else "nothing found"
    missed = _missed_text(answer.published_missed_fraction)
    lines.append(f"hybrid growth search as published: {len(answer.published.trials)} trials, {published}{missed}")
    return "\n".join(lines)


def surfaces_table(answers: Sequence[SurfaceAnswer]) -> str:
    """One line for each surface."""
    rows = [
        (
            answer.surface,
            ms_text(answer.search.bound_s),
            f"{len(answer.search.trials) - answer.search.num_checks}+{answer.search.num_checks}",
            _cell(answer.search.best),
            _percent(answer.missed_fraction),
            _cell(answer.optimum),
            str(len(answer.published.trials)),
            _cell(answer.published.best),
            _percent(answer.published_missed_fraction),
        )
        for answer in answers
    ]
    header = ("SURFACE", "A BATCH MAY TAKE", "TRIALS+CHECKS", "FOUND", "BELOW BEST", "BEST OF ALL")
    return align((*header, "PUBLISHED: TRIALS", "FOUND", "BELOW BEST"), rows)


def sweep_text(rows: Sequence[SweepAnswer], slos: str) -> str:
    """One line for each surface, over a range of SLOs."""
    cells = [
        (
            row.surface,
            f"{row.num_slos} of {row.num_slos + row.num_out_of_reach}",
            f"{row.num_exact / max(1, row.num_slos):.1%}",
            f"{row.mean_missed_fraction:.2%}, {row.most_missed_fraction:.1%}",
            f"{row.mean_trials:.2f}, {row.most_trials}",
            f"{row.published_num_exact / max(1, row.num_slos):.1%}",
            f"{row.published_mean_missed_fraction:.2%}, {row.published_most_missed_fraction:.1%}",
            f"{row.published_mean_trials:.2f}, {row.published_most_trials}",
        )
        for row in rows
    ]
    header = ("SURFACE", "IN REACH", "EXACT", "BELOW BEST: MEAN, MOST", "TRIALS: MEAN, MOST")
    published = ("PUBLISHED: EXACT", "BELOW BEST", "TRIALS")
    told = sum(row.num_told for row in rows)
    unmet = sum(row.num_out_of_reach for row in rows)
    end = f"of {unmet} SLOs out of reach {told} were told so"
    return f"SLOs {slos}, every {_STEP_MS} ms\n\n{align((*header, *published), cells)}\n\n{end}"


def trials_text(search: EfficacyOptimum) -> str:
    """How many trials there were, and how many of them only made sure."""
    checks = f", {search.num_checks} of them only to make sure" if search.num_checks else ""
    return f"{len(search.trials)} trials{checks}"


def _left_text(search: EfficacyOptimum) -> str:
    if search.reason == "most trials":
        return f"ended after {len(search.trials)} trials; some setting may be {search.left_fraction:.1%} better"
    return f"of no setting that is left is more than {max(search.left_fraction, 0.0005):.2%} expected"


def _setting_text(trial: ShareTrial) -> str:
    return f"{trial.batch_size} on {trial.share:.0%}, efficacy {rate_text(trial.efficacy)}"


def _cell(trial: ShareTrial | None) -> str:
    return "-" if trial is None else f"{trial.batch_size} on {trial.share:.0%}"


def _missed_text(fraction: float) -> str:
    return "" if fraction < _EXACT else f", {fraction:.1%} below the best"


def _percent(fraction: float) -> str:
    return "0" if fraction < _EXACT else f"{fraction:.1%}"


def _throughput(trial: ShareTrial) -> float:
    return trial.efficacy * trial.share
