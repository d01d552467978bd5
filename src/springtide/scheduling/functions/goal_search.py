"""Searches the number of workers and their memory for a job on functions while it runs, for its goal (SMLT, 3.2).

Pure: measurements come in with the view, and the next step is returned. See docs/policies/goal-search.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from springtide.core.decision import JobView
from springtide.core.function_search import FunctionMeasurement, FunctionSearch
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionPlan, FunctionService
from springtide.perf.functions.pipeline.plan import LEAST_DELTA
from springtide.perf.functions.workers.belief import Belief, Prediction, is_here, net_step, size_of
from springtide.perf.functions.workers.overheads import overheads_of, seen_scale
from springtide.perf.functions.workers.surface import SAVED_FACTOR, WorkSettings, worker_numbers
from springtide.scheduling.functions.goal_phases import PhaseStretch, Rest, aim_of, limits_of, present_factor, rest_of
from springtide.scheduling.functions.reasons import decision_words, goal_words
from springtide.solvers.search.gaussian_process import Floats
from springtide.solvers.search.goal_search import CONFIDENCE, SearchDecision, SearchState, decide
from springtide.solvers.search.phase_choice import Aim, PhaseChoice, SwitchCosts, WorkPhase

# A soft deadline is planned for with less reserve.
SOFT_CONFIDENCE = 0.5
# The most entries of a menu: users read it, too.
_MAX_OPTIONS = 32
# A trial without a measurement after so many times its longest expected duration is decided anew.
_PATIENCE = 3.0
_FIRST_STEPS = 4.0
# A configuration nearer than this to a measured one, in doublings of workers and memory together, is not tried.
_NEAR_DOUBLINGS = 0.25


class SearchStep(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step of the search.

    `menu` is the Pareto front over the work left, corrected by measurements, and always the running entry; its step
    times are means over the work left. `running` and `next` (None: stay as now; before the job runs, the entry to begin
    with) are predictions for the present phase. `rest_s` and `rest_usd` are what is left as decided, `upper_s` and
    `upper_usd` the same at the upper end. `expected_gain` is in dollars or seconds, as the goal is. `revisit_at_s`:
    when to search again even if nothing has happened.
    """

    menu: FunctionMenu
    running: FunctionOption | None
    next: FunctionOption | None
    is_probe: bool
    why: str
    has_settled: bool
    num_tried: int
    goal_words: str
    expected_gain: float = 0.0
    rest_s: float = 0.0
    rest_usd: float = 0.0
    upper_s: float = 0.0
    upper_usd: float = 0.0
    is_within: bool = True
    revisit_at_s: float | None = None


def search_step(view: JobView, service: FunctionService, now_s: float, running: FunctionPlan | None) -> SearchStep:
    """Decide for a job that has a search: stay, move to a better configuration, or try one.

    `running` is the plan that it runs as or is being moved to; None before it begins. The job must have a menu.
    """
    search = view.job.search
    assert search is not None
    return _Search(view, _large_enough(search, view.learnt.too_small_mb), service, now_s, running).step()


def _large_enough(search: FunctionSearch, too_small_mb: int) -> FunctionSearch:
    """The same search without the sizes that have run out of memory."""
    sizes = tuple(size for size in search.space.sizes if size.memory_mb > too_small_mb)
    if not sizes or len(sizes) == len(search.space.sizes):
        return search
    return replace(search, space=replace(search.space, sizes=sizes))


def search_menu(
    search: FunctionSearch,
    service: FunctionService,
    global_batch_size: int,
    num_layers: int = 1,
    total_steps: int | None = None,
) -> FunctionMenu:
    """The menu of a job before it is submitted: predicted by the model, corrected by measurements of earlier runs."""
    num_steps = float(total_steps or 1000)
    rest = Rest(stretches=(PhaseStretch(global_batch_size=global_batch_size, num_steps=num_steps),))
    belief = Belief(service, search)
    grid = _Grid(belief, rest, 1.0, num_layers, ())
    error = search.error_fraction if not belief.has_observed else grid.error_fraction(grid.recommended())
    return grid.menu(service.name, None, grid.recommended(), error, later=None)


