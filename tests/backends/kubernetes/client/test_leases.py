"""The election without a cluster: a Lease in memory, clocks that jump, answers that come late or never."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from springtide.backends.kubernetes.client.errors import AlreadyExists, ServerFault, Unreachable, VersionConflict
from springtide.backends.kubernetes.client.kinds import Key
from springtide.backends.kubernetes.client.leases import Leadership, identity_of_this_process

LEASE_S = 1.0


class LeaseServer:
    """One Lease, replaced only under its version; `trouble` is raised by the next calls."""

    server = "memory"

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.trouble: list[Exception] = []
        self.loses_answers = 0
        self.on_kept: Callable[[], object] = lambda: None
        self._version = 0

    async def find(self, kind: object, name: str, namespace: str) -> dict[str, Any] | None:
        await self._meet()
        return copy.deepcopy(self.lease)

    async def create(self, kind: object, obj: dict[str, Any], namespace: str) -> dict[str, Any]:
        await self._meet()
        if self.lease is not None:
            raise AlreadyExists(409, "AlreadyExists", "there is one")
        return await self._keep(obj)

    async def replace(self, kind: object, obj: dict[str, Any]) -> dict[str, Any]:
        await self._meet()
        if self.lease is None or obj["metadata"].get("resourceVersion") != str(self._version):
            raise VersionConflict(409, "Conflict", "it has changed")
        return await self._keep(obj)

    def hold(self, identity: str, lease_s: int = 1) -> None:
        """Somebody else becomes the holder."""
        self._version += 1
        spec = {"holderIdentity": identity, "leaseDurationSeconds": lease_s, "renewTime": str(self._version)}
        self.lease = {"metadata": {"name": "l", "uid": "u", "resourceVersion": str(self._version)}, "spec": spec}

    @property
    def holder(self) -> str:
        return "" if self.lease is None else str(self.lease["spec"]["holderIdentity"])

    async def _keep(self, obj: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        self.lease = copy.deepcopy(obj)
        self.lease["metadata"] |= {"resourceVersion": str(self._version), "uid": "u"}
        if self.loses_answers:
            self.loses_answers -= 1
            raise Unreachable("the answer is lost")
        asyncio.get_running_loop().call_soon(self.on_kept)
        return copy.deepcopy(self.lease)

    async def _meet(self) -> None:
        await asyncio.sleep(0)
        if self.trouble:
            raise self.trouble.pop(0)


class Process:
    def __init__(self, server: LeaseServer, name: str, **options: Any) -> None:
        self.events: list[str] = []
        self.jump_s = 0.0
        self.leadership = Leadership(
            Key("ns", "l"),
            lease_s=LEASE_S,
            identity=name,
            on_acquired=lambda: self.events.append("leads"),
            on_lost=self.events.append,
            clock=lambda: asyncio.get_event_loop().time() + self.jump_s,
            **options,
        )
        self.task = asyncio.ensure_future(self.leadership.run(server))  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def run(story: Callable[[LeaseServer], Any]) -> None:
    async def live() -> None:
        await story(LeaseServer())
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(live())


def test_nobody_has_the_name_of_another() -> None:
    assert identity_of_this_process() != identity_of_this_process()


@pytest.mark.slow
def test_the_first_one_leads_and_the_second_waits_until_it_is_silent() -> None:
    async def story(server: LeaseServer) -> None:
        one = Process(server, "one")
        await until(one.leadership.may_act)
        two = Process(server, "two")
        await asyncio.sleep(1.5 * LEASE_S)
        assert two.events == []
        assert two.leadership.holder == "one"
        one.task.cancel()
        await until(two.leadership.may_act)
        assert not one.leadership.may_act()
        assert two.leadership.num_changes == 2

    run(story)


def test_one_that_is_cancelled_as_its_renewal_ends_renews_no_more() -> None:
    async def story(server: LeaseServer) -> None:
        one = Process(server, "one")
        await until(one.leadership.may_act)
        server.on_kept = one.task.cancel
        await until(one.task.done)
        assert one.task.cancelled()

    run(story)


def test_who_is_known_to_have_ended_is_followed_at_once() -> None:
    async def story(server: LeaseServer) -> None:
        server.hold("before", lease_s=3600)
        stranger = Process(server, "stranger")
        follower = Process(server, "follower", predecessor="before")
        await until(follower.leadership.may_act)
        assert stranger.events == []
        assert server.holder == "follower"

    run(story)


@pytest.mark.slow
def test_a_holder_that_asked_for_longer_is_given_longer() -> None:
    async def story(server: LeaseServer) -> None:
        server.hold("patient", lease_s=3)
        waiting = Process(server, "waiting")
        await asyncio.sleep(1.5 * LEASE_S)
        assert waiting.events == []
        # By its own word the holder is over now, on the clock of whoever waits.
        waiting.jump_s = 3.1
        await until(waiting.leadership.may_act)

    run(story)


@pytest.mark.slow
def test_trouble_that_passes_costs_no_lead() -> None:
    async def story(server: LeaseServer) -> None:
        one = Process(server, "one")
        await until(one.leadership.may_act)
        server.trouble += [ServerFault(500, "InternalError", "not well"), VersionConflict(409, "Conflict", "changed")]
        await until(lambda: not server.trouble)
        await asyncio.sleep(LEASE_S)
        assert one.leadership.may_act()
        assert one.events == ["leads"]

    run(story)


def test_a_write_whose_answer_is_lost_still_leads() -> None:
    """It need not wait for its own lease to run out, which here would take an hour."""

    async def story(server: LeaseServer) -> None:
        leadership = Leadership(Key("ns", "l"), lease_s=3600, identity="one")
        server.loses_answers = 2
        for _ in range(2):
            with pytest.raises(Unreachable):
                await leadership._try_to_lead(server)  # type: ignore[arg-type]
            assert not leadership.may_act()
        assert await leadership._try_to_lead(server)  # type: ignore[arg-type]
        assert leadership.may_act()
        assert leadership.num_changes == 1

    run(story)


def test_a_suspended_holder_may_not_act_and_acts_again_if_no_other_took_over() -> None:
    async def story(server: LeaseServer) -> None:
        one = Process(server, "one")
        await until(one.leadership.may_act)
        one.jump_s = 100.0
        assert not one.leadership.may_act()
        assert one.leadership.is_suspended
        await until(one.leadership.may_act)
        assert one.events == ["leads"]

    run(story)


def test_a_holder_that_is_suspended_while_another_takes_over_has_lost() -> None:
    async def story(server: LeaseServer) -> None:
        one = Process(server, "one")
        await until(one.leadership.may_act)
        one.jump_s = 100.0
        server.hold("two")
        await until(lambda: len(one.events) == 2)
        assert one.events[1] == "another control plane has taken over: two"
        assert not one.leadership.may_act()
        assert not one.leadership.is_leading
        await one.task

    run(story)


@pytest.mark.parametrize("is_leading", [True, False])
def test_what_is_given_back_is_free(is_leading: bool) -> None:
    async def story(server: LeaseServer) -> None:
        if not is_leading:
            server.hold("another", lease_s=3600)
        one = Process(server, "one")
        if is_leading:
            await until(one.leadership.may_act)
        else:
            await asyncio.sleep(0.05)
        await one.leadership.release(server)  # type: ignore[arg-type]
        assert not one.leadership.may_act()
        assert server.holder == ("" if is_leading else "another")
        await one.task

    run(story)
