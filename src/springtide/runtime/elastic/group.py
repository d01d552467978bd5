"""Groups of workers that exchange tensors: one torch process group per generation, every operation with a deadline.

A hung gloo operation can only be ended by shutting down the group's connected sockets from another thread: gloo's own
abort() does nothing. Listening sockets must not be shut down, because gloo then ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from springtide.core.errors import BackendError, CollectiveError, PeerLost
from springtide.runtime.elastic.meeting import MeetingPlace
from springtide.runtime.elastic.own_sockets import (
    connected_sockets,
    is_from_member,
    raise_descriptor_limit,
    refuse_connections,
    say_once,
    tells_accounts,
)
from springtide.runtime.elastic.tcp_meeting import MeetingHost, TcpMeeting
from springtide.runtime.process.guarded_accepts import guard_accepts

FORM_TIMEOUT_S = 30.0
OPERATION_TIMEOUT_S = 10.0
# How long an evaluation may go without a finished part before the members that wait for it give up.
EVALUATION_PATIENCE_S = 60.0
# gloo's own limit of an operation that `Group` waits for with a limit of its own, which an evaluation may extend.
_LONGEST_OPERATION_S = 600.0
_EVALUATION = "evaluation"
_POLL_S = 0.002
_LARGE_BYTES = 1 << 20
_ABORT_POLL_S = 0.2
_ABORT_GRACE_S = 1.0


def open_store(
    rendezvous: str,
    generation: int,
    timeout_s: float = FORM_TIMEOUT_S,
    is_wanted: Callable[[], bool] = lambda: True,
    key: str = "",
) -> c10d.Store:
    """Open the members' rendezvous store: `file:///directory`, or `tcp://host:port`, which the first member hosts,
    and where all prove that they know the `key`.

    Raises PeerLost if no host answers within `timeout_s` seconds or once `is_wanted` returns false, and BackendError
    for any other scheme.
    """
    if rendezvous.startswith("file://"):
        return MeetingPlace(Path(rendezvous.removeprefix("file://")) / f"g{generation}", timeout_s)
    if not rendezvous.startswith("tcp://"):
        raise BackendError(f"the rendezvous {rendezvous!r} is neither file:///path nor tcp://host:port")
    host, port = _host_and_port(rendezvous)
    try:
        return TcpMeeting(host, port, generation, timeout_s, is_wanted, key)
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


def _host_and_port(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def is_on_one_machine(rendezvous: str) -> bool:
    return rendezvous.startswith(("file://", "tcp://127.", "tcp://localhost:"))


class Group:
    """The connected members of one generation. Operations raise PeerLost; `abort` may be called from any thread."""

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        timeout_s: float = OPERATION_TIMEOUT_S,
        is_local: bool = True,
        listen_host: str = "",
        peers: frozenset[str] = frozenset(),
    ) -> None:
        """Connect all members. Raises PeerLost.

        This member listens at `listen_host`; if that is empty, at the address that the machine's name resolves to.
        `peers` are the hosts of all members, so that `abort` never touches a connection to another host.
        """
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.timeout_s = timeout_s
        # Whether all members are on one machine, and so on processors of one model.
        self.is_local = is_local
        self._sockets: dict[int, int] = {}
        self._is_aborted = threading.Event()
        self._process_group: Any = None
        self._host: MeetingHost | None = None
        # How often members had said that an evaluation gets further when this was last asked.
        self._num_noted = 0
        self._is_gpu = device.type == "cuda"
        if world_size == 1:
            return
        before = connected_sockets(peers)
        try:
            if self._is_gpu:
                self._process_group = c10d.ProcessGroupNCCL(store, rank, world_size, c10d.ProcessGroupNCCL.Options())
            else:
                host = listen_host or ("127.0.0.1" if is_local else "")
                self._process_group = connect_gloo(store, rank, world_size, host, peers)
        except RuntimeError as error:
            raise PeerLost(f"could not connect all {world_size} members: {_first_line(error)}") from error
        after = connected_sockets(peers)
        self._sockets = {fd: inode for fd, inode in after.items() if before.get(fd) != inode}

    def own_meeting(self, rendezvous: str, host: MeetingHost | None) -> None:
        """Have `abort` also shut down the connections to a tcp:// rendezvous store, which may hang too.

        `host` is the store's server, if this member runs it: it closes with the group.
        """
        self._host = host
        if rendezvous.startswith("tcp://"):
            address, port = _host_and_port(rendezvous)
            self._sockets |= connected_sockets(frozenset({address}), port)

    def set_flag(self, key: str) -> None:
        """Set a flag for the other members in the rendezvous store. Raises PeerLost if the store is gone."""
        self.use_store(lambda: self.store.set(key, "1"))

    def has_flag(self, key: str) -> bool:
        """Whether a member has set the flag. Raises PeerLost if the rendezvous store is gone."""
        return bool(self.use_store(lambda: self.store.check([key])))

    def note_evaluation(self) -> None:
        """Tell members that wait in an exchange that an evaluation gets further. Raises PeerLost."""
        self.use_store(lambda: self.store.add(_EVALUATION, 1))

    def is_evaluating(self) -> bool:
        """Whether an evaluation got further since this was asked last. Raises PeerLost."""
        before, self._num_noted = self._num_noted, self.use_store(lambda: self.store.add(_EVALUATION, 0))
        return self._num_noted > before

    def use_store(self, operation: Callable[[], Any]) -> Any:
        """What the operation on the store returns. Raises PeerLost if the store is gone, or its disk is full."""
        try:
            return operation()
        except RuntimeError as error:
            raise PeerLost(f"the meeting place is gone: {_first_line(error)}") from error

    def all_to_all(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: list[int], source_splits: list[int]
    ) -> None:
        """Send split i of `source` to rank i and receive split i of `output` from it (in elements)."""
        self._run(
            lambda timeout: self._process_group.alltoall_base(
                output, source, output_splits, source_splits, timeout=timeout
            )
        )

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, *, timeout_s: float | None = None) -> None:
        """Concatenate every rank's `source`, all of one length, into `output`."""
        if self.world_size == 1:
            output.copy_(source)
            return
        if not self._is_gpu and source.numel() * source.element_size() >= _LARGE_BYTES:
            # gloo's own allgather allocates memory and copies out of it; for a large model that is most of a step.
            parts = output.view(self.world_size, -1)
            parts[self.rank].copy_(source.view(-1))
            for rank in range(self.world_size):
                self.broadcast(parts[rank], rank, timeout_s=timeout_s)
            return

        def start(timeout: timedelta) -> Any:
            options = c10d.AllgatherOptions()
            options.timeout = timeout
            return self._process_group._allgather_base(output, source, options)

        self._run(start, timeout_s)

    def broadcast(self, tensor: torch.Tensor, source_rank: int, *, timeout_s: float | None = None) -> None:
        """Copy the content of `source_rank`'s tensor into every rank's."""

        def start(timeout: timedelta) -> Any:
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = source_rank, 0, timeout
            return self._process_group.broadcast([tensor], options)

        self._run(start, timeout_s)

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a contiguous tensor to one member."""
        self._run(lambda _: self._process_group.send([tensor], rank, 0), is_pairwise=True)

    def receive(self, tensor: torch.Tensor, rank: int) -> None:
        """Receive a contiguous tensor from one member."""
        self._run(lambda _: self._process_group.recv([tensor], rank, 0), is_pairwise=True)

    def abort(self) -> None:
        """Make every running and every later operation fail at once. Safe from any thread, and repeatedly."""
        self._is_aborted.set()
        if self._host is not None:
            self._host.close()
        for descriptor, inode in self._sockets.items():
            with contextlib.suppress(OSError):
                # The descriptor may have been reused: the inode tells whether it is still the group's socket.
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                        duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave the group. The other members' operations then fail."""
        self.abort()
        left, self._process_group = [self._process_group, self.store], None
        _destroy(left)

    def start_all_reduce(self, tensor: torch.Tensor) -> Any:
        """Begin to sum every rank's contiguous tensor into each of them; `finish` waits for it. Raises PeerLost.

        All ranks begin the same sums in the same order.
        """
        options = c10d.AllreduceOptions()
        options.timeout = self._limit(self.timeout_s)
        return self._start(lambda: self._process_group.allreduce([tensor], options))

    def finish(self, works: Sequence[Any]) -> None:
        """Wait until operations that were begun are complete. Raises PeerLost."""
        for work in works:
            self._finish(work, timedelta(seconds=self.timeout_s))
        self._synchronize()

    def sums(self, values: Sequence[float], device: torch.device) -> list[float]:
        """The sums over all ranks, each of which gives as many numbers. Raises PeerLost."""
        summed = torch.tensor(values, dtype=torch.float64).to(device)
        self.finish([self.start_all_reduce(summed)])
        return summed.tolist()

    def _run(
        self, start: Callable[[timedelta], Any], timeout_s: float | None = None, *, is_pairwise: bool = False
    ) -> None:
        if self.world_size == 1 and not self._is_aborted.is_set():
            return
        timeout = timedelta(seconds=self.timeout_s if timeout_s is None else timeout_s)
        work = self._start(lambda: start(timeout if is_pairwise else self._limit(timeout.total_seconds())))
        self._finish(work, timeout, is_pairwise=is_pairwise)
        self._synchronize()

    def _limit(self, timeout_s: float) -> timedelta:
        """The operation's own limit, which ends it. gloo's is longer than that of `_wait`, which may be extended."""
        return timedelta(seconds=timeout_s if self._is_gpu else max(timeout_s, _LONGEST_OPERATION_S))

    def _start(self, start: Callable[[], Any]) -> Any:
        if self._is_aborted.is_set():
            raise PeerLost("the group was left")
        try:
            return start()
        except RuntimeError as error:
            raise PeerLost(_first_line(error)) from error

    def _finish(self, work: Any, timeout: timedelta, *, is_pairwise: bool = False) -> None:
        try:
            if self._is_gpu or is_pairwise:
                # gloo closes a pair after a wait that timed out, so there can be only one wait.
                work.wait(timeout)
            else:
                self._wait(work, timeout.total_seconds())
        except RuntimeError as error:
            raise PeerLost(_first_line(error)) from error

    def _synchronize(self) -> None:
        if not self._is_gpu:
            return
        try:
            torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise PeerLost(_first_line(error)) from error

    def _wait(self, work: Any, timeout_s: float) -> None:
        """Wait until the operation ends, its deadline passes, or one second has passed after `abort`.

        The deadline is extended while other members evaluate and get further.

        An operation that starts while a peer disconnects may notice neither that nor the shutdown of its sockets, and
        would block the training thread until the deadline. It gets the second because it might still be writing.
        """
        deadline_s = time.monotonic() + timeout_s
        while not work.is_completed():
            left_s = deadline_s - time.monotonic()
            if self._is_aborted.is_set():
                deadline_s = min(deadline_s, time.monotonic() + _ABORT_GRACE_S)
                left_s = min(left_s, _ABORT_GRACE_S)
            try:
                work.wait(timedelta(seconds=max(0.001, min(left_s, _ABORT_POLL_S))))
            except RuntimeError:
                if not work.is_completed() and time.monotonic() >= deadline_s:
                    if self._is_aborted.is_set() or not self.is_evaluating():
                        raise
                    deadline_s = time.monotonic() + max(timeout_s, EVALUATION_PATIENCE_S)
        # Complete: this raises if it has failed.
        work.wait(timedelta(seconds=1))


