"""Every registered policy keeps the contract of policies."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from kits.simulation.sweeps import part
from springtide.core.decision import Plan, PoolAllocation
from springtide.core.errors import PolicyError
from springtide.scheduling.registry import PACKER_NAMES, POLICY_NAMES, make_policy
from springtide.scheduling.sharing.policy import Sharing
from springtide.testing.policy import check_policy, check_shared_policy, digest_plans


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policy_keeps_the_contract(name: str) -> None:
    check_policy(lambda: make_policy(name), num_snapshots=part(200, least=60))


@pytest.mark.slow
def test_plans_do_not_depend_on_the_hash_seed() -> None:
    here = [digest_plans(lambda name=name: make_policy(name)) for name in POLICY_NAMES]
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "springtide.testing.policy", *POLICY_NAMES],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert dict(zip(POLICY_NAMES, done.stdout.split(), strict=True)) == dict(zip(POLICY_NAMES, here, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("packer", PACKER_NAMES)
@pytest.mark.parametrize("inner", ["elastic", "springtide"])
def test_policy_with_parts_of_devices_keeps_the_contract(packer: str, inner: str) -> None:
    policy = make_policy(f"{packer}/{inner}")
    assert isinstance(policy, Sharing)
    check_shared_policy(
        lambda: make_policy(f"{packer}/{inner}"), num_snapshots=part(50, least=15), given_share=policy.packer.booked
    )
    # Where nobody has a share it is the inner policy.
    assert digest_plans(lambda: policy) == digest_plans(lambda: make_policy(inner))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_plans_the_devices_that_sharers_leave(name: str) -> None:
    policy = make_policy(f"dilu/{name}")
    assert isinstance(policy, Sharing)
    check_shared_policy(
        lambda: make_policy(f"dilu/{name}"), num_snapshots=part(25, least=8), seed=1, given_share=policy.packer.booked
    )


class Greedy:
    """Gives every job the same first device."""

    def decide(self, snapshot):
        first = snapshot.cluster.device_ids()[:1]
        return Plan(allocations={view.job.job_id: PoolAllocation(device_ids=first) for view in snapshot.jobs})


class Forgetful:
    """Decides otherwise when it is asked again."""

    def __init__(self):
        self.num_asked = 0

    def decide(self, snapshot):
        self.num_asked += 1
        return Plan(memory=self.num_asked)


class Hasty:
    """Wants to be asked again at once, for ever."""

    def decide(self, snapshot):
        return replace(Plan(), revisit_at_s=snapshot.now_s)


@pytest.mark.parametrize("wrong", [Greedy, Forgetful, Hasty])
def test_the_kit_finds_a_wrong_policy(wrong: type) -> None:
    with pytest.raises((PolicyError, AssertionError)):
        check_policy(wrong)


class Lavish:
    """Gives everybody whole devices, whatever was asked for."""

    def decide(self, snapshot):
        first = snapshot.cluster.device_ids()[:1]
        return Plan(
            allocations={view.job.job_id: PoolAllocation(device_ids=first) for view in snapshot.jobs[:1]},
        )


class Idle:
    """Lets everybody wait."""

    def decide(self, snapshot):
        return Plan()


class Crowding:
    """Puts everybody with a share on the first device."""

    def decide(self, snapshot):
        first = snapshot.cluster.device_ids()[:1]
        sharers = [view.job for view in snapshot.jobs if view.job.share is not None]
        return Plan(allocations={job.job_id: PoolAllocation(device_ids=first, share=job.share) for job in sharers})


@pytest.mark.parametrize("wrong", [Lavish, Idle, Crowding])
def test_the_kit_finds_a_policy_that_is_wrong_about_parts(wrong: type) -> None:
    with pytest.raises((PolicyError, AssertionError)):
        check_shared_policy(wrong)
