"""One decision of the policy `springtide`: from a snapshot and the reservations to the devices of every workload."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from springtide.core.decision import EMPTY, DeviceTrade, PoolAllocation, Refusal, Snapshot
from springtide.core.resources import Topology
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.cache import RowTable
from springtide.scheduling.families.learning import FamilyMemory
from springtide.scheduling.placement.topology import layout_of
from springtide.scheduling.policies.springtide.batches import AdaptiveBatches
from springtide.scheduling.policies.springtide.blocks import admit_on_used_block
from springtide.scheduling.policies.springtide.capacity import (
    StayingJobs,
    announced_falls,
    find_staying_jobs,
    forget_taken_devices,
    has_more_devices,
    promisable_capacity,
)
from springtide.scheduling.policies.springtide.first_runs import FirstRuns
from springtide.scheduling.policies.springtide.market import Market
from springtide.scheduling.policies.springtide.memory import State, costs_of, deviates, entry_of, slow_down
from springtide.scheduling.policies.springtide.moves import (
    Placed,
    hurry,
    jobs_to_stop_first,
    not_taken,
    survivors,
    without_waits,
)
from springtide.scheduling.policies.springtide.outside import Trials, is_cut_short
from springtide.scheduling.policies.springtide.places import assign_devices
from springtide.scheduling.policies.springtide.reasons import (
    devices_text,
    trade_notes,
    why_impossible,
    why_no_room,
    why_service_waits,
)
from springtide.scheduling.policies.springtide.rows import PromiseRow, num_held
from springtide.scheduling.policies.springtide.services import (
    NO_NEEDS,
    ServiceNeeds,
    lend_devices,
    service_needs,
    waiting_services,
)
from springtide.solvers.reservations.profile import Steps, devices_at
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable

# A job that should have ended by its plan and has not is planned for this many seconds more.
OVERDUE_S = 1.0
# Why a promised job is late where nothing more is known.
GIVEN_UP = "promise given up: the devices that it can have come too late for its deadline; it ends as soon as it can"
# From this many nodes on, spare devices are given out only as long as one node's worth of devices stays idle.
MANY_NODES = 8


class Decision:
    """`run` decides once and leaves the outcome in `state`, `allocations` and `rejected`."""

    def __init__(
        self,
        snapshot: Snapshot,
        state: State,
        table: RowTable[PromiseRow],
        cluster: str,
        *,
        memory: FamilyMemory,
        reserve_fraction: float,
        effort: int,
        revisit_s: float,
        efficiency: float,
        only_least: bool = False,
    ) -> None:
        """`cluster` is the fingerprint of the nodes; with `only_least` services get no more than their guaranteed
        minimums."""
        self._only_least, self._late_before = only_least, frozenset(state.given_up)
        self.revisit_s, self.efficiency = revisit_s, efficiency
        # Nothing to learn or to choose without jobs that may change their batch.
        has_adaptive = state.families is not None or any(row.view.job.batch is not None for row in table.rows)
        self.batches = AdaptiveBatches(memory, state, snapshot) if has_adaptive else None
        self.snapshot, self.state, self.cluster = snapshot, state, cluster
        self.rows, self.by_id = table.rows, table.by_id
        self.reserve_fraction, self.effort = reserve_fraction, effort
        self.reservations: ReservationTable = state.reservations
        self.now_s = snapshot.now_s
        self.allocations: Mapping[WorkloadId, PoolAllocation] = {}
        self.rejected: dict[WorkloadId, Refusal] = {}
        self.trades: Mapping[WorkloadId, DeviceTrade] = EMPTY
        self.notes: dict[WorkloadId, str] = {}
        self.needs: ServiceNeeds = NO_NEEDS
        self.is_asked = False  # a first replica waits: no promise is planned anew for a claim weaker than both
        self.last_chances_s: list[float] = []
        self.newcomers: dict[WorkloadId, tuple[float, Entry]] = {}
        self.staying = StayingJobs()
        self.survivors = survivors(snapshot, self.rows) if snapshot.allocations else {}
        jobs = [row.view.job for row in self.rows]
        has_unknown = any(job.goal.is_hard and (job.batch or not job.profile_steps_per_s) for job in jobs)
        self.first_runs = FirstRuns(state, snapshot, self.by_id, self.batches) if has_unknown else None
        self.trials = Trials(state, self.by_id, self.now_s)
        largest = max((len(row.rates) - 1 for row in self.rows), default=1)
        state.change_s = snapshot.overheads.change_s
        costs = costs_of(snapshot.overheads, largest, announced_falls(snapshot))
        self.reservations.begin(self.now_s, costs, effort, state.held)
        state.lone = {row.job_id for row in self.rows if row.is_lone}

    def run(self) -> None:
        """Decide. Each step works on what the steps before it left in the reservation table."""
        state = self.state

        # 1. Find out what is true now: which jobs have left, lost their devices, or may stay on draining nodes.
        has_left = self._drop_reservations()
        forget_taken_devices(state, self.by_id, self.now_s)
        self._update_staying_jobs()

        # 2. Give the services their devices; the rest is the capacity for promises.
        capacity_before = state.promisable
        services = self._serve()

        # 3. Plan anew every job that is not where its schedule says. Promises that this leaves no room for get what
        # services have beyond their minimums.
        if any(entry.is_promised for entry in self._catch_up()) and services != self.needs.least:
            services = self._serve_again()

        # 4. Admit new and waiting jobs; promise what was pursued and is measured by now. For those that wait, only a
        # job that left or more devices can make room.
        has_new_room = has_left or has_more_devices(capacity_before, state.promisable, self.now_s)
        outside = self._admit(has_new_room)
        if self.first_runs is not None:
            self.first_runs.promise(has_new_room=has_new_room)

        # 5. Share the devices that no promise needs now among all jobs that gain by them, in the table or not.
        candidates = self.batches.candidates if self.batches is not None else EMPTY
        kept = self.trials.kept
        market = Market(
            self.reservations,
            outside,
            self.by_id,
            self.snapshot,
            state.num_surplus,
            kept,
            state.devices,
            candidates,
            self.efficiency,
        )
        market.share_reserved(_num_kept_idle(self.snapshot.cluster))
        self._keep_for_survivors()
        spare = self._share_outside(outside, market)

        # 6. Choose devices for every count. This may change schedules, so that a newcomer loses its reservation again.
        placed = assign_devices(state, self.staying, self.snapshot, spare, services, self.effort // 2)
        if services and not self.snapshot.drains:
            placed = without_waits(placed, self.snapshot, services, spare)
            for service_id in self._lacking_minimum(placed):
                hurry(state, self.snapshot, placed, spare, service_id)
        self._reject_unplaced_newcomers()
        remaining = not_taken(self.survivors, placed) if self.survivors else {}
        placed |= remaining
        if self.batches is not None:
            # Those that stay as they are go on with the batch that they have.
            kept_batches = {who: given.global_batch_size for who, given in remaining.items() if given.global_batch_size}
            state.batches = kept_batches | self.batches.set_batches(placed, self.reservations.entries)

        # 7. Record what was decided, and when to decide again.
        state.price_s, self.trades = market.price_s, market.trades(self.snapshot, placed)
        self._record(placed)

    def newly_late(self) -> set[str]:
        """The promised jobs that are late now and were not before."""
        entries = self.reservations.entries.values()
        return {entry.key for entry in entries if entry.is_promised and entry.is_late} - self._late_before

    def has_beyond_least(self) -> bool:
        """Whether a service gets more than its guaranteed minimum."""
        given = ((who, self.allocations.get(who)) for who in self.needs.wanted)
        return any(has is not None and has.num_devices > self.needs.least.get(who, 0) for who, has in given)

    # --- 1. what is true now ----------------------------------------------------------------------------------------

    def _drop_reservations(self) -> bool:
        """Drop the reservations of jobs that are gone or have no hard deadline any more; returns whether any was
        dropped since the last decision. The jobs that are there have work left."""
        state, reservations = self.state, self.reservations
        if state.cluster != self.cluster:
            # Other nodes have other addresses: nothing is known of their blocks.
            state.used, state.cluster = [], self.cluster
        for key in [key for key in reservations.entries if not _has_hard_deadline(self.by_id.get(WorkloadId(key)))]:
            reservations.drop(key)
            state.scales.pop(key, None)
            state.slowed.pop(key, None)
            state.num_gone += 1
        for entry in reservations.entries.values():
            if entry.left <= 0.0:
                # By its plan it has ended: planned without work it would get no device.
                entry.left = OVERDUE_S * entry.rates[entry.sizes[0]]
        has_left, state.num_gone = state.num_gone > 0, 0
        return has_left

    def _update_staying_jobs(self) -> None:
        """Fix the schedules of jobs that run as planned on draining nodes: they stay there as they are."""
        for entry in self.reservations.entries.values():
            entry.is_fixed = False
        if not self.snapshot.drains:
            return
        staying = find_staying_jobs(self.state, self.snapshot)
        deviating = {row.job_id for row in self.rows if row.job_id in staying.promised and deviates(row, self.state)}
        self.staying = staying._replace(promised={k: v for k, v in staying.promised.items() if k not in deviating})
        for key in self.staying.promised:
            self.reservations.entries[key].is_fixed = True

    def _release_staying_jobs(self) -> None:
        """Let the jobs of the reservation table that stay on draining nodes be planned anew and moved."""
        for key in self.staying.promised:
            self.reservations.entries[key].is_fixed = False
        self.staying = self.staying.without_promised()

    # --- 2. capacity ------------------------------------------------------------------------------------------------

    def _serve(self) -> dict[WorkloadId, int]:
        """Return the devices of each service: its guaranteed minimum always, more only as far as every promise stays
        kept."""
        needs = service_needs(self.snapshot) if self.snapshot.services else NO_NEEDS
        if self._only_least:
            needs = needs._replace(first=needs.least, wanted=needs.least)
        self.needs = needs
        self.notes.update(needs.notes)
        self.state.lent = {}
        wanted = needs.wanted
        capacity = self._promisable(wanted)
        is_kept = self.reservations.set_capacity(capacity)
        if not is_kept and self.staying.promised:
            # If jobs need not stay on draining nodes, all schedules may still fit.
            self._release_staying_jobs()
            capacity = self._promisable(wanted)
            is_kept = self.reservations.set_capacity(capacity)
        if not is_kept:
            wanted = self._serve_beside_promises(needs)
            capacity = self._promisable_beside(wanted)
        self._note_capacity(wanted, capacity)
        return wanted

    def _serve_again(self) -> dict[WorkloadId, int]:
        """The devices of each service, now that promised jobs that were planned anew are late beside what it was."""
        self.reservations.set_capacity(self._promisable(self.needs.least))
        self._retry_late()
        wanted = self._serve_beside_promises(self.needs)
        self._note_capacity(wanted, self._promisable_beside(wanted))
        return wanted

    def _retry_late(self) -> None:
        """Plan the promised jobs anew that are late; their notes go where they are in time again."""
        reservations = self.reservations
        for entry in [entry for entry in reservations.entries.values() if entry.is_promised and entry.is_late]:
            reservations.drop(entry.key)
            entry.is_late, entry.runs = False, ()
            reservations.put(entry)
            if not entry.is_late:
                self.notes.pop(WorkloadId(entry.key), None)

    def _promisable_beside(self, services: Mapping[WorkloadId, int]) -> Steps:
        """What promises may use beside these services: a device that is lent goes on counting."""
        return self._promisable({who: n for who, n in services.items() if who not in self.state.lent})

    def _note_capacity(self, services: Mapping[WorkloadId, int], capacity: Steps) -> None:
        """Keep what promises may use, and what is there beyond that and these services."""
        state = self.state
        state.promisable = capacity
        state.num_surplus = self._num_present(services) - devices_at(self.reservations.steps, self.now_s)

    def _serve_beside_promises(self, needs: ServiceNeeds) -> dict[WorkloadId, int]:
        """The devices of each service where promises do not fit beside all that services want: the minimums, each first
        replica that every promise leaves room for, or leaves a device for a while, and growth on what is left."""
        reservations, given = self.reservations, dict(needs.least)
        # The search until here may have used it up, and now it decides which promises are kept.
        reservations.effort = max(reservations.effort, self.effort // 2)
        self._give_up(reservations.lift_capacity(self._promisable(given), self._num_present(given)), given)
        for service_id, count in needs.first.items():
            more = {**given, service_id: count}
            if count > given.get(service_id, 0) and reservations.yield_capacity(self._promisable(more)):
                given = more
        spare = max(0, min(reservations.profile.free))
        for service_id, count in needs.wanted.items():
            more_here = min(spare, count - given.get(service_id, 0))
            if more_here:
                given[service_id] = given.get(service_id, 0) + more_here
                spare -= more_here
        capacity = self._promisable(given)
        if not reservations.set_capacity(capacity):
            self._give_up(reservations.lift_capacity(capacity, self._num_present(given)), given)
        if any(service_id not in given for service_id in needs.first):
            pursued = reservations.take_out_pursued()
            self.state.lent = lend_devices(reservations, self.snapshot, needs.first, given, self._num_present(given))
            self.is_asked = any(service_id not in given for service_id in needs.first)
            reservations.put_back(pursued, as_before=not self.state.lent, repairs=not self.is_asked)
        return {service_id: given[service_id] for service_id in needs.wanted if service_id in given}

    def _give_up(self, late: Sequence[str], services: Mapping[WorkloadId, int]) -> None:
        """Say why these promises are given up: there are too few devices for them beside guaranteed replicas."""
        num_left, num_serving = self._num_present(services), sum(services.values())
        beside = f" beside {devices_text(num_serving)} of guaranteed replicas" if num_serving else ""
        for key in late:
            self.state.given_up[key] = (
                f"promise given up: {devices_text(num_left)} left for promised deadlines{beside}, and it needs more"
            )

    def _num_present(self, services: Mapping[WorkloadId, int]) -> int:
        """The devices that jobs can have now, whether or not promises may use them."""
        staying = sum(count for count, _ in self.staying.promised.values())
        return len(self.snapshot.cluster.device_ids()) - len(self.staying.draining) + staying - sum(services.values())

    def _promisable(self, services: Mapping[WorkloadId, int]) -> Steps:
        return promisable_capacity(self.snapshot, self.reserve_fraction, sum(services.values()), self.staying)

    # --- 3. jobs that are not where their schedule says -------------------------------------------------------------

    def _catch_up(self) -> list[Entry]:
        """Plan anew the jobs that are not where their schedule says, the most urgent ones first; returns those that are
        late."""
        now_s, state = self.now_s, self.state
        entries = self.reservations.entries
        deviating: list[Entry] = []
        for row in self.rows:
            entry = entries.get(row.job_id)
            if entry is None:
                continue
            planned, starts_at_s = entry.committed, row.view.restarts.starts_at_s
            # Its owner changed its bounds, or it waits out a back-off after a crash.
            is_prevented = any(run.num_devices not in row.sizes for run in planned) or (planned and starts_at_s > now_s)
            has_lost_devices = (
                bool(entry.held) and planned and planned[0].start_s < now_s and row.job_id not in state.devices
            )
            is_overdue = bool(planned) and planned[-1].end_s <= now_s
            # No device could be planned for it so far (the cluster had lost its nodes, say), or not as a promise.
            is_unplanned = not planned or (row.can_promise and not entry.is_promised)
            # Its owner moved the deadline before its planned end.
            is_planned_too_late = (
                bool(row.view.bounds.num_edits and planned) and not entry.is_late and planned[-1].end_s > row.deadline_s
            )
            is_deviating = is_prevented or deviates(row, state)
            if is_deviating and starts_at_s <= now_s:
                is_deviating = not is_cut_short(row, state, now_s)
            if not (is_deviating or has_lost_devices or is_overdue or is_unplanned or is_planned_too_late):
                continue
            if self.first_runs is not None:
                self.first_runs.plan_on_known(row)
            held = 0 if starts_at_s > now_s else num_held(self.snapshot, row)
            left = row.steps_left(now_s, held)
            if is_overdue:
                left = max(left, OVERDUE_S * row.rates[row.sizes[0]])
            anew = entry_of(row, left, since_s=now_s, ready_s=starts_at_s, scale=row.scale, held=held)
            anew.is_promised = anew.is_promised or entry.is_promised
            state.scales[row.job_id] = row.scale
            self._keep_slowdown(anew, row, held)
            self.reservations.drop(row.job_id)
            deviating.append(anew)
        urgency = {entry.key: (not entry.is_promised, entry.deadline_s - entry.fastest_s) for entry in deviating}
        for entry in sorted(deviating, key=lambda entry: (urgency[entry.key], entry.key)):
            if entry.is_promised:
                self.reservations.put(entry)
            else:
                self.reservations.admit(entry, repairs=not self.is_asked)
            if entry.is_late:
                self.notes[WorkloadId(entry.key)] = (
                    "behind its plan: its deadline is in danger, it ends as soon as it can"
                )
        return [entry for entry in deviating if entry.is_late]

    # --- 4. admission -----------------------------------------------------------------------------------------------

    def _admit(self, has_new_room: bool) -> list[PromiseRow]:
        """Admit new and waiting jobs, one after the other; returns the jobs that stay outside the reservation table.

        Without new room, other jobs are planned anew for new jobs only: for a waiting job that has failed before.
        """
        waiting, self.state.waiting = self.state.waiting, set()
        outside: list[PromiseRow] = []
        candidates: list[tuple[float, PromiseRow, Entry]] = []
        for row in self.rows:
            if row.job_id in self.reservations.entries:
                continue
            if self.first_runs is not None:
                self.first_runs.plan_on_known(row)
            if not (row.can_promise or row.attempts_deadline):
                outside.append(row)
                continue
            held = num_held(self.snapshot, row)
            entry = entry_of(
                row,
                row.steps_left(self.now_s, held),
                since_s=self.now_s,
                ready_s=row.view.restarts.starts_at_s,
                held=held,
            )
            if row.scale != 1.0:
                entry.rates = tuple([rate * row.scale for rate in row.rates])
                self.state.scales[row.job_id] = row.scale
            self._keep_slowdown(entry, row, held)
            if row.view.promise.admitted_at_s is not None:
                self.reservations.put(entry)
                continue
            candidates.append((self.reservations.latest_start_s(entry), row, entry))
        # In order of submission; of jobs submitted at one moment, the one that has to start earliest comes first.
        candidates.sort(key=lambda item: (item[1].view.submitted_at_s, item[0]))
        for latest_s, row, entry in candidates:
            repairs = (has_new_room or row.job_id not in waiting) and (row.can_promise or not self.is_asked)
            is_in = self.reservations.admit(entry, repairs=repairs)
            if is_in or (row.can_promise and self.reservations.admit_over_pursued(entry)):
                self.newcomers[row.job_id] = (latest_s, entry)
                self.state.newcomers.add(row.job_id)
            elif row.attempts_deadline:
                outside.append(row)
            elif latest_s < self.now_s and admit_on_used_block(
                self.state, layout_of(self.snapshot.cluster), self.snapshot, entry
            ):
                self.newcomers[row.job_id] = (latest_s, entry)
                self.state.newcomers.add(row.job_id)
            else:
                self._refuse_or_queue(latest_s, row, entry)
        return outside

    def _keep_slowdown(self, entry: Entry, row: PromiseRow, held: int) -> None:
        """Plan a job that goes on where it is scattered at its lower speed there, if nothing was measured that would
        show how much slower it is."""
        factor = self.state.slowed.pop(row.job_id, 1.0)
        if held and row.scale == 1.0:
            slow_down(self.state, entry, factor)

    def _refuse_or_queue(self, latest_s: float, row: PromiseRow, entry: Entry) -> None:
        """Let the job wait if its goal says so and it could still make its deadline alone; else reject it."""
        reservations = self.reservations
        is_possible = latest_s >= self.now_s and any(n <= reservations.capacity for n in entry.sizes)
        why = why_no_room(entry, reservations, self.by_id) if is_possible else why_impossible(entry, row, reservations)
        if is_possible and row.view.job.goal.waits:
            self.last_chances_s.append(latest_s)
            self.state.waiting.add(row.job_id)
            self.notes[row.job_id] = f"in line while its deadline can still be made: {why}"
        else:
            self.rejected[row.job_id] = Refusal(reason=why)

    # --- 5. spare devices -------------------------------------------------------------------------------------------

    def _keep_for_survivors(self) -> None:
        """Give no job outside the table what survivors go on with that have nothing by their schedules now; the others
        stay where they are."""
        unplanned: set[WorkloadId] = set()
        for job_id, held in self.survivors.items():
            entry = self.reservations.entries.get(job_id)
            size = held.num_devices if entry is None else entry.size_at(self.now_s)
            if not size:
                self.state.num_surplus -= held.num_devices
                unplanned.add(job_id)
            elif size == held.num_devices:
                self.state.pinned[job_id] = held.device_ids
        if self.reservations.profile.at(self.now_s) + self.state.num_surplus >= 0:
            self.staying = self.staying._replace(survivors=frozenset(unplanned))

    def _share_outside(self, outside: list[PromiseRow], market: Market) -> dict[WorkloadId, int]:
        """Return the number of devices of each job outside the reservation table. A job that holds devices of a
        draining node keeps all that it has."""
        state, snapshot, draining = self.state, self.snapshot, self.staying.draining
        left = self.reservations.profile.at(self.now_s) + state.num_surplus
        others: dict[WorkloadId, int] = {}
        for row in outside if draining else ():
            allocation = snapshot.allocations.get(row.job_id)
            if allocation is None or draining.isdisjoint(allocation.device_ids):
                continue
            num_lasting = sum(device not in draining for device in allocation.device_ids)
            if num_lasting <= left and row.sizes[0] <= allocation.num_devices <= row.sizes[-1]:
                others[row.job_id] = allocation.num_devices
                left -= num_lasting
                state.num_surplus += allocation.num_devices - num_lasting
        self.staying = self.staying._replace(others=others)
        counts = others | market.share_outside(others, state.num_surplus - sum(others.values()))
        # While nodes are drained, no job is tried on more devices.
        self.trials.share([] if draining else self.rows, snapshot, counts, state.num_surplus)
        return counts

    # --- 6. and 7. places, and what is kept for the next decision ----------------------------------------------------

    def _reject_unplaced_newcomers(self) -> None:
        for row in self.rows:
            if row.job_id in self.state.newcomers and row.job_id not in self.reservations.entries:
                latest_s, entry = self.newcomers[row.job_id]
                self._refuse_or_queue(latest_s, row, entry)

    def _lacking_minimum(self, placed: Placed) -> list[WorkloadId]:
        """The services that hold fewer devices than their guaranteed minimum, and get some now."""
        held = self.snapshot.allocations
        return [
            who
            for who, least in self.needs.least.items()
            if who in placed and (held[who].num_devices if who in held else 0) < least
        ]

    def _record(self, placed: Placed) -> None:
        state, snapshot = self.state, self.snapshot
        self._note_given_up()
        waits = waiting_services(self.reservations, snapshot, placed, state.lent) if snapshot.services else {}
        # What the rest of this decision has left free is for the next one to give.
        soon_s = self.now_s + OVERDUE_S
        state.waits = {who: None if at_s is None else max(at_s, soon_s) for who, at_s in waits.items()}
        for service_id in state.waits:
            self.notes[service_id] = why_service_waits(
                self.reservations, self.by_id, len(snapshot.cluster.device_ids())
            )
        traded = trade_notes(self.trades, snapshot, self.reservations)
        state.notes = traded | self.trials.reasons(self.rows, snapshot, placed) | self.notes
        state.newcomers.clear()
        state.pinned.clear()
        places = {workload_id: allocation.device_ids for workload_id, allocation in placed.items()}
        state.mark_used(layout_of(snapshot.cluster), self.now_s, places)
        state.record_devices(self.now_s, placed)
        state.stop_first = sorted(jobs_to_stop_first(snapshot, placed, state.hurried)) if snapshot.allocations else []
        state.hurried.clear()
        self.reservations.commit()
        state.slowed = {key: factor for key, factor in state.slowed.items() if key in self.reservations.entries}
        for job_id in state.sure.keys() - self.reservations.entries.keys():
            # Nothing is remembered of the speeds that it was planned on, so that nothing may rest on them later.
            del state.sure[job_id]
            if job_id in self.by_id:
                self.by_id[job_id].plan_on_own()
        state.conditions = {} if self.first_runs is None else self.first_runs.conditions(placed)
        state.until_s = self._next_moment_s()
        self.allocations = placed

    def _note_given_up(self) -> None:
        """Keep why each promised job is late as long as it is, and which are not late any more."""
        state, entries = self.state, self.reservations.entries
        late = [key for key, entry in entries.items() if entry.is_promised and entry.is_late]
        state.recovered = {WorkloadId(key) for key in state.given_up if key in entries and not entries[key].is_late}
        state.given_up = {key: state.given_up.get(key) or self.notes.get(WorkloadId(key), GIVEN_UP) for key in late}

    def _next_moment_s(self) -> float | None:
        """When a schedule changes, a waiting job has its last chance, or a job should have ended."""
        now_s = self.now_s
        moments = [moment_s + 1e-3 for moment_s in self.last_chances_s]
        for entry in self.reservations.entries.values():
            for run in entry.runs:
                if run.start_s > now_s:
                    moments.append(run.start_s)
                    break
            else:
                if entry.runs:
                    # A job that ends in time reports that, which is a reason to decide; one that is late does not.
                    moments.append(max(entry.runs[-1].end_s, now_s + 1e-3) + OVERDUE_S)
        moments += self.trials.moments_s
        moments += [now_s + self.revisit_s] if self.state.batches else []
        moments += [at_s for at_s in self.state.waits.values() if at_s is not None]
        moments += [until_s for until_s in self.state.lent.values() if until_s < math.inf]
        moments += [row.view.restarts.starts_at_s for row in self.rows if row.view.restarts.starts_at_s > now_s]
        return min(moments, default=None)


def _num_kept_idle(cluster: Topology) -> int:
    """How many spare devices stay idle on a large cluster, so that groups find a compact place without moving others:
    as many as the largest node has."""
    sizes = [len(node.devices) for node in cluster.nodes]
    return max(sizes) if len(sizes) >= MANY_NODES else 0


def _has_hard_deadline(row: PromiseRow | None) -> bool:
    return row is not None and row.view.job.goal.is_hard