def _refuse_strangers(store: c10d.Store, rank: int) -> None:
    """Refuse further connections to the sockets at which gloo waited for the other members, which are all connected.

    gloo keeps them open, accepts every connection, and ends the process when descriptors run out.
    """
    # Where gloo publishes its address: the index of its only device, and the rank.
    key = f"0/{rank}"
    refuse_connections(store.get(key) if store.check([key]) else b"")


def connect_gloo(
    store: c10d.Store,
    rank: int,
    world_size: int,
    listen_host: str,
    peers: frozenset[str],
    timeout_s: float | None = None,
) -> Any:
    """A process group of gloo whose members get connections from each other alone, while it forms and afterwards.

    This member listens at `listen_host` (empty: where the machine's name resolves to); `peers` are the hosts of all
    members if they may be on other machines. `timeout_s` is also that of operations which have none of their own.
    """
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    # The limit for each wait for another member's address; gloo gives a connection five times as long.
    options._timeout = timedelta(seconds=FORM_TIMEOUT_S if timeout_s is None else timeout_s)
    options._threads = 1
    # Connections that gloo would open later, by TORCH_GLOO_LAZY_INIT, would meet a socket that refuses them.
    create = functools.partial(gloo.create_default_device, lazy_init=False)
    if listen_host:
        create = functools.partial(gloo.create_device, hostname=listen_host, lazy_init=False)
    options._devices = [_listen(create, world_size - 1, peers)]
    try:
        made = c10d.ProcessGroupGloo(store, rank, world_size, options)
        _refuse_strangers(store, rank)
        return made
    except BaseException:
        with contextlib.suppress(RuntimeError, OSError):
            _refuse_strangers(store, rank)
        # gloo's thread may still wait for answers, which need the interpreter's lock. A process group, unlike a device,
        # is destroyed without it: so the last one to hold the device is a group of this member alone.
        left = [c10d.ProcessGroupGloo(c10d.HashStore(), 0, 1, options)]
        del options
        _destroy(left)
        raise


