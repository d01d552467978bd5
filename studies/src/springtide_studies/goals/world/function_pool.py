"""The functions of one job in the world of goals: starts, steps, deaths, hand-overs, changes and pauses, in event
time."""

from __future__ import annotations

import math
from collections.abc import Callable

from springtide.core.events import (
    CheckpointCommitted,
    Event,
    FunctionsMeasured,
    JobFinished,
    JobResized,
    PauseRequested,
    ProgressReported,
    ReplicaStopped,
    StreamObserved,
    UsageReported,
)
from springtide.core.function_search import StreamView
from springtide.core.functions import FunctionPlan, FunctionService
from springtide_studies.agenda import Agenda
from springtide_studies.goals.world.runs import CostMeter, GoalRun, WorldPlanSwitch, WorldReport
from springtide_studies.goals.world.streams import Arrivals
from springtide_studies.goals.world.truth import DETECTION_S, StepTruth, Truth, mean_of_slowest

REPORT_EVERY_S = 30.0
# All functions park, the record is read: what a change takes beside state on its way.
PARK_S = 1.0
# A function leaves for its successor this long before its lifetime is over.
LEAVE_MARGIN_S = 30.0
# A stream's functions come back for so many steps, or when the first of them has waited so long.
WORTH_STEPS, MAX_WAIT_S = 8, 600.0


