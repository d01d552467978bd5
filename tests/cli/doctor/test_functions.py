"""What `springtide doctor` says of a parameter store that is there, or is started for each job."""

from __future__ import annotations

import pytest

from springtide.cli.doctor.functions import _check_parameters


@pytest.mark.parametrize(
    ("address", "verdict", "said"),
    [
        ("shm://doctor", "ok", "put"),
        ("redis?binary=sh", "ok", "is started for each job"),
        ("redis?binary=/no/such/redis-server", "fail", "there is no /no/such/redis-server on this machine"),
        ("redis?lingre=1s", "fail", "no option lingre"),
        ("ecs://cluster/redis:1?region=us-east-1&subnets=a", "ok", "cluster/redis:1 on ECS"),
    ],
)
def test_a_parameter_store_is_looked_at_before_the_first_job(address, verdict, said):
    check = _check_parameters(address, address)
    assert (check.name, check.verdict) == ("parameters", verdict)
    assert said in check.text


def test_a_missing_program_comes_with_its_mend():
    assert "apt install redis-server" in _check_parameters("redis?binary=nothing", "").mend