def _listen(create: Callable[[], Any], num_others: int, peers: frozenset[str]) -> Any:
    """A gloo device, which listens, and whose thread gets no more connections than there are other members.

    gloo accepts every connection, keeps it until the device is closed, and ends the process when no descriptor is
    free. So connections are accepted for it, and only those that may come from a member.
    """
    places = iter(range(num_others))

    def admits(link: socket.socket) -> bool:
        if is_from_member(link, peers):
            return next(places, None) is not None
        say_once("connections that came from no member while a group formed were refused")
        return False

    def say(reason: str) -> None:
        say_once(f"other accounts can connect to this worker while a group forms: {reason}")

    if not tells_accounts():
        say("the kernel does not tell whose a connection is")
        return create()
    return guard_accepts(create, admits, say)


def _destroy(left: list[Any]) -> None:
    # Destroying a process group waits for its threads, which may hang in an operation: do it in the background.
    threading.Thread(target=left.clear, name="springtide-close", daemon=True).start()


def form_group(
    rendezvous: str,
    generation: int,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    is_wanted: Callable[[], bool],
    listen_host: str = "",
    key: str = "",
) -> Group:
    """Wait until every member has arrived, then connect. Raises CollectiveError as soon as `is_wanted` turns false.

    Over tcp:// the members prove to each other that they know the `key`.

    Members on different machines publish the `listen_host` at which each can be reached. Arriving is separate from
    connecting because an attempt to connect to an absent member ends only by its timeout.
    """
    is_local = is_on_one_machine(rendezvous)
    if world_size > 1:
        raise_descriptor_limit()
    if world_size == 1 and not rendezvous.startswith("file://"):
        return Group(c10d.HashStore(), rank, world_size, device, is_local=is_local)
    is_host = rank == 0 and rendezvous.startswith("tcp://")
    host = _host_meeting(rendezvous, generation, world_size, key) if is_host else None
    try:
        store = open_store(rendezvous, generation, is_wanted=is_wanted, key=key)
        peers: frozenset[str] = frozenset()
        if world_size > 1:
            store.set(f"here/{rank}", listen_host or "1")
            arrivals = [f"here/{other}" for other in range(world_size)]
            wait_for_keys(store, arrivals, is_wanted)
            if listen_host:
                peers = frozenset(store.get(arrival).decode() for arrival in arrivals)
        group = Group(store, rank, world_size, device, is_local=is_local, listen_host=listen_host, peers=peers)
    except BaseException:
        if host is not None:
            host.close()
        raise
    group.own_meeting(rendezvous, host)
    return group


def _host_meeting(rendezvous: str, generation: int, num_members: int, key: str) -> MeetingHost:
    host, port = _host_and_port(rendezvous)
    try:
        return MeetingHost(host, port, generation, num_members, key)
    except OSError as error:
        raise PeerLost(f"this member cannot host the meeting at {host}:{port}: {error.strerror}") from error


def wait_for_keys(store: c10d.Store, keys: list[str], is_wanted: Callable[[], bool]) -> None:
    """Wait until all keys are set. Raises CollectiveError as soon as `is_wanted` turns false or the store is gone."""
    try:
        while not store.check(keys):
            if not is_wanted():
                raise CollectiveError("the group was given up before every member arrived")
            time.sleep(_POLL_S)
    except RuntimeError as error:
        raise PeerLost(f"the meeting place is gone: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """The first sentence of gloo's message, without the source position before it and the advice after it."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\] ", "", line).partition(". This is typically")[0][:300]
