"""One decision of the policy `springtide`, from what is true now to the devices of every workload."""

from __future__ import annotations

from collections.abc import Mapping

from springtide.core.decision import PoolAllocation, Refusal, Snapshot
from springtide.core.resources import Topology
from springtide.core.workload import WorkloadId
from springtide.scheduling.decisions.cache import RowTable
from springtide.scheduling.placement.allocation_ledger import AllocationLedger, serve_demand, serve_minimum
from springtide.scheduling.placement.topology import layout_of
from springtide.scheduling.policies.springtide.blocks import mark_used, pin, remember
from springtide.scheduling.policies.springtide.capacity import (
    Guests,
    counted_on,
    falls_told,
    guests_of,
    is_roomier,
    note_taken,
)
from springtide.scheduling.policies.springtide.memory import State, costs_of, entry_of
from springtide.scheduling.policies.springtide.moves import detours
from springtide.scheduling.policies.springtide.places import settle
from springtide.scheduling.policies.springtide.reasons import why_impossible, why_no_room
from springtide.scheduling.policies.springtide.rows import PromiseRow
from springtide.scheduling.policies.springtide.spare import owed_to, share_spare
from springtide.scheduling.policies.springtide.trials import Trials, is_cut_short
from springtide.solvers.reservations.capacity import Steps, at
from springtide.solvers.reservations.fit import work_done
from springtide.solvers.reservations.reservation_table import Entry, ReservationTable
from springtide.solvers.reservations.spare import make_way, use_spare

# A job is where the plan says as long as what it reports differs by no more than this part of what it has done since.
DEVIATION_FRACTION = 0.02
# ... and by no more than this many steps, since only whole steps are reported.
DEVIATION_STEPS = 2.0
# A job that should have ended by its plan and has not is taken to have this much still to do.
OVERDUE_S = 1.0
# A cluster of so many nodes keeps one free of what is only spare.
MANY_NODES = 8


