"""Every registered policy keeps the contract of policies."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from springtide.core.decision import Plan, PoolAllocation
from springtide.core.errors import PolicyError
from springtide.policies.registry import POLICY_NAMES, make_policy
from springtide.testing.policy import check_policy, digest_plans


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_policy_keeps_the_contract(name: str) -> None:
    check_policy(lambda: make_policy(name))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_plans_do_not_depend_on_the_hash_seed(name: str) -> None:
    digests = {digest_plans(lambda: make_policy(name))}
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "springtide.testing.policy", name],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1


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
