"""Which group this worker is in, and which it was ordered to form.

The control thread stores orders here; the training thread reads them at step boundaries.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch._C import _distributed_c10d as c10d

from springtide.core.errors import SpringtideError
from springtide.core.wire.workers import FormGroup
from springtide.core.workload import ReplicaId
from springtide.runtime.elastic.group import Group, form_group, is_on_one_machine, open_store

_POLL_S = 0.1
# The fence is raised just before an order is sent, so the order arrives soon after.
_NEWER_ORDER_WAIT_S = 3.0


class Formation:
    """A group being formed: a background thread connects it while training goes on in the current group."""

    def __init__(
        self,
        order: FormGroup,
        replica_id: ReplicaId,
        device: torch.device,
        prepare: Callable[[int, int], None],
        listen_host: str = "",
    ) -> None:
        self.order = order
        # The address at which other members reach this one; empty if all are on one machine.
        self.listen_host = listen_host
        self.generation = order.generation
        self.is_member = replica_id in order.members
        self.rank = order.members.index(replica_id) if self.is_member else -1
        self.world_size = len(order.members)
        self.group: Group | None = None
        self.error = ""
        self._device = device
        self._prepare = prepare
        self._is_wanted = True
        self._done = threading.Event()
        self._is_prepared = threading.Event()
        if self.is_member:
            threading.Thread(target=self._form, name="springtide-form", daemon=True).start()
        else:
            self._is_prepared.set()
            self._done.set()

    @property
    def is_ready(self) -> bool:
        """Whether this member can switch now: the group is connected, or does not include this member."""
        return self._done.is_set() and not self.error and self._is_wanted

    @property
    def is_done(self) -> bool:
        """Whether forming has ended, with a group or an error."""
        return self._done.is_set()

    @property
    def is_reachable(self) -> bool:
        """Whether members can open direct streams to each other."""
        return bool(self.listen_host) or is_on_one_machine(self.order.rendezvous)

    def wait_prepared(self) -> None:
        """Wait until this member has allocated its buffers for the group, or forming has failed."""
        self._is_prepared.wait()

    def wait_done(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def is_wanted(self) -> bool:
        """False after `give_up`."""
        return self._is_wanted

    def store(self) -> c10d.Store:
        """A new connection to the members' rendezvous store."""
        return open_store(self.order.rendezvous, self.generation, is_wanted=self.is_wanted, key=self.order.key)

    def give_up(self) -> None:
        """Abandon this group: stop forming it, or abort every operation in it. From any thread."""
        self._is_wanted = False
        group = self.group
        if group is not None:
            group.abort()

    def _form(self) -> None:
        try:
            if not self.order.forced:
                # Before a planned change members still train, so there is time; after a loss the others wait.
                self._prepare(self.rank, self.world_size)
            self._is_prepared.set()
            group = form_group(
                self.order.rendezvous,
                self.generation,
                self.rank,
                self.world_size,
                self._device,
                is_wanted=self.is_wanted,
                listen_host=self.listen_host,
                key=self.order.key,
            )
            self.group = group
            if not self._is_wanted:
                group.abort()
        except (SpringtideError, RuntimeError, OSError) as error:
            self.error = str(error) or type(error).__name__
        finally:
            self._is_prepared.set()
            self._done.set()