class Decision:
    """Brings the reservations up to date, lets newcomers in, shares spare devices and places all.

    `run` leaves what was decided in `state`; `allocations`, `rejected` and `state.notes` say it.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        state: State,
        table: RowTable[PromiseRow],
        cluster: str,
        *,
        reserve_fraction: float,
        effort: int,
    ) -> None:
        """`cluster` is the fingerprint of the nodes."""
        self.snapshot, self.state, self.cluster = snapshot, state, cluster
        self.rows, self.by_id = table.rows, table.by_id
        self.reserve_fraction, self.effort = reserve_fraction, effort
        self.book: ReservationTable = state.book
        self.now_s = snapshot.now_s
        self.allocations: Mapping[WorkloadId, PoolAllocation] = {}
        self.rejected: dict[WorkloadId, Refusal] = {}
        self.notes: dict[WorkloadId, str] = {}
        self.latest_s: list[float] = []
        self.newcomers: dict[WorkloadId, tuple[float, Entry]] = {}
        self.guests = Guests()
        self.trials = Trials(state, self.by_id, self.now_s)
        largest = max((len(row.rates) - 1 for row in self.rows), default=1)
        state.change_s = snapshot.overheads.change_s
        costs = costs_of(snapshot.overheads, largest, falls_told(snapshot))
        self.book.begin(self.now_s, costs, effort, state.held)

    def run(self) -> None:
        """Decide."""
        state, snapshot = self.state, self.snapshot
        layout = layout_of(snapshot.cluster)
        if state.cluster != self.cluster:
            # Other nodes have other addresses: nothing is known of their blocks.
            state.used, state.cluster = [], self.cluster
        # A job whose owner gave its deadline up holds no promise any more.
        for key in [key for key in self.book.entries if not _is_pursued(self.by_id.get(WorkloadId(key)))]:
            self.book.drop(key)
            state.scales.pop(key, None)
            state.slowed.pop(key, None)
            state.num_gone += 1
        has_left, state.num_gone = state.num_gone > 0, 0
        before = state.told
        note_taken(state, self.by_id, self.now_s)
        self._see_guests()
        services = self._serve()
        self._catch_up()
        outside = self._admit(has_left or is_roomier(before, state.told, self.now_s))
        owed = max(0, owed_to(outside, snapshot) - state.num_surplus)
        if self.book.profile.at(self.now_s) < owed:
            make_way(self.book, owed)
        use_spare(self.book, _elbow_room(snapshot.cluster), owed)
        spare = self._share(outside)
        placed = settle(state, self.guests, snapshot, spare, services, self.effort // 2)
        for row in self.rows:
            if row.job_id in state.newcomers and row.job_id not in self.book.entries:
                self._turn_away(self.newcomers[row.job_id][0], row, self.newcomers[row.job_id][1])
        state.notes = self.trials.note(self.rows, snapshot, placed) | self.notes
        state.newcomers.clear()
        state.pinned.clear()
        mark_used(state, layout, self.now_s, {who: given.device_ids for who, given in placed.items()})
        remember(state, self.now_s, placed)
        state.detours = sorted(detours(snapshot, placed))
        self.book.commit()
        state.until_s = self._next_moment_s()
        self.allocations = placed

    # --- what is true now -------------------------------------------------------------------------------------------

    def _serve(self) -> dict[WorkloadId, int]:
        """Devices for services: their minimum always, more only as far as every promise stays kept."""
        shares = AllocationLedger(self.snapshot)
        serve_minimum(shares)
        least = dict(shares.counts)
        serve_demand(shares)
        wanted = dict(shares.counts)
        self.notes.update(shares.notes)
        is_kept = self.book.set_capacity(self._counted_on(wanted))
        if not is_kept and self.guests.promised:
            # Where they are not bound to nodes that go there may be room for all.
            self._let_go()
            is_kept = self.book.set_capacity(self._counted_on(wanted))
        if not is_kept:
            self.book.lift_capacity(self._counted_on(least), self._num_there(least))
            spare = max(0, min(self.book.profile.free))
            for who, count in wanted.items():
                more = min(spare, count - least.get(who, 0))
                least[who] = least.get(who, 0) + more
                spare -= more
            if not self.book.set_capacity(self._counted_on(least)):
                self.book.lift_capacity(self._counted_on(least), self._num_there(least))
            wanted = least
        self.state.told = self._counted_on(wanted)
        self.state.num_surplus = self._num_there(wanted) - at(self.book.steps, self.now_s)
        return wanted

    def _num_there(self, services: Mapping[WorkloadId, int]) -> int:
        """The devices that jobs can have now, counted on or not."""
        guests = sum(count for count, _ in self.guests.promised.values())
        return len(self.snapshot.cluster.device_ids()) - len(self.guests.leaving) + guests - sum(services.values())

    def _counted_on(self, services: Mapping[WorkloadId, int]) -> Steps:
        return counted_on(self.snapshot, self.reserve_fraction, sum(services.values()), self.guests)

    # --- jobs on nodes that are being emptied -----------------------------------------------------------------------

    def _see_guests(self) -> None:
        """A job that is where it was decided, on a node that is being emptied, stays there as it is if it can."""
        for entry in self.book.entries.values():
            entry.is_fixed = False
        if not self.snapshot.drains:
            return
        guests = guests_of(self.state, self.snapshot)
        amiss = {row.job_id for row in self.rows if row.job_id in guests.promised and deviates(row, self.state)}
        self.guests = guests._replace(promised={k: v for k, v in guests.promised.items() if k not in amiss})
        for key in self.guests.promised:
            self.book.entries[key].is_fixed = True

    def _let_go(self) -> None:
        for key in self.guests.promised:
            self.book.entries[key].is_fixed = False
        self.guests = self.guests.without_promised()

    def _share(self, outside: list[PromiseRow]) -> dict[WorkloadId, int]:
        """Devices for jobs outside the reservation table. A job on a node that is being emptied keeps what it has."""
        state, snapshot, leaving = self.state, self.snapshot, self.guests.leaving
        left = self.book.profile.at(self.now_s) + state.num_surplus
        others: dict[WorkloadId, int] = {}
        for row in outside if leaving else ():
            given = snapshot.allocations.get(row.job_id)
            if given is None or leaving.isdisjoint(given.device_ids):
                continue
            num_lasting = sum(device not in leaving for device in given.device_ids)
            if num_lasting <= left and row.sizes[0] <= given.num_devices <= row.sizes[-1]:
                others[row.job_id] = given.num_devices
                left -= num_lasting
                state.num_surplus += given.num_devices - num_lasting
        self.guests = self.guests._replace(others=others)
        rest = [row for row in outside if row.job_id not in others]
        num_surplus = state.num_surplus - sum(others.values())
        counts = others | share_spare(self.book, rest, snapshot, num_surplus, self.trials.kept)
        # Where nodes are being emptied no job is tried on what is left.
        self.trials.share([] if leaving else self.rows, snapshot, counts, state.num_surplus)
        return counts

    def _catch_up(self) -> None:
        """Bring the entries of jobs that are not where their plan says up to what is known of them."""
        now_s, state = self.now_s, self.state
        entries = self.book.entries
        amiss: list[Entry] = []
        for row in self.rows:
            entry = entries.get(row.job_id)
            if entry is None:
                continue
            # Its owner may have changed its bounds; or it waits out a back-off after a crash.
            is_moved = any(run.num_devices not in row.sizes for run in entry.was) or (
                entry.was and row.view.restarts.runnable_at_s > now_s
            )
            is_lost = (
                bool(entry.held) and entry.was and entry.was[0].start_s < now_s and row.job_id not in state.devices
            )
            is_overdue = bool(entry.was) and entry.was[-1].end_s <= now_s
            # There was no device for it at all, on a cluster that has lost its nodes, say.
            is_nowhere = not entry.was
            # Its owner wants it sooner than it is planned to end.
            is_hurried = (
                bool(row.view.bounds.num_edits and entry.was)
                and not entry.is_late
                and entry.was[-1].end_s > row.deadline_s
            )
            is_amiss = is_moved or deviates(row, state)
            if is_amiss and not entry.is_promised and row.view.restarts.runnable_at_s <= now_s:
                is_amiss = not is_cut_short(row, state, now_s)
            if not (is_amiss or is_lost or is_overdue or is_nowhere or is_hurried):
                continue
            held = 0 if row.view.restarts.runnable_at_s > now_s else _held(self.snapshot, row)
            left = row.steps_left(now_s, held)
            if is_overdue:
                left = max(left, OVERDUE_S * row.rates[row.sizes[0]])
            anew = entry_of(
                row, left, since_s=now_s, ready_s=row.view.restarts.runnable_at_s, scale=row.scale, held=held
            )
            anew.is_promised, anew.is_late = entry.is_promised, False
            state.scales[row.job_id] = row.scale
            self.book.drop(row.job_id)
            amiss.append(anew)
        for entry in sorted(amiss, key=lambda entry: (entry.deadline_s - entry.fastest_s, entry.key)):
            if entry.is_promised:
                self.book.put(entry)
            else:
                self.book.admit(entry)
            if entry.is_late:
                self.notes[WorkloadId(entry.key)] = (
                    "behind its plan: its deadline is in danger, it ends as soon as it can"
                )

    # --- admission --------------------------------------------------------------------------------------------------

    def _admit(self, is_roomier: bool) -> list[PromiseRow]:
        """Let in jobs that are new or wait, one after the other; returns those that stay outside the reservation table.

        For waiting jobs others are planned anew only if a job has left: nothing else makes room.
        """
        waiting, self.state.waiting = self.state.waiting, set()
        outside: list[PromiseRow] = []
        candidates: list[tuple[float, PromiseRow, Entry]] = []
        for row in self.rows:
            if row.job_id in self.book.entries:
                continue
            if not (row.can_promise or row.is_pursued):
                outside.append(row)
                continue
            held = _held(self.snapshot, row)
            entry = entry_of(
                row,
                row.steps_left(self.now_s, held),
                since_s=self.now_s,
                ready_s=row.view.restarts.runnable_at_s,
                held=held,
            )
            if row.scale != 1.0:
                entry.rates = tuple([rate * row.scale for rate in row.rates])
                self.state.scales[row.job_id] = row.scale
            if row.view.promise.admitted_at_s is not None:
                self.book.put(entry)
                continue
            candidates.append((self.book.latest_start_s(entry), row, entry))
        # In order of submission; of jobs submitted at one moment, the one that has to start earliest comes first.
        candidates.sort(key=lambda item: (item[1].view.submitted_at_s, item[0]))
        for latest_s, row, entry in candidates:
            if self.book.admit(entry, repairs=is_roomier or row.job_id not in waiting):
                self.newcomers[row.job_id] = (latest_s, entry)
                self.state.newcomers.add(row.job_id)
                continue
            if row.is_pursued:
                outside.append(row)
            elif latest_s < self.now_s and pin(self.state, layout_of(self.snapshot.cluster), self.snapshot, entry):
                self.newcomers[row.job_id] = (latest_s, entry)
                self.state.newcomers.add(row.job_id)
            else:
                self._turn_away(latest_s, row, entry)
        return outside

    def _turn_away(self, latest_s: float, row: PromiseRow, entry: Entry) -> None:
        can_be = latest_s >= self.now_s and any(n <= self.book.capacity for n in entry.sizes)
        why = why_no_room(entry, self.book, self.by_id) if can_be else why_impossible(entry, row, self.book)
        if can_be and row.view.job.goal.waits:
            self.latest_s.append(latest_s)
            self.state.waiting.add(row.job_id)
            self.notes[row.job_id] = f"in line while its deadline can still be made: {why}"
        else:
            self.rejected[row.job_id] = Refusal(reason=why)

    def _next_moment_s(self) -> float | None:
        """When something is planned to change, a last chance passes, or a job should have ended."""
        now_s = self.now_s
        moments = [moment_s + 1e-3 for moment_s in self.latest_s]
        for entry in self.book.entries.values():
            for run in entry.runs:
                if run.start_s > now_s:
                    moments.append(run.start_s)
                    break
            else:
                if entry.runs:
                    # A job that ends in time reports it; this is for one that does not.
                    moments.append(max(entry.runs[-1].end_s, now_s + 1e-3) + OVERDUE_S)
        moments += self.trials.moments_s
        moments += [row.view.restarts.runnable_at_s for row in self.rows if row.view.restarts.runnable_at_s > now_s]
        return min(moments, default=None)


def _elbow_room(cluster: Topology) -> int:
    """Devices that promises do not need are left idle up to one node of many: what has to lie close together is then
    placed without asking others to move."""
    sizes = [len(node.devices) for node in cluster.nodes]
    return max(sizes) if len(sizes) >= MANY_NODES else 0


def _is_pursued(row: PromiseRow | None) -> bool:
    return row is not None and row.view.job.goal.is_hard


def deviates(row: PromiseRow, state: State) -> bool:
    """Whether a job has reported that it is not where its plan says."""
    entry = state.book.entries.get(row.job_id)
    view = row.view
    if entry is None or view.total_steps is None or not entry.was or view.progress.progress_at_s <= entry.since_s:
        return False
    done = work_done(entry.was, entry.rates, view.progress.progress_at_s)
    expected = view.total_steps - entry.work + done
    return abs(expected - view.progress.step) > DEVIATION_STEPS + DEVIATION_FRACTION * done


def _held(snapshot: Snapshot, row: PromiseRow) -> int:
    given = snapshot.allocations.get(row.job_id)
    return given.num_devices if given is not None else 0