class LostTime(msgspec.Struct, frozen=True, kw_only=True):
    """What the time of a run went into; what neither part explains of `elapsed_s` was lost.

    `measured_s` is what the measured steps of each plan took; `num_more_steps` were done without a measurement.
    """

    running: FunctionPlan
    elapsed_s: float
    measured_s: tuple[tuple[FunctionPlan, float], ...]
    num_more_steps: int


def _phase(stretch: PhaseStretch, found: Prediction, lifetime_s: float, scale: float) -> WorkPhase:
    """A stretch as the solver sees it: its steps with the time lost between them."""
    overheads = overheads_of(found.surface, found.step_s, lifetime_s, scale)
    step_s = found.step_s * (1.0 + overheads.lost_fraction)
    return WorkPhase(
        num_steps=stretch.num_steps,
        log_step=np.log(step_s).ravel(),
        spread=found.spread.ravel(),
        luck=overheads.luck(stretch.num_steps * step_s).ravel(),
        base_usd=found.base_usd.ravel(),
        usd_per_s=found.usd_per_s.ravel(),
        fits=found.surface.fits.ravel(),
    )


class _Grid:
    """The candidates in every stretch of the work left, numbered row by row."""

    def __init__(
        self,
        belief: Belief,
        rest: Rest,
        factor: float,
        num_layers: int,
        more_workers: Sequence[int],
        lost: LostTime | None = None,
    ) -> None:
        most = min(belief.search.space.max_workers, belief.service.concurrency)
        workers = {number for number in more_workers if number <= most}
        for stretch in rest.stretches:
            batch = stretch.global_batch_size
            workers.update(worker_numbers(min(most, batch), batch).tolist())
        self.rest = rest
        self.settings = [
            WorkSettings(
                global_batch_size=stretch.global_batch_size,
                num_layers=num_layers,
                size_factor=factor,
                has_parameter_store=belief.search.has_parameter_store,
                workers=tuple(sorted(workers)),
            )
            for stretch in rest.stretches
        ]
        known: dict[int, Prediction] = {}
        for settings in self.settings:
            if settings.global_batch_size not in known:
                known[settings.global_batch_size] = belief.predict(settings)
        self.predictions = [known[settings.global_batch_size] for settings in self.settings]
        self.now = self.predictions[0]
        self.surface = self.now.surface
        scale = 1.0 if lost is None else self._scale(lost, belief.service.lifetime_s)
        self.phases = tuple(
            _phase(stretch, found, belief.service.lifetime_s, scale)
            for stretch, found in zip(rest.stretches, self.predictions, strict=True)
        )

    def _scale(self, lost: LostTime, lifetime_s: float) -> float:
        """How many times as much time as usual was lost so far."""
        place = self.surface.place(lost.running)
        if place is None:
            return 1.0
        usual = overheads_of(self.surface, self.now.step_s, lifetime_s).lost_fraction
        more_s = lost.num_more_steps * float(self.now.step_s[place])
        work_s, usual_s, pauses_s = more_s, more_s * float(usual[place]), 0.0
        where: set[tuple[int, int]] = set()
        for plan, seconds in lost.measured_s:
            there = self.surface.place(plan) or place
            work_s += seconds
            usual_s += seconds * float(usual[there])
            pauses_s += 0.0 if there in where or not where else 2.0 * float(self.surface.save_s[there])
            where.add(there)
        if work_s <= 0.0 or usual_s <= 0.0:
            return 1.0
        return seen_scale(lost.elapsed_s - work_s - pauses_s, work_s, usual_s)

    def index(self, plan: FunctionPlan) -> int | None:
        place = self.surface.place(plan)
        return None if place is None else place[0] * self.surface.shape[1] + place[1]

    def place(self, index: int) -> tuple[int, int]:
        return divmod(index, self.surface.shape[1])

    def option(self, index: int, plan: FunctionPlan | None = None) -> FunctionOption:
        """The candidate in the present phase, by the present estimates."""
        place = self.place(index)
        return FunctionOption(
            plan=plan or self.surface.plan(*place),
            step_s=float(self.now.step_s[place]),
            step_usd=float(self.now.step_usd[place]),
            start_s=float(self.surface.start_s[place]),
            start_usd=float(self.surface.start_usd[place]),
        )

    def error_fraction(self, index: int) -> float:
        """By what fraction a step may be longer than estimated, at the confidence of the search."""
        return math.expm1(CONFIDENCE * float(self.now.spread[self.place(index)]))

    def recommended(self) -> int:
        """The fastest whose speed-up over the cheapest is at least 0.8 of its cost's increase (FuncPipe, 5.1)."""
        seconds, usd = self.phases[0].totals(0.0)
        fits = self.phases[0].fits if self.phases[0].fits.any() else np.ones(len(seconds), dtype=bool)
        cheapest = int(np.argmin(np.where(fits, usd, math.inf)))
        faster = seconds[cheapest] / seconds - 1.0
        dearer = usd / max(usd[cheapest], 1e-300) - 1.0
        worth = fits & (faster >= LEAST_DELTA * dearer) & (faster >= 0.0)
        return int(np.argmin(np.where(worth, seconds, math.inf)))

    def menu(
        self,
        service: str,
        running: tuple[int, FunctionPlan] | None,
        recommended: int,
        error_fraction: float,
        later: PhaseChoice | None,
    ) -> FunctionMenu:
        """The Pareto front over the work left, with later stretches as planned; it always has the running plan."""
        phase = self.phases[0]
        later_s, later_usd = _later(self.phases, later)
        total = self.rest.num_steps
        step_s = (phase.num_steps * np.exp(phase.log_step) + later_s) / total
        own_usd = phase.num_steps * (phase.base_usd + np.exp(phase.log_step) * phase.usd_per_s)
        step_usd = (own_usd + later_usd) / total
        start_s, start_usd = self.surface.start_s.ravel(), self.surface.start_usd.ravel()
        chosen = _front(start_usd + total * step_usd, start_s + total * step_s, step_s, phase.fits)
        if len(chosen) > _MAX_OPTIONS:
            places = np.linspace(0, len(chosen) - 1, _MAX_OPTIONS).round().astype(int)
            chosen = [chosen[place] for place in places]
        wanted = set(chosen) | {recommended} | ({running[0]} if running is not None else set())
        ordered = sorted(wanted, key=lambda index: (float(step_usd[index]), index))
        options = tuple(
            FunctionOption(
                plan=running[1] if running is not None and index == running[0] else self.option(index).plan,
                step_s=float(step_s[index]),
                step_usd=float(step_usd[index]),
                start_s=float(start_s[index]),
                start_usd=float(start_usd[index]),
            )
            for index in ordered
        )
        return FunctionMenu(
            service=service,
            options=options,
            recommended=ordered.index(recommended),
            error_fraction=error_fraction,
            num_layers=self.settings[0].num_layers,
            source="search",
        )