class Membership:
    """The current group and pending orders. The control thread calls `take_*`, the training thread all else."""

    def __init__(self, replica_id: ReplicaId, device: torch.device, listen_host: str = "") -> None:
        self._replica_id = replica_id
        self._device = device
        self._listen_host = listen_host
        # Called in the background before a planned group is formed, with rank, world size and whether there are
        # joiners.
        self.prepare: Callable[[int, int, bool], None] = lambda rank, world_size, feeds_joiners: None
        self.changed = threading.Condition()
        self._formations: dict[int, Formation] = {}
        self._newest: Formation | None = None
        self.current: Formation | None = None
        self.preempt_generation: int | None = None
        # This member was asked to leave; the others may go on.
        self.is_departing = False
        # Set by training when the fence is above its generation: a newer order exists that has not arrived yet.
        self.is_outdated = False

    @property
    def generation(self) -> int:
        """The generation whose group this replica is a member of; 0 before the first."""
        return self.current.generation if self.current is not None else 0

    def take_formation(self, order: FormGroup) -> Formation | None:
        """Begin to form the ordered group; None if the order is a repetition or outdated."""
        with self.changed:
            newest = self._newest
            if order.generation <= max(self.generation, newest.generation if newest is not None else 0):
                return None
            old = self.current.order.members if self.current is not None else order.members
            feeds_joiners = not set(order.members) <= set(old)

            def prepare(rank: int, world_size: int) -> None:
                self.prepare(rank, world_size, feeds_joiners)

            formation = Formation(order, self._replica_id, self._device, prepare, self._listen_host)
            self._newest = formation
            if order.forced:
                for other in self._formations.values():
                    other.give_up()
                self._formations.clear()
                if self.current is not None:
                    self.current.give_up()
            self._formations[order.generation] = formation
            self.changed.notify_all()
            return formation

    def take_preempt(self, generation: int | None) -> None:
        """Have all members stop at the next step boundary, as `generation` (None: the current one).

        Safe in a signal handler.
        """
        with self.changed:
            self.preempt_generation = max(self.generation, generation or 0, self.preempt_generation or 0)
            self.changed.notify_all()

    def take_departure(self) -> None:
        """Leave at the next step boundary; the others go on without this member. Safe in a signal handler."""
        with self.changed:
            self.is_departing = True
            self.changed.notify_all()

    @property
    def is_leaving(self) -> bool:
        """Whether this member is to leave, with the others or alone."""
        return self.is_departing or self.preempt_generation is not None

    @property
    def leaving_generation(self) -> int:
        """The generation as which a member that leaves commits its state: the newest that counts it in."""
        if self.preempt_generation is not None:
            return self.preempt_generation
        pending = self.pending
        # In a planned group the others still belong to this one: what they write must not be refused.
        is_in_next = pending is not None and pending.is_member and pending.order.forced
        return pending.generation if pending is not None and is_in_next else self.generation

    def await_order(self, tried_generation: int) -> Formation | None:
        """Wait for an order to form a group above the one tried last, or to leave; returns the group to be formed."""

        def has_newer_order() -> bool:
            pending = self.pending
            return self.is_leaving or (pending is not None and pending.generation > tried_generation)

        self.wait_for(has_newer_order)
        return self.pending

    def await_newer_order(self, generation: int) -> int | None:
        """Wait some seconds for an order newer than `generation`, whose checkpoint the fence refused.

        Only for a departing member: if it is the last of its group, the next group still includes it, and it commits as
        that generation. Returns the generation, or None if the others go on without this member.
        """
        if not self.is_departing or self.preempt_generation is not None:
            return None

        def has_newer_order() -> bool:
            pending = self.pending
            return pending is not None and pending.generation > generation

        self.wait_for(has_newer_order, _NEWER_ORDER_WAIT_S)
        newer = self.leaving_generation
        return newer if newer > generation else None

    @property
    def pending(self) -> Formation | None:
        """The newest ordered group, unless it is the current one."""
        newest = self._newest
        return newest if newest is not None and newest.generation > self.generation else None

    @property
    def must_leave_step(self) -> bool:
        """Whether a member is lost, so that the step under way cannot be completed, or must not be."""
        pending = self.pending
        return self.is_outdated or (pending is not None and pending.order.forced)

    def adopt(self, formation: Formation) -> None:
        """Make the formation's group the current one."""
        with self.changed:
            self.current = formation
            self.is_outdated = False
            self._formations = {key: value for key, value in self._formations.items() if key > formation.generation}

    def agreed(self, generation: int) -> Formation | None:
        """The formation of the generation that all members reported ready; None if a loss has overtaken it."""
        with self.changed:
            return self._formations.get(generation)

    def drop_superseded(self, generation: int) -> None:
        """Give up formations below `generation`: members can no longer agree on them."""
        with self.changed:
            for older in [key for key in self._formations if key < generation]:
                self._formations.pop(older).give_up()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until the predicate holds; it is evaluated on every order and several times a second."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while not predicate():
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    return False
                self.changed.wait(_POLL_S)
        return True
