"""How a job trains on the machines: groups, steps, switches of generation, checkpoints, the end.

Progress is settled lazily: a group knows since when it trains and how long a step takes, and what looks, or
disturbs it, first commits the steps that are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from springtide.core.errors import Fenced, StorageError
from springtide.core.events import (
    CheckpointCommitted,
    Event,
    GroupBroken,
    JobFailed,
    JobFinished,
    JobResized,
    ProgressReported,
)
from springtide.core.wire.workers import FormGroup
from springtide.core.workload import Checkpoint, TrainingJob
from springtide_studies.fault_seeds.models import batch_news, job_model
from springtide_studies.fault_seeds.store import JobStore
from springtide_studies.fault_seeds.training_group import ModelledGroup

if TYPE_CHECKING:
    from springtide_studies.fault_seeds.machine import Machine, Process

# Sums of float durations miss a step boundary by rounding; a step counts as complete this close to it.
_CLOSE_S = 1e-9


class ModelledTraining:
    """One job on the machines, through all its generations."""

    def __init__(self, machine: Machine, job: TrainingJob) -> None:
        assert job.length_unit == "samples", "on these machines a job's length is its samples"
        self.machine = machine
        self.job = job
        self.model = job_model(job)
        self.store = JobStore(job.job_id, machine.complain)
        self.group: ModelledGroup | None = None
        self.switch: FormGroup | None = None
        self.is_writing = False

    # --- forming groups ----------------------------------------------------------------------------------------------

    def receive_order(self, process: Process) -> None:
        """A worker has received the order of a new group. A forced one makes it leave its present collective."""
        group = self.group
        order = process.form
        is_torn_off = order is not None and group is not None and order.forced and order.generation > group.generation
        if is_torn_off and group is not None and process in group.members:
            self._halt(group)
            group.is_broken = True
        self.consider()

    def consider(self) -> None:
        """Switch to the newest group whose order every member of it and of the group before has received."""
        orders = [p.form for p in self.machine.of_workload(self.job.job_id) if p.form is not None and not p.is_fenced]
        order = max(orders, key=lambda form: form.generation, default=None)
        group = self.group
        if order is None or order.generation <= self.store.formed_generation:
            return
        members = [self.machine.processes.get(member) for member in order.members]
        for member in members:
            if member is None or not member.is_working or not member.is_ready:
                return
            if member.form is None or member.form.generation != order.generation:
                return
        if group is not None and not order.forced and any(p.is_alive and not p.is_fenced for p in group.members):
            if group.is_broken:
                # Workers whose collective broke take any order that comes after the break; an earlier one they leave.
                if all(p.is_alive and p.told_at_s > group.broken_at_s for p in group.members):
                    self._form(order, [member for member in members if member is not None])
                return
            if group.is_finished or not group.is_training:
                return
            told = all(p.form is not None and p.form.generation == order.generation for p in group.members)
            if told and (self.switch is None or self.switch.generation != order.generation):
                self.switch = order
                self._schedule(group)
            return
        self._form(order, [member for member in members if member is not None])

    def _form(self, order: FormGroup, members: list[Process]) -> None:
        machine, old = self.machine, self.group
        if old is not None:
            self._halt(old)
        self.switch = None
        states = [(p.state_step, p.state_seen) for p in members if p.state_step is not None]
        restored = next((p.action.restore for p in members if p.action.restore is not None), None)
        step, num_seen = max(states, default=(0, 0))
        intact = None if restored is None else self.store.intact(restored)
        if not states and intact is not None:
            step, num_seen = intact.step, self.store.cursors.get(intact.path, 0)
        try:
            self.store.begin(
                order.generation,
                step,
                num_seen,
                is_fresh=not states,
                born_generation=min(p.generation for p in members),
            )
        except Fenced:
            self._flee(members)
            return
        if not states and restored is not None and restored.path not in self.store.manifests:
            machine.complain("restored-exists", f"{self.job.job_id} restores {restored.path}, which is not there")
        before = 0 if old is None else len(old.members)
        direction = _direction(before, len(members), is_forced=order.forced, is_restored=restored is not None)
        batch_size = order.global_batch_size or self.job.global_batch_size
        group = self.group = ModelledGroup(order.generation, members, step, num_seen, batch_size)
        for process in members:
            process.is_member, process.state_step, process.state_seen = True, step, num_seen
        for process in machine.of_workload(self.job.job_id):
            if process.is_member and process not in members and not process.is_fenced:
                machine.leave(process, "it has left the group")
        machine.say(
            "{}: generation {} trains on {} from step {}", self.job.job_id, order.generation, len(members), step
        )
        pause_s = machine.delays.switch_s
        group.ticket += 1
        ticket = group.ticket
        machine.agenda.after(pause_s, lambda: self._start(group, ticket, pause_s, direction))

    def _start(self, group: ModelledGroup, ticket: int, pause_s: float, direction: str) -> None:
        if group is not self.group or group.ticket != ticket or group.is_broken:
            return
        if any(not member.is_working for member in group.members):
            # The first collective hangs until the stalled member is back or given up.
            self.machine.agenda.after(pause_s, lambda: self._start(group, ticket, pause_s, direction))
            return
        now_s = self.machine.clock.now_s()
        delays = self.machine.delays
        group.began_s = now_s
        self._keep_busy(group, is_training=True)
        group.step_s = self._step_s(group)
        group.progress_due_s = now_s + delays.progress_s
        group.checkpoint_due_s = now_s + self.job.checkpoint_interval_s
        self.machine.report(
            group.members[0],
            JobResized(
                job_id=self.job.job_id,
                generation=group.generation,
                world_size=len(group.members),
                step=group.step,
                pause_s=pause_s,
                direction=direction,  # type: ignore[arg-type]
            ),
        )
        self._report_progress(group)
        self._schedule(group)

    # --- training ----------------------------------------------------------------------------------------------------

    def _step_s(self, group: ModelledGroup) -> float:
        """A step of the group: its slowest member, and the one that gets least of a device it shares, hold it up."""
        alone_s = self.model.step_s(len(group.members), group.batch_size) * max(p.slowness for p in group.members)
        return alone_s / self.machine.sharing.slowest([p.replica_id for p in group.members])

    def _keep_busy(self, group: ModelledGroup, *, is_training: bool) -> None:
        """From now on the group uses its devices, or leaves them to others."""
        # A change of a worker's part of its device must not find a group of which only some members train.
        group.is_training = False
        self.machine.sharing.set_demand([p.replica_id for p in group.members], float(is_training))
        group.is_training = is_training

    def _num_left(self, group: ModelledGroup) -> int:
        return self.model.num_steps_left(group.num_seen, group.batch_size)

    def settle(self, group: ModelledGroup) -> None:
        """Commit the steps that are complete by now. A group that is refused as a writer of the past ends."""
        if not group.is_training:
            return
        now_s = self.machine.clock.now_s()
        done = int((now_s - group.began_s + _CLOSE_S) / group.step_s)
        done = min(done, self._num_left(group))
        if done <= 0:
            return
        num_seen = self.model.num_seen_after(group.num_seen, done, group.batch_size)
        try:
            self.store.commit(group.generation, group.step, group.step + done, num_seen)
        except Fenced:
            self._keep_busy(group, is_training=False)
            group.is_broken = True
            self._flee(group.members)
            return
        group.step, group.num_seen = group.step + done, num_seen
        group.began_s += done * group.step_s
        for process in group.members:
            process.state_step, process.state_seen = group.step, num_seen

    def _halt(self, group: ModelledGroup) -> None:
        """Stop training; the step that is under way is lost."""
        self.settle(group)
        self._keep_busy(group, is_training=False)
        group.ticket += 1

    def _flee(self, members: list[Process]) -> None:
        for process in list(members):
            flee = partial(self.machine.die, process, "a newer generation owns the job")
            self.machine.agenda.after(self.machine.delays.exit_s, flee)

    def _schedule(self, group: ModelledGroup) -> None:
        """Wake up at the next step boundary at which there is something to do."""
        if not group.is_training:
            return
        group.ticket += 1
        ticket = group.ticket
        now_s = self.machine.clock.now_s()
        due_step = group.step + self._num_left(group)
        if self.model.poison in ("raise", "segfault") and group.step < self.model.poison_step:
            due_step = self.model.poison_step
        due_s = group.began_s + (due_step - group.step) * group.step_s
        soonest_s = min(group.progress_due_s, group.checkpoint_due_s)
        if self.switch is not None or self._is_preempted(group):
            soonest_s = now_s
        if soonest_s < due_s:
            steps = max(0, math.ceil((soonest_s - group.began_s - _CLOSE_S) / group.step_s))
            due_s = min(due_s, group.began_s + steps * group.step_s)
        self.machine.agenda.at(due_s, lambda: self._reach(group, ticket))

    def _reach(self, group: ModelledGroup, ticket: int) -> None:
        """A step boundary at which something is to be done."""
        if group is not self.group or group.ticket != ticket or not group.is_training:
            return
        self.settle(group)
        if not group.is_training:
            return
        now_s = self.machine.clock.now_s()
        if self.model.poison == "raise" and group.step >= self.model.poison_step:
            self._fail(group)
            return
        if self.model.poison == "segfault" and group.step >= self.model.poison_step:
            self.machine.die(group.members[-1], "it crashed at its own step")
            return
        if not self._num_left(group):
            self._finish(group)
            return
        if self._is_preempted(group):
            self._preempt(group)
            return
        if self.switch is not None:
            order, self.switch = self.switch, None
            members = [self.machine.processes[member] for member in order.members]
            if all(p.is_working and p.is_ready for p in (*members, *group.members)):
                self._form(order, members)
                return
        if now_s >= group.progress_due_s - _CLOSE_S:
            group.progress_due_s = now_s + self.machine.delays.progress_s
            self._report_progress(group)
        if now_s >= group.checkpoint_due_s - _CLOSE_S:
            group.checkpoint_due_s = now_s + self.job.checkpoint_interval_s
            self.write_checkpoint(group.members[0], group.generation, group.step, group.num_seen)
        self._schedule(group)

    def _report_progress(self, group: ModelledGroup) -> None:
        epoch = group.num_seen // self.model.num_samples
        event = ProgressReported(
            job_id=self.job.job_id,
            generation=group.generation,
            step=group.step,
            total_steps=group.step + self._num_left(group),
            world_size=len(group.members),
            epoch=epoch,
            samples_per_s=group.batch_size / group.step_s,
            **batch_news(self.job, self.model, group.batch_size, group.num_seen, len(group.members), group.step_s),
        )
        self.machine.report(group.members[0], event, is_kept=False)

    def _finish(self, group: ModelledGroup) -> None:
        self._keep_busy(group, is_training=False)
        group.is_finished = True
        self.machine.say("{}: training returns at step {}", self.job.job_id, group.step)
        self.machine.report(
            group.members[0],
            JobFinished(
                job_id=self.job.job_id,
                generation=group.generation,
                step=group.step,
                artifact_path=f"{self.job.job_id}/artifacts/model.safetensors",
            ),
        )

    def _fail(self, group: ModelledGroup) -> None:
        self._keep_busy(group, is_training=False)
        group.is_finished = True
        self.machine.report(
            group.members[0],
            JobFailed(job_id=self.job.job_id, generation=group.generation, error="ValueError: the user's code raised"),
        )

    def receive_acknowledgement(self, process: Process, event: Event) -> None:
        """A report is durable. After the last one the process need not wait any longer."""
        group = self.group
        if isinstance(event, JobFinished | JobFailed) and group is not None and event.generation == group.generation:
            for member in group.members:
                self.machine.leave(member, "training is over")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def write_checkpoint(
        self, writer: Process, generation: int, step: int, num_seen: int = 0, *, is_last: bool = False
    ) -> None:
        """Write a checkpoint: blobs first, manifest last, then the report; the writer may be gone at any moment."""
        path = f"{self.job.job_id}/checkpoints/{generation}-{step}"
        checkpoint = Checkpoint(generation=generation, step=step, path=path, num_bytes=1000)
        half_s = self.machine.delays.checkpoint_s * self.machine.disk_slowness / 2
        first, second = write_order(self.store, checkpoint, num_seen)

        def publish() -> None:
            if not self._may_go_on(writer, publish):
                return
            try:
                second()
            except (Fenced, StorageError) as error:
                self.machine.say("{}: checkpoint refused: {}", self.job.job_id, error)
            else:
                self.machine.say("{}: checkpoint of step {} by generation {}", self.job.job_id, step, generation)
                self.machine.report(
                    writer,
                    CheckpointCommitted(
                        job_id=self.job.job_id, generation=generation, step=step, path=path, num_bytes=1000
                    ),
                )
            if is_last:
                self._leave_all(generation)

        def begin() -> None:
            if not self._may_go_on(writer, begin):
                return
            try:
                first()
            except (Fenced, StorageError) as error:
                self.machine.say("{}: checkpoint refused: {}", self.job.job_id, error)
                if is_last:
                    self._leave_all(generation)
                return
            self.machine.agenda.after(half_s, publish)

        self.machine.agenda.after(half_s, begin)

    def _may_go_on(self, writer: Process, happen: object) -> bool:
        if writer.is_alive and writer.is_stalled:
            writer.on_wake.append(happen)  # type: ignore[arg-type]
            return False
        return writer.is_alive

    # --- preemption --------------------------------------------------------------------------------------------------

    def receive_preemption(self, process: Process) -> None:
        """A worker has received the order to commit a checkpoint and end."""
        group = self.group
        if group is None or process not in group.members:
            self.machine.leave(process, "preempted before it trained")
        elif group.is_training:
            self._schedule(group)
        else:
            self._preempt_broken(group)

    def _is_preempted(self, group: ModelledGroup) -> bool:
        return all(member.preempt is not None for member in group.members if member.is_alive)

    def _preempt(self, group: ModelledGroup) -> None:
        self._halt(group)
        self._commit_and_leave(group)

    def _preempt_broken(self, group: ModelledGroup) -> None:
        """The collective is gone, but every live worker still holds the state of the last committed step."""
        if group.is_broken and self._is_preempted(group) and any(p.is_working for p in group.members):
            self._commit_and_leave(group)

    def _commit_and_leave(self, group: ModelledGroup) -> None:
        writer = next((p for p in group.members if p.is_working), None)
        if writer is None or writer.preempt is None or self.is_writing:
            return
        self.is_writing = True
        self.write_checkpoint(writer, writer.preempt.generation, group.step, group.num_seen, is_last=True)

    def _leave_all(self, generation: int) -> None:
        self.is_writing = False
        group = self.group
        if group is None:
            return
        for member in group.members:
            if member.preempt is not None:
                self.machine.leave(member, f"preempted as generation {generation}")

    # --- mishaps -----------------------------------------------------------------------------------------------------

    def lose_member(self, process: Process) -> None:
        """A worker has died. The others hang in their collective until an order comes or it times out."""
        group = self.group
        if group is None or process not in group.members:
            self.consider()
            return
        if group.is_finished:
            return
        self.break_group(group, f"{process.replica_id} is gone")
        self._preempt_broken(group)

    def break_group(self, group: ModelledGroup, detail: str) -> None:
        """A collective of this group fails; its members wait for a new group."""
        if group is not self.group or group.is_finished:
            return
        self.is_writing = False
        self._halt(group)
        group.is_broken, group.broken_at_s = True, self.machine.clock.now_s()
        self.machine.agenda.after(self.machine.delays.collective_timeout_s, lambda: self._report_break(group, detail))

    def _report_break(self, group: ModelledGroup, detail: str) -> None:
        if group is not self.group or not group.is_broken:
            return
        teller = next((p for p in group.members if p.is_working and not p.has_left), None)
        if teller is None and any(p.is_alive and p.is_stalled for p in group.members):
            # The workers that are left stand still just now and tell when they go on.
            self.machine.agenda.after(
                self.machine.delays.collective_timeout_s, lambda: self._report_break(group, detail)
            )
        if teller is not None:
            self.machine.report(teller, GroupBroken(job_id=self.job.job_id, generation=group.generation, detail=detail))

    def stall_member(self, process: Process) -> None:
        """One stalled worker holds up its whole group."""
        group = self.group
        if group is not None and process in group.members and group.is_training:
            self._halt(group)

    def wake_member(self, process: Process) -> None:
        """A stalled worker is back in time: the group goes on with the step that was under way."""
        group = self.group
        self.consider()
        if group is not self.group or group is None or process not in group.members:
            return
        self._preempt_broken(group)
        if group.is_broken or group.is_finished or group.is_training or not all(p.is_working for p in group.members):
            return
        if group.checkpoint_due_s == math.inf:
            return  # Its first step has not begun: `_start` still waits for it.
        group.began_s = self.machine.clock.now_s()
        self._keep_busy(group, is_training=True)
        group.step_s = self._step_s(group)
        self._schedule(group)

    def change_pace(self) -> None:
        """A member has become slower or faster, or gets another part of its device. What is done of a step stays so."""
        group = self.group
        if group is None or not group.is_training:
            return
        self.settle(group)
        if not group.is_training:
            return
        now_s, step_s = self.machine.clock.now_s(), self._step_s(group)
        group.began_s = now_s - (now_s - group.began_s) / group.step_s * step_s
        group.step_s = step_s
        self._schedule(group)

    def write_after_fencing(self, process: Process) -> None:
        """A worker that was given up comes back and tries to commit and publish under its old generation."""
        group = self.group
        if process.state_step is None or process.form is None:
            return
        generation, step, num_seen = process.form.generation, process.state_step, process.state_seen
        is_alone = group is not None and group.members == [process] and group.generation == generation
        is_alone = is_alone and group is not None and not group.is_finished and bool(self._num_left(group))
        if self.store.fence > generation or is_alone:
            try:
                size = group.batch_size if is_alone and group is not None else 1
                later = self.model.num_seen_after(num_seen, 1, size)
                self.store.commit(generation, step, step + 1, later)
                if is_alone and group is not None:
                    group.step = process.state_step = step + 1
                    group.num_seen = process.state_seen = num_seen = later
            except Fenced:
                self.machine.say("{}: late commit of {} refused", self.job.job_id, process.replica_id)
            try:
                path = f"{self.job.job_id}/checkpoints/{generation}-{step}-late"
                self.store.write_blobs(path)
                self.store.write_manifest(Checkpoint(generation=generation, step=step, path=path), process.state_seen)
            except (Fenced, StorageError):
                self.machine.say("{}: late checkpoint of {} refused", self.job.job_id, process.replica_id)


def write_order(
    store: JobStore, checkpoint: Checkpoint, num_seen: int = 0
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The two halves of writing a checkpoint, in the order in which they become durable."""
    return lambda: store.write_blobs(checkpoint.path), lambda: store.write_manifest(checkpoint, num_seen)


def _direction(before: int, after: int, *, is_forced: bool, is_restored: bool) -> str:
    if before == 0:
        return "resume" if is_restored else "start"
    if is_forced:
        return "recover"
    return "replace" if after == before else ("grow" if after > before else "shrink")