def _later(phases: Sequence[WorkPhase], later: PhaseChoice | None) -> tuple[float, float]:
    """Seconds and dollars that the later stretches are expected to take."""
    seconds, usd = 0.0, 0.0
    for number, phase in enumerate(phases[1:], 1):
        assert later is not None
        each_s, each_usd = phase.totals(0.0)
        seconds += float(each_s[later.candidates[number]])
        usd += float(each_usd[later.candidates[number]])
    return seconds, usd


def _front(usd: Floats, seconds: Floats, step_s: Floats, fits: npt.NDArray[np.bool_]) -> list[int]:
    """The candidates that no other one dominates in dollars and seconds, cheapest first."""
    found: list[int] = []
    best_s = best_step_s = math.inf
    for index in np.lexsort((seconds, np.where(fits, usd, math.inf))).tolist():
        if fits[index] and seconds[index] < best_s and step_s[index] < best_step_s:
            found.append(index)
            best_s, best_step_s = float(seconds[index]), float(step_s[index])
    return found


class _Search:
    """One decision for one job."""

    def __init__(
        self,
        view: JobView,
        search: FunctionSearch,
        service: FunctionService,
        now_s: float,
        running: FunctionPlan | None,
    ) -> None:
        assert view.job.menu is not None
        self._view, self._search, self._service, self._now_s, self._plan = view, search, service, now_s, running
        self._rest = rest_of(view)
        self._belief = Belief(service, search, view.learnt.measurements)
        self._factor = present_factor(view, search)
        known = {one.plan.num_replicas for one in view.learnt.measurements}
        if running is not None:
            known.add(running.num_replicas)
        self._grid = _Grid(
            self._belief,
            self._rest,
            self._factor,
            max(1, view.job.menu.num_layers),
            sorted(known),
            self._lost(),
        )
        self._running = None if running is None else self._grid.index(running)

    def step(self) -> SearchStep:
        grid, view = self._grid, self._view
        aim = self._aim()
        limits = limits_of(view, self._rest, self._now_s, *self._ending())
        decision = decide(
            SearchState(
                phases=grid.phases,
                limits=limits,
                aim=aim,
                first=self._first_costs(),
                later=self._later_costs(),
                running=self._running,
                beside=None if self._running is None else grid.now.beside(*grid.place(self._running)).ravel(),
                is_measured=self._is_measured(),
                is_fresh=self._is_fresh(),
                tried=self._known_places(),
                num_tried=self._num_tried(),
                behind=self._behind(aim),
                confidence=SOFT_CONFIDENCE if view.job.goal.is_soft else CONFIDENCE,
                has_probes=self._rest.is_known,
                change_s=view.changes.change_s,
            )
        )
        chosen = decision.candidate
        running = None if self._running is None else grid.option(self._running, self._plan)
        following = None if decision.what == "stay" else grid.option(chosen)
        menu = grid.menu(
            self._service.name,
            None if self._running is None or self._plan is None else (self._running, self._plan),
            chosen,
            grid.error_fraction(chosen) if self._belief.has_observed else self._search.error_fraction,
            decision.plan,
        )
        return SearchStep(
            menu=menu,
            running=running,
            next=following,
            is_probe=decision.what == "probe",
            why=decision_words(
                decision,
                aim,
                limits,
                grid.option(chosen).plan,
                self._num_tried(),
                is_first=self._plan is None,
                is_measured=self._is_measured(),
                is_known=self._rest.is_known and self._rest.keeps_up_s is None,
            ),
            has_settled=decision.has_settled,
            num_tried=self._num_tried(),
            goal_words=goal_words(view.job.goal, self._rest.keeps_up_s is not None),
            expected_gain=decision.expected_gain,
            rest_s=decision.plan.rest_s,
            rest_usd=decision.plan.rest_usd,
            upper_s=decision.plan.upper_s,
            upper_usd=decision.plan.upper_usd,
            is_within=decision.plan.is_within,
            revisit_at_s=self._revisit_at_s(decision),
        )

    def _aim(self) -> Aim:
        index = self._grid.recommended()
        seconds, usd = self._grid.phases[0].totals(0.0)
        return aim_of(self._view, self._rest, float(usd[index] / seconds[index]))

    def _lost(self) -> LostTime | None:
        """What the time since its start went into; None if nothing is known yet."""
        view = self._view
        if self._plan is None or view.started_at_s is None or not view.learnt.measurements:
            return None
        counted = sum(one.num_steps for one in view.learnt.measurements)
        return LostTime(
            running=self._plan,
            # Without past changes: the search charges for a coming change when it considers one.
            elapsed_s=max(0.0, view.progress.progress_at_s - view.started_at_s - view.changes.changed_s),
            measured_s=tuple((one.plan, one.num_steps * self._net_s(one)) for one in view.learnt.measurements),
            num_more_steps=view.progress.step - counted,
        )

    def _net_s(self, measured: FunctionMeasurement) -> float:
        """A measured step without its saves."""
        size = size_of(self._service, self._search, measured.plan.stages[0].memory_mb)
        save_s = 0.0 if size is None else SAVED_FACTOR * max(0, measured.gradient_bytes) / size.bytes_per_s
        return net_step(measured, save_s).step_s

    def _is_measured(self) -> bool:
        """Whether the running configuration was measured in this run, in any phase."""
        if self._plan is None:
            return False
        where = _where(self._plan)
        return any(_where(one.plan) == where for one in self._view.learnt.measurements)

    def _is_fresh(self) -> bool:
        """Whether the newest measurement is of the running configuration."""
        measurements = self._view.learnt.measurements
        return self._plan is not None and bool(measurements) and _where(measurements[-1].plan) == _where(self._plan)

    def _known_places(self) -> npt.NDArray[np.bool_]:
        """The candidates that were measured in the present phase, and those too near to them for a trial."""
        workers, sizes = (
            np.log2(each.astype(np.float64)) for each in (self._grid.surface.workers, self._grid.surface.memory_mb)
        )
        near = np.zeros(self._grid.surface.shape, dtype=bool)
        for row, column in np.argwhere(self._grid.now.num_steps > 0).tolist():
            away = np.abs(workers - workers[row])[:, None] + np.abs(sizes - sizes[column])[None]
            near |= away < _NEAR_DOUBLINGS
        return near.ravel()

    def _num_tried(self) -> int:
        """How many configurations were measured in the present phase."""
        settings = self._grid.settings[0]
        here = [one for one in self._view.learnt.measurements if is_here(one, settings, self._search)]
        return len({_where(one.plan) for one in here})

    def _ending(self) -> tuple[float, float]:
        """Seconds and dollars that the end takes: a last save, and half a step in reserve unless the goal is soft."""
        grid = self._grid
        place = grid.place(grid.recommended() if self._running is None else self._running)
        spare = 0.0 if self._view.job.goal.is_soft else 0.5
        seconds = float(grid.surface.save_s[place]) + spare * float(grid.now.step_s[place])
        return seconds, seconds * float(grid.now.usd_per_s[place])

    def _behind(self, aim: Aim) -> float:
        """What the run has cost so far, in the objective's unit."""
        begun_s = self._view.started_at_s
        ran_s = 0.0 if begun_s is None else max(0.0, self._now_s - begun_s)
        return aim.usd_weight * self._view.spent_usd + aim.second_weight * ran_s

    def _first_costs(self) -> SwitchCosts:
        """The cost of a change from the running plan to each candidate. Functions of the same memory stay; the others
        warm up meanwhile."""
        surface = self._grid.surface
        if self._running is None or self._plan is None:
            return SwitchCosts(seconds=surface.start_s.ravel(), usd=surface.start_usd.ravel())
        pause_s, usd = self._change(surface.start_usd)
        row, column = self._grid.place(self._running)
        n, held = surface.workers.astype(np.float64), float(surface.workers[row])
        joining = np.maximum(0.0, n - held) / n
        usd[:, column] = usd[:, column] * joining
        # The state goes through the store only if there are joiners: functions that stay keep it.
        pause_s[:, column] = np.where(joining > 0.0, pause_s[:, column], self._view.changes.last_pause_s or 0.0)
        pause_s[row, column] = usd[row, column] = 0.0
        return SwitchCosts(seconds=pause_s.ravel(), usd=usd.ravel())

    def _later_costs(self) -> SwitchCosts:
        pause_s, usd = self._change(self._grid.surface.start_usd)
        return SwitchCosts(seconds=pause_s.ravel(), usd=usd.ravel())

    def _change(self, start_usd: Floats) -> tuple[Floats, Floats]:
        """Seconds of the pause and dollars of a change: the state goes through the store, and the joiners cost
        `start_usd` while they warm up."""
        surface = self._grid.surface
        # If the last change took longer than the model says, that is expected again.
        pause_s = np.maximum(2.0 * surface.save_s, self._view.changes.last_pause_s or 0.0)
        return np.array(pause_s), np.array(start_usd + pause_s * surface.usd_per_s)

    def _revisit_at_s(self, decision: SearchDecision) -> float | None:
        if decision.what != "stay" or self._is_measured() or self._running is None:
            return None
        place = self._grid.place(self._running)
        upper_s = float(self._grid.now.step_s[place]) * math.exp(CONFIDENCE * float(self._grid.now.spread[place]))
        return self._now_s + _PATIENCE * (_FIRST_STEPS * upper_s + float(self._grid.surface.start_s[place]))


def _where(plan: FunctionPlan) -> tuple[int, int]:
    return plan.num_replicas, plan.stages[0].memory_mb
