"""How functions in a world of events behave: as core.function_wire says they should, with every fault there is."""

from __future__ import annotations

from kits.functions.world_parts import BATCH, PRICES, Function
from springtide.backends.functions.coordinator import messages
from springtide.core.functions import (
    Usage,
)
from springtide.core.wire.functions import (
    ErrorCode,
    FunctionReport,
    FunctionResult,
    LaneTimes,
    Place,
)
from springtide.runtime.functions.reporting import LEAST_INTERVAL_S


class Functions:
    """The functions of a World, which has everything else."""

    def invoke(self, order: messages.Invoke) -> None:
        draw = self.random.random
        if draw() < self.faults.throttled:
            self.after(0.05, lambda: self.end_of(order, "throttled", error="429", retry_after_s=1.0))
            return
        function = Function(order=order.order, invoke=order, memory_mb=order.memory_mb, invoked_at_s=self.now_s)
        self.functions.append(function)
        if draw() < self.faults.vanishes:
            function.done = True
            if draw() < 0.5:
                self.after(0.5, lambda: self.end_of(order, "lost", error="the connection broke", duration_s=None))
            return
        late_s = self.random.uniform(20, 120) if draw() < self.faults.starts_late else 0.0
        self.after(late_s + self.service.cold_start_s * self.random.uniform(0.5, 1.5), lambda: self.begin(function))

    def end_of(self, invoke: messages.Invoke, outcome: str, **fields: object) -> None:
        order = invoke.order
        ended = messages.InvocationEnded(
            number=invoke.number,
            place=Place(order.stage, order.replica),
            incarnation=order.incarnation,
            outcome=outcome,
            **fields,  # type: ignore[arg-type]
        )
        self.tell(ended)
        if self.random.random() < self.faults.repeated:
            self.after(self.random.uniform(0, 30), lambda: self.tell(ended))

    def begin(self, function: Function) -> None:
        function.began_at_s = self.now_s
        if self.random.random() < self.faults.lost_contact:
            function.is_contact_lost = True
            self.end_of(function.invoke, "lost", error="the connection broke", duration_s=None)
        function.phase = "starting"
        self.report(function)
        self.after(self.service.lifetime_s, lambda: self.die(function, "timed_out"))
        if self.faults.killed_per_s:
            self.after(self.random.expovariate(self.faults.killed_per_s), lambda: self.die(function, "killed"))
        if function.memory_mb < self.faults.too_small_mb:
            self.after(2.0, lambda: self.die(function, "out_of_memory", max_memory_mb=function.memory_mb))
        self.after(self.random.uniform(1.0, 3.0), lambda: self.warm(function))

    def warm(self, function: Function) -> None:
        if not function.done:
            function.phase = "warm"
            self.report(function)
            self.turn(function)

    def report(self, function: Function, error: str = "", code: ErrorCode = "") -> None:
        """A change of phase is written at once, anything else so often at most: who dies before has not told it."""
        key = function.place, function.order.incarnation
        written = self.reports.get(key)
        left_s = function.reported_at_s + LEAST_INTERVAL_S - self.now_s
        if written is None or written.phase != function.phase or left_s <= 0.0:
            function.reported_at_s, function.owes_report = self.now_s, False
            self.reports[key] = self.report_of(function, error, code)
        elif not function.owes_report:
            function.owes_report = True
            self.after(left_s, lambda: self.report_if_owed(function))

    def report_if_owed(self, function: Function) -> None:
        if function.owes_report and not function.done:
            self.report(function)

    def report_of(self, function: Function, error: str, code: ErrorCode) -> FunctionReport:
        joined = function.joined or (function.order.generation, function.order.attempt)
        is_last = function.order.stage == len((function.plan or self.plan).stages) - 1
        return FunctionReport(
            stage=function.order.stage,
            replica=function.order.replica,
            incarnation=function.order.incarnation,
            generation=joined[0],
            attempt=joined[1],
            phase=function.phase,
            step=function.step,
            total_steps=self.total_of(function) or 0,
            global_batch_size=BATCH,
            saved_step=function.saved_step,
            losses=tuple(function.losses[-256:]) if is_last else (),
            lanes=LaneTimes(step_s=self.step_s, save_s=0.01 * self.step_s),
            totals=function.timer.totals,
            pause_s=function.timer.pause_s,
            usage=Usage(num_puts=function.step, num_gets=3 * function.step),
            error=error,
            error_code=code,
        )

    def leave(self, function: Function, outcome: str, error: str = "", code: ErrorCode = "") -> None:
        function.done = True
        function.phase = outcome
        self.report(function, error, code)
        self.charge(function)
        result = FunctionResult(
            stage=function.order.stage,
            replica=function.order.replica,
            incarnation=function.order.incarnation,
            outcome=outcome,  # type: ignore[arg-type]
            step=function.step,
            error=error,
            error_code=code,
            usage=Usage(num_puts=function.step, num_gets=3 * function.step),
        )
        if not function.is_contact_lost:
            lasted_s = self.now_s - function.invoked_at_s
            # The shell reads the last report before it tells of the end.
            last = self.reports[function.place, function.order.incarnation]

            def tell() -> None:
                self.tell(messages.ReportRead(report=last))
                self.end_of(function.invoke, "returned", result=result, duration_s=lasted_s)

            self.after(self.random.uniform(0.01, 0.3), tell)

    def charge(self, function: Function) -> None:
        self.billed_gb_s += function.memory_mb / 1024 * (self.now_s - function.invoked_at_s)

    def die(self, function: Function, outcome: str, **fields: object) -> None:
        if function.done:
            return
        function.done = True
        function.phase = "dead"
        self.charge(function)
        if not function.is_contact_lost:
            lasted_s = self.now_s - function.invoked_at_s
            last = self.reports.get((function.place, function.order.incarnation))

            def tell() -> None:
                if last is not None:
                    self.tell(messages.ReportRead(report=last))
                self.end_of(function.invoke, outcome, error=f"it was {outcome}", duration_s=lasted_s, **fields)

            self.after(self.random.uniform(0.01, 0.5), tell)

    def turn(self, function: Function) -> None:
        """Look at the control record, and go on with what is to be done."""
        if function.done:
            return
        outcome = self.verdict(function)
        if self.is_trouble():
            self.leave(function, "failed", "StorageError: the parameter store does not answer", "store")
        elif outcome:
            self.leave(function, outcome)
        elif not self.takes_its_place(function):
            self.after(0.5, lambda: self.turn(function))
        elif function.phase == "parked":
            self.after(0.25, lambda: self.turn(function))
        elif function.stuck_until_s is None:
            self.at_boundary(function)
        elif self.now_s > function.stuck_until_s:
            self.leave(function, "failed", "StorageError: the parameter store does not answer", "store")
        else:
            self.after(0.5, lambda: self.turn(function))

    def claims(self, function: Function) -> tuple[int, bool, bool]:
        """Whom the record names at its place, whether it awaits this function, and whether this one follows that."""
        control, order = self.control, function.order
        assert control is not None
        named = control.incarnations.get(str(function.place), -1)
        upcoming = control.upcoming
        is_awaited = upcoming is not None and upcoming.joiners.get(str(function.place)) == order.incarnation
        return named, is_awaited, order.is_successor and named == order.follows

    def verdict(self, function: Function) -> str:
        """How it has to end by the control record; empty where it may go on."""
        control, order = self.control, function.order
        assert control is not None
        named, is_awaited, follows = self.claims(function)
        oldest = control.generation if control.stays_from is None else control.stays_from
        unwanted = "stopped" if function.phase == "parked" else "superseded"
        if order.generation < oldest or (named > order.incarnation and not is_awaited):
            return unwanted
        if control.verb == "stop":
            return "stopped"
        if named < order.incarnation and not follows and not is_awaited:
            return unwanted
        is_called_off = control.upcoming is None and function.joined == (control.generation, control.attempt)
        return "stopped" if function.phase == "parked" and is_called_off else ""

    def takes_its_place(self, function: Function) -> bool:
        """Whether it works in the present attempt, which it joins if it is its turn."""
        control = self.control
        assert control is not None
        current = (control.generation, control.attempt)
        if function.joined == current:
            return True
        named, is_awaited, _ = self.claims(function)
        before = self.left.get((function.place, function.order.follows))
        if before is not None and function.joined is None:
            function.losses = before[2]
        if function.order.incarnation == named:
            self.join(function, current, control.restore_step)
            return True
        left = self.left.get((function.place, named))
        if is_awaited or left is None or left[1] != control.attempt:
            return False
        self.join(function, current, left[0])
        return True

    def is_wire_down(self, function: Function) -> bool:
        """Whether what travels does not get through from there."""
        assert function.plan is not None
        if not self.has_parameter_store or function.plan.num_functions == 1:
            return False
        return not self.is_store_up or function.wire_url != f"redis://{self.store_number}"

    def be_stuck(self, function: Function) -> None:
        function.phase, function.stuck_until_s = "stuck", self.now_s + 60.0
        self.report(function, "StorageError: the parameter store does not answer")
        self.after(0.5, lambda: self.turn(function))

    def total_of(self, function: Function) -> int | None:
        """How many steps the job has, as far as that function may know."""
        if self.stream is None:
            return self.total_steps
        control = self.control
        assert control is not None
        if not control.is_stream_closed or function.joined != (control.generation, control.attempt):
            return None
        return -(-(control.num_available or 0) // BATCH)

    def is_trouble(self) -> bool:
        since_s = self.faults.trouble_from_s
        return since_s is not None and since_s <= self.now_s < self.faults.trouble_until_s

    def join(self, function: Function, current: tuple[int, int], step: int) -> None:
        others = [
            other
            for other in self.functions
            if other is not function and other.place == function.place and not other.done and other.joined == current
        ]
        assert not others, f"two may write at {function.place} in attempt {current} at {self.now_s}"
        is_in_memory = function.joined is not None and function.step == step
        assert self.control is not None
        function.joined, function.step, function.plan = current, step, self.control.plan
        function.stuck_until_s = function.waits_since_s = function.saved_step = None
        function.wire_url = self.control.parameter_url or function.wire_url or function.order.parameter_url
        if self.has_parameter_store and function.plan.num_functions > 1:
            assert function.wire_url, "it has nobody to exchange through"
        function.timer.begin()
        if not is_in_memory:
            own, first = (self.keys.state_meta(step, stage) for stage in (function.order.stage, 0))
            function.applied = list(self.states[own if own in self.states else first][0]) if step else []
        assert function.applied == list(range(1, step + 1))
        function.phase = "training"
        self.report(function)

    def at_boundary(self, function: Function) -> None:
        assert self.control is not None
        assert function.joined is not None
        assert function.began_at_s is not None
        total = self.total_of(function)
        if total is not None and function.step >= total:
            self.save_if_due(function)
            self.leave(function, "finished")
            return
        if self.lacks_samples(function):
            return
        stop = self.stops.get(function.joined)
        last = self.control.last_step
        if function.place == Place(0, 0) and stop is None and last is not None and function.step >= last:
            contributed = (function.joined, function.step + 1, function.place) in self.contributions
            if not contributed:
                stop = self.stops[function.joined] = function.step
        if stop == function.step:
            self.halt(function)
            return
        left_s = function.began_at_s + self.service.lifetime_s - self.now_s
        if left_s < 1.5 * self.step_s * 1.5 + 2.0 and (function.joined, function.step + 1, function.place) not in (
            self.contributions
        ):
            self.save(function)
            self.left[function.place, function.order.incarnation] = (
                function.step,
                function.joined[1],
                function.losses,
            )
            self.leave(function, "left")
            return
        joined, step = function.joined, function.step + 1
        self.after(self.step_s * self.random.uniform(0.3, 0.7), lambda: self.contribute(function, joined, step))

    def lacks_samples(self, function: Function) -> bool:
        """Whether it has to wait for samples, or to stop for want of them."""
        control = self.control
        assert control is not None
        if self.stream is None:
            return False
        assert control.num_available is not None
        if control.is_stream_closed or (function.step + 1) * BATCH <= control.num_available:
            if function.waits_since_s is not None:
                function.timer.skip(self.now_s - function.waits_since_s)
                function.waits_since_s, function.phase = None, "training"
            return False
        if function.waits_since_s is None:
            function.waits_since_s, function.phase = self.now_s, "waiting"
            self.report(function)
        if control.last_step is not None:
            self.halt(function)
        else:
            self.after(1.0, lambda: self.turn(function))
        return True

    def halt(self, function: Function) -> None:
        """It stands at a boundary where all stop, or where another plan follows."""
        assert self.control is not None
        self.save_if_due(function)
        if self.control.upcoming is None:
            self.leave(function, "stopped")
            return
        function.phase = "parked"
        self.report(function)
        self.after(0.25, lambda: self.turn(function))

    def save_if_due(self, function: Function) -> None:
        """Replicas hold the same; one of them saves it."""
        assert function.plan is not None
        if function.order.replica == function.step % function.plan.num_replicas:
            self.save(function)

    def contribute(self, function: Function, joined: tuple[int, int], step: int) -> None:
        if function.done or function.joined != joined:
            return
        if self.faults.user_error_at == step and function.order.stage == 0:
            self.leave(function, "failed", self.user_error, self.user_error_code)
            return
        if self.is_wire_down(function):
            self.be_stuck(function)
            return
        function.computed_s = 0.1 * self.step_s
        self.contributions.add((joined, step, function.place))
        self.await_others(function, joined, step)

    def await_others(self, function: Function, joined: tuple[int, int], step: int) -> None:
        """Wait until everybody has done their part of the step, looking at the control record now and then."""
        if function.done:
            return
        control = self.control
        assert control is not None
        if self.stops.get(joined) == function.step or control.verb == "stop" or self.is_trouble():
            self.turn(function)
            return
        if (control.generation, control.attempt) != joined:
            self.turn(function)
            return
        if self.is_wire_down(function):
            self.be_stuck(function)
            return
        assert function.plan is not None
        places = [Place(s, r) for s in range(len(function.plan.stages)) for r in range(function.plan.num_replicas)]
        if not all((joined, step, place) in self.contributions for place in places):
            self.after(0.3, lambda: self.await_others(function, joined, step))
            return
        mark = (joined, function.place, step)
        assert mark not in self.commits, f"{mark} is committed twice"
        self.commits.add(mark)
        assert step == function.step + 1
        function.step = step
        function.applied.append(step)
        # As the reporter of a real one: what was told of a step that is redone is replaced, the rest stands.
        function.losses = sorted([*(told for told in function.losses if told[0] != step), (step, 1.0 / step, BATCH)])
        self.num_samples.setdefault(step, set()).add(BATCH * function.plan.num_replicas)
        function.timer.committed(self.now_s, LaneTimes(forward_s=function.computed_s), BATCH, 1000)
        if step % control.save_every == 0:
            self.save_if_due(function)
        self.report(function)
        # A step takes the time that is left of it.
        self.after(self.step_s * self.random.uniform(0.2, 0.4), lambda: self.turn(function))

    def save(self, function: Function) -> None:
        assert function.plan is not None
        stage = function.plan.stages[function.order.stage]
        key = self.keys.state_meta(function.step, function.order.stage)
        self.states[key] = (list(function.applied), (stage.first_layer, stage.end_layer))
        self.num_puts += 2
        function.saved_step = function.step

    def spent_usd(self) -> float:
        """What it truly cost, those who still run included: by durations, not by what anybody believes."""
        gb_s = self.billed_gb_s + sum(
            function.memory_mb / 1024 * (self.now_s - function.invoked_at_s)
            for function in self.functions
            if not function.done and function.began_at_s is not None
        )
        return gb_s * PRICES.usd_per_gb_s + self.num_puts * PRICES.usd_per_put