class SimulatedFunctionPool:
    """Plays one job. `post` takes events, `stream` is the growing dataset of a job that trains on one."""

    def __init__(
        self,
        run: GoalRun,
        truth: Truth,
        service: FunctionService,
        agenda: Agenda,
        post: Callable[[Event], None],
        stream: Arrivals | None,
    ) -> None:
        self.run = run
        self.truth = truth
        self._service = service
        self._agenda = agenda
        self._post = post
        self._streams = stream
        self._now_s = agenda.clock.now_s
        self._steps: dict[tuple[FunctionPlan, int], StepTruth] = {}

    @property
    def _stream(self) -> Arrivals:
        assert self._streams is not None
        return self._streams

    # --- what the control plane asks for ------------------------------------------------------------------------------

    def run_as(self, plan: FunctionPlan, generation: int) -> None:
        """Begin as this plan, or change to it: functions that can stay go on until the joiners are warm."""
        run, now_s = self.run, self._now_s()
        run.generation = generation
        if run.is_parked:
            run.plan = plan
            self._confirm(0.0, "replace")
            return
        if not run.is_up:
            run.plan = plan
            if run.job.stream and self._stream.count(now_s) - run.num_taken < run.course.batch_of(run.step):
                # No function is called before there is work.
                self._confirm(0.0, "start")
                self._wait_for_data()
                return
            self._begin()
            return
        old = run.plan
        assert old is not None
        stays = min(old.num_functions, plan.num_functions) if old.stages == plan.stages else 0
        joiners = plan.num_functions - stays
        ready_s = now_s + (self.truth.start_s(joiners, run.rng) if joiners else 0.0)
        run.meter.invoke(joiners)
        run.change = WorldPlanSwitch(plan=plan, begun_s=now_s, ready_s=ready_s, num_joiners=joiners)

    def preempt(self, generation: int) -> None:
        """Save at the next boundary and give everything back."""
        run = self.run
        run.generation = generation
        run.is_leaving = True
        if not run.is_up or run.is_parked:
            self._leave()

    def stop(self) -> None:
        """End at once: what was not saved is lost."""
        run = self.run
        self.release()
        run.step = run.saved_step
        self._tell_stopped()

    def release(self) -> None:
        """No function runs any more."""
        run = self.run
        run.token += 1
        if run.is_up and run.change is not None:
            self._charge_joiners(self._now_s())
        run.is_up = run.is_parked = False
        run.change = None
        run.note(self._now_s())

    def _leave(self) -> None:
        self.release()
        self._tell_stopped()

    def _tell_stopped(self) -> None:
        run = self.run
        assert run.replica_id is not None
        self._post(ReplicaStopped(workload_id=run.job.job_id, replica_id=run.replica_id))

    # --- functions ----------------------------------------------------------------------------------------------------

    def _after(self, delay_s: float, happen: Callable[[], None]) -> None:
        """Call back later, unless the run has been stopped or changed by then."""
        run = self.run
        token = run.token

        def at_last() -> None:
            if run.token == token and run.ended_s is None:
                happen()

        self._agenda.after(delay_s, at_last)

    def _begin(self) -> None:
        """Call all functions; they train once the last of them is warm and has the state."""
        run = self.run
        assert run.plan is not None
        plan = run.plan
        run.is_up, run.is_parked, run.is_first_step = True, False, True
        run.num_starts += 1
        run.born_s = self._now_s()
        run.meter.invoke(plan.num_functions)
        run.note(run.born_s)
        start_s = self.truth.start_s(plan.num_functions, run.rng)
        if run.step:
            start_s += self.truth.state_s(run.model, plan.stages[0].memory_mb)
        self._spend(start_s)

        def started() -> None:
            self._confirm(0.0, "start" if run.step == 0 else "resume")
            self._next_step()

        self._after(start_s, started)

    def _spend(self, duration_s: float) -> None:
        """All its functions run for so long."""
        run = self.run
        assert run.plan is not None
        run.meter.run(run.plan, duration_s)
        run.meter.hold_store(duration_s)

    def _confirm(self, pause_s: float, direction: str) -> None:
        run = self.run
        self._post(
            JobResized(
                job_id=run.job.job_id,
                generation=run.generation,
                world_size=1,
                step=run.step,
                pause_s=pause_s,
                direction=direction,  # type: ignore[arg-type]
            )
        )

    def _next_step(self) -> None:
        """Begin the next step, or whatever comes before it."""
        run = self.run
        plan, now_s = run.plan, self._now_s()
        assert plan is not None
        if run.course.total_steps is not None and run.step >= run.course.total_steps:
            self._finish()
            return
        if run.is_leaving:
            self._save()
            pause_s = self.truth.state_s(run.model, plan.stages[0].memory_mb)
            self._spend(pause_s)
            self._after(pause_s, self._leave)
            return
        batch = run.course.batch_of(run.step)
        if run.job.stream:
            available = self._stream.count(now_s) - run.num_taken
            if available < batch and not self._stream.is_closed(now_s):
                self._park()
                return
            if available <= 0:
                self._finish()
                return
            batch = min(batch, available)
        if run.change is not None and now_s >= run.change.ready_s:
            self._change()
            return
        if now_s - run.born_s > self._service.lifetime_s - LEAVE_MARGIN_S:
            self._hand_over()
            return
        self._step(batch)

    def _step(self, batch: int) -> None:
        run = self.run
        plan = run.plan
        assert plan is not None
        usual = self.step_of(plan, run.course.batch_of(run.step))
        compute_s, sync_s = self._drawn(usual, plan.num_functions)
        step_s = compute_s + sync_s
        is_saving = (run.step + 1) % usual.save_every == 0
        whole_s = step_s + (usual.save_s if is_saving else 0.0)
        dies = run.rng.random() < -math.expm1(-self.truth.deaths_per_s(plan.num_functions) * whole_s)
        dies_after_s = float(run.rng.random()) * whole_s
        if dies:
            self._after(dies_after_s, lambda: self._die(dies_after_s))
            return

        def ended() -> None:
            self._spend(whole_s)
            run.meter.ask(usual, whole_s)
            run.step += 1
            run.num_taken += batch
            if is_saving:
                self._save()
            run.told.append(
                WorldReport(
                    at_s=self._now_s(),
                    step=run.step,
                    num_workers=plan.num_replicas,
                    memory_mb=plan.stages[0].memory_mb,
                    global_batch_size=batch,
                    step_s=step_s,
                )
            )
            self._report(plan, batch, usual, compute_s, sync_s, whole_s)
            self._check_budget(usual)
            self._next_step()

        self._after(whole_s, ended)

    def step_of(self, plan: FunctionPlan, batch: int) -> StepTruth:
        """The true time of a step, kept because it is needed often."""
        run = self.run
        key = (plan, batch)
        if key not in self._steps:
            self._steps[key] = self.truth.step(run.model, plan, batch, run.model.parameter_bytes)
        return self._steps[key]

    def _drawn(self, usual: StepTruth, num_functions: int) -> tuple[float, float]:
        """One step's computation and exchange: the slowest of all workers, and what varies from step to step."""
        sigma, rng = self.truth.straggler_sigma, self.run.rng
        slowest = math.exp(sigma * float(rng.standard_normal(num_functions).max()))
        steady = usual.compute_s / mean_of_slowest(num_functions, sigma)
        noise = self.truth.noise_sigma
        centre = -0.5 * noise * noise
        compute_s = steady * slowest * math.exp(centre + noise * float(rng.standard_normal()))
        sync_s = usual.sync_s * math.exp(centre + noise * float(rng.standard_normal()))
        return compute_s, sync_s

    def _die(self, worked_s: float) -> None:
        """A function has died: the others go back to the last state and wait for the one that takes its place."""
        run = self.run
        assert run.plan is not None
        run.num_deaths += 1
        run.num_redone += run.step - run.saved_step
        run.num_taken -= sum(run.course.batch_of(step) for step in range(run.saved_step, run.step))
        run.step = run.saved_step
        run.is_first_step = True
        memory_mb = run.plan.stages[0].memory_mb
        down_s = DETECTION_S + self.truth.start_s(1, run.rng) + self.truth.state_s(run.model, memory_mb)
        run.meter.invoke(1)
        self._spend(worked_s + down_s)
        self._after(down_s, self._next_step)

    def _hand_over(self) -> None:
        """All functions are near the end of their lifetime: warm successors take the state from the store."""
        run = self.run
        assert run.plan is not None
        pause_s = 2.0 * self.truth.state_s(run.model, run.plan.stages[0].memory_mb) + PARK_S
        warm_s = self.truth.start_s(run.plan.num_functions)
        run.meter.invoke(run.plan.num_functions)
        run.meter.run(run.plan, warm_s)
        run.born_s = self._now_s()
        self._pause(pause_s)

    def _pause(self, pause_s: float) -> None:
        self._save()
        self.run.is_first_step = True
        self._spend(pause_s)
        self._after(pause_s, self._next_step)

    def _charge_joiners(self, until_s: float) -> None:
        run = self.run
        change = run.change
        assert change is not None
        run.meter.run(change.plan, max(0.0, until_s - change.begun_s), count=change.num_joiners)

    def _change(self) -> None:
        """At a boundary: all functions park, joiners take the state from the store, leavers return, stayers go on."""
        run = self.run
        change, old, now_s = run.change, run.plan, self._now_s()
        assert change is not None
        assert old is not None
        self._charge_joiners(now_s)
        moved_s = 2.0 * self.truth.state_s(run.model, change.plan.stages[0].memory_mb) if change.num_joiners else 0.0
        pause_s = PARK_S + moved_s
        # A function that leaves is still there while the state is saved.
        run.meter.run(old, PARK_S + moved_s / 2, count=max(0, old.num_functions - change.plan.num_functions))
        if old.stages != change.plan.stages:
            run.born_s = change.begun_s
        run.plan, run.change = change.plan, None
        run.num_changes += 1
        run.note(now_s)
        grows = change.plan.num_functions - old.num_functions
        direction = "grow" if grows > 0 else "shrink" if grows < 0 else "replace"
        self._save()
        run.is_first_step = True
        self._spend(pause_s)

        def gone_on() -> None:
            self._confirm(pause_s, direction)
            self._next_step()

        self._after(pause_s, gone_on)

    # --- streams ------------------------------------------------------------------------------------------------------

    def _park(self) -> None:
        """Fewer samples than a batch are left: all functions save and end, and come back when it is worth it."""
        run, now_s = self.run, self._now_s()
        if run.change is not None:
            self._charge_joiners(now_s)
            run.plan, run.change = run.change.plan, None
            self._confirm(0.0, "replace")
        assert run.plan is not None
        self._save()
        self._spend(self.truth.state_s(run.model, run.plan.stages[0].memory_mb))
        self._tell(run.course.batch_of(run.step), None)
        self._wait_for_data()

    def _wait_for_data(self) -> None:
        run, now_s, stream = self.run, self._now_s(), self._stream
        assert run.plan is not None
        run.is_up = False
        run.note(now_s)
        run.is_up = run.is_parked = True
        batch = run.course.batch_of(run.step)
        first_s = stream.when(run.num_taken + batch)
        back_s = min(stream.when(run.num_taken + WORTH_STEPS * batch), first_s + MAX_WAIT_S, stream.closes_s)
        self._tell_stream()
        self._after(max(0.0, back_s - now_s), self._come_back)

    def _come_back(self) -> None:
        run = self.run
        self._tell_stream()
        run.is_parked = False
        if self._stream.count(self._now_s()) <= run.num_taken:
            # The stream was closed without further data: no function needs to be called.
            self._tell_finished()
            return
        plan = run.plan
        assert plan is not None
        run.num_starts += 1
        run.is_first_step = True
        run.born_s = self._now_s()
        run.meter.invoke(plan.num_functions)
        run.note(run.born_s)
        start_s = self.truth.start_s(plan.num_functions, run.rng)
        start_s += self.truth.state_s(run.model, plan.stages[0].memory_mb)
        self._spend(start_s)
        self._after(start_s, self._next_step)

    def _tell_stream(self) -> None:
        run = self.run
        stream, now_s = self._stream, self._now_s()
        view = StreamView(
            name=run.job.stream,
            num_samples=stream.count(now_s),
            arrivals_per_s=stream.rate(now_s),
            is_closed=stream.is_closed(now_s),
        )
        self._post(StreamObserved(job_id=run.job.job_id, stream=view))

    # --- what goes out ------------------------------------------------------------------------------------------------

    def _report(
        self,
        plan: FunctionPlan,
        batch: int,
        usual: StepTruth,
        compute_s: float,
        sync_s: float,
        step_s: float,
    ) -> None:
        run = self.run
        now_s = self._now_s()
        is_due = now_s - run.last_report_s >= REPORT_EVERY_S
        if run.is_first_step:
            # The first step of an attempt holds what beginning takes.
            run.is_first_step = False
            is_due = True
        else:
            shown = run.shown_of(batch)
            usd = step_usd_of(self._service, self.truth, plan, usual, step_s)
            shown.add(step_s, compute_s, sync_s, usd)
            if shown.is_due():
                measured = shown.measurement(plan, batch, run.model.parameter_bytes)
                self._post(FunctionsMeasured(job_id=run.job.job_id, generation=run.generation, measurement=measured))
                is_due = True
        if is_due:
            self._tell(batch, step_s)
            if run.job.stream:
                self._tell_stream()

    def _tell(self, batch: int, step_s: float | None) -> None:
        run = self.run
        run.last_report_s = self._now_s()
        assert run.plan is not None
        usage = run.meter.usage()
        self._post(UsageReported(job_id=run.job.job_id, usage=usage, bill=run.meter.bill()))
        self._post(
            ProgressReported(
                job_id=run.job.job_id,
                generation=run.generation,
                step=run.step,
                total_steps=run.course.total_steps or 0,
                world_size=run.plan.num_functions,
                epoch=run.course.epoch_of(run.step),
                samples_per_s=batch / step_s if step_s else None,
                global_batch_size=run.course.batch_of(run.step),
            )
        )

    def _save(self) -> None:
        run = self.run
        run.saved_step = run.step
        run.committed.append(run.step)
        self._post(
            CheckpointCommitted(
                job_id=run.job.job_id, generation=run.generation, step=run.step, path=f"state/{run.step}"
            )
        )

    def _check_budget(self, usual: StepTruth) -> None:
        """A budget is a cap: before it is broken everything is saved and the job is paused."""
        run = self.run
        budget_usd = run.job.goal.budget_usd
        if budget_usd is None or run.is_leaving:
            return
        assert run.plan is not None
        save_usd = step_usd_of(self._service, self.truth, run.plan, usual, 2.0 * usual.step_s + usual.save_s)
        is_done = run.course.total_steps is not None and run.step >= run.course.total_steps
        if not is_done and run.meter.bill().total_usd + save_usd > budget_usd:
            self._post(PauseRequested(job_id=run.job.job_id, reason="its budget is spent"))

    def _finish(self) -> None:
        run = self.run
        self._save()
        assert run.plan is not None
        pause_s = self.truth.state_s(run.model, run.plan.stages[0].memory_mb)
        self._spend(pause_s)

        self._after(pause_s, self._tell_finished)

    def _tell_finished(self) -> None:
        run = self.run
        self._tell(run.course.batch_of(run.step), None)
        self._post(JobFinished(job_id=run.job.job_id, generation=run.generation, step=run.step))
        # Nothing runs from here on; what the platform does with the rest costs nothing.
        run.token += 1


def step_usd_of(
    service: FunctionService, truth: Truth, plan: FunctionPlan, usual: StepTruth, duration_s: float
) -> float:
    """What a step that takes so long costs, functions and requests together."""
    meter = CostMeter(service.prices, truth.has_parameter_store)
    meter.run(plan, duration_s)
    meter.hold_store(duration_s)
    requests_usd = usual.num_puts * service.prices.usd_per_put + usual.num_gets * service.prices.usd_per_get
    return meter.bill().total_usd + requests_usd
