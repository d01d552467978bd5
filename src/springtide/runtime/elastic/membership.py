"""The members of the group: orders are taken on the control thread and looked up by training at step boundaries."""

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
# An order is on its way when the fence has been raised for it.
_TURN_S = 3.0


class Formation:
    """A group in the making: it is connected in the background while training goes on in the one before."""

    def __init__(
        self,
        order: FormGroup,
        replica_id: ReplicaId,
        device: torch.device,
        prepare: Callable[[int, int], None],
        listen_host: str = "",
    ) -> None:
        self.order = order
        # Where others reach this member; empty: they are on its machine.
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
        """Whether this replica could switch now: the group stands, or it is not to be in it."""
        return self._done.is_set() and not self.error and self._is_wanted

    @property
    def is_done(self) -> bool:
        """Whether the forming has ended, with a group or an error."""
        return self._done.is_set()

    @property
    def is_in_reach(self) -> bool:
        """Whether a stream of their own can be opened between members."""
        return bool(self.listen_host) or is_on_one_machine(self.order.rendezvous)

    def wait_prepared(self) -> None:
        """Wait until what this replica needs in the group is there. It always comes to an end."""
        self._is_prepared.wait()

    def wait_done(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def is_wanted(self) -> bool:
        """False once the group was given up."""
        return self._is_wanted

    def store(self) -> c10d.Store:
        """A connection of its own to the members' meeting place."""
        return open_store(self.order.rendezvous, self.generation, is_wanted=self.is_wanted)

    def give_up(self) -> None:
        """This group is not wanted any more: end its forming, or every operation in it. From any thread."""
        self._is_wanted = False
        group = self.group
        if group is not None:
            group.abort()

    def _form(self) -> None:
        try:
            if not self.order.forced:
                # After a loss the other members wait; before a planned change they train on, so there is time.
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
    """The orders that wait for the training thread. `take_*` is called by the control thread, the rest by training."""

    def __init__(self, replica_id: ReplicaId, device: torch.device, listen_host: str = "") -> None:
        self._replica_id = replica_id
        self._device = device
        self._listen_host = listen_host
        # Called in background before a planned group is formed, with rank, world size and whether joiners are fed.
        self.prepare: Callable[[int, int, bool], None] = lambda rank, world_size, feeds_joiners: None
        self.changed = threading.Condition()
        self._formations: dict[int, Formation] = {}
        self._newest: Formation | None = None
        self.current: Formation | None = None
        self.preempt_generation: int | None = None
        # This member is to leave, whatever the others do.
        self.is_departing = False
        # Set by training when it finds the fence above its generation: a newer order exists that it has not heard.
        self.is_outdated = False

    @property
    def generation(self) -> int:
        """The generation whose group this replica is a member of; 0 before the first."""
        return self.current.generation if self.current is not None else 0

    def take_formation(self, order: FormGroup) -> Formation | None:
        """Begin to form the ordered group; None if the order is a repetition or of the past."""
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
        """Stop at the next boundary; None stands for the present generation. Safe in a signal handler."""
        with self.changed:
            self.preempt_generation = max(self.generation, generation or 0, self.preempt_generation or 0)
            self.changed.notify_all()

    def take_departure(self) -> None:
        """Leave alone at the next boundary: the others go on without this member. Safe in a signal handler."""
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

        def is_told() -> bool:
            pending = self.pending
            return self.is_leaving or (pending is not None and pending.generation > tried_generation)

        self.wait_for(is_told)
        return self.pending

    def await_turn(self, generation: int) -> int | None:
        """A departing member was refused as `generation`: wait a while for an order that counts it in.

        The last member of its group is in the next one, even if it is to leave. Returns that
        generation, or None where others go on without this member.
        """
        if not self.is_departing or self.preempt_generation is not None:
            return None

        def is_told() -> bool:
            pending = self.pending
            return pending is not None and pending.generation > generation

        self.wait_for(is_told, _TURN_S)
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
        """The formation's group is the one that trains from now on."""
        with self.changed:
            self.current = formation
            self.is_outdated = False
            self._formations = {key: value for key, value in self._formations.items() if key > formation.generation}

    def agreed(self, generation: int) -> Formation:
        """The formation that all members had ready."""
        with self.changed:
            return self._formations[generation]

    def drop_superseded(self, generation: int) -> None:
        """No agreement can fall on a formation below `generation` any more: give those up."""
        with self.changed:
            for older in [key for key in self._formations if key < generation]:
                self._formations.pop(older).give_up()

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Sleep until the predicate holds; it is looked at on every order and several times a second."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while not predicate():
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    return False
                self.changed.wait(_POLL_S)
        return True
