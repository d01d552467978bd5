"""Policies are found by name, with parameters in it, and loaded only when they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from springtide.core.errors import InvalidRequest
from springtide.scheduling.loans.policy import Loaning
from springtide.scheduling.loans.reclaim import OneWay, TwoWay
from springtide.scheduling.policies.edf import EarliestDeadlineFirst
from springtide.scheduling.policies.elastic import Elastic
from springtide.scheduling.policies.fapes.policy import Fapes
from springtide.scheduling.registry import (
    PACKER_NAMES,
    POLICY_NAMES,
    STRATEGY_NAMES,
    check_policy_name,
    describe_policy,
    make_policy,
)
from springtide_studies.rivals.policies.static import Static
from springtide_studies.rivals.policies.themis import Themis
from springtide_studies.rivals.policies.tiresias import Tiresias

RIVALS = {"edf", "gandiva", "tiresias", "themis", "chronus", "optimus", "fifo", "sjf", "static"}


def test_every_rival_has_its_name():
    assert set(POLICY_NAMES) >= RIVALS
    assert POLICY_NAMES[0] == "springtide"


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_can_be_built_and_says_in_one_line_what_it_does(name):
    assert hasattr(make_policy(name), "decide")
    assert describe_policy(name)
    assert "\n" not in describe_policy(name)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("elastic", Elastic()),
        ("elastic:settle_s=5", Elastic(settle_s=5.0)),
        ("edf", EarliestDeadlineFirst()),
        ("edf:caps=no", EarliestDeadlineFirst(caps=False)),
        ("themis:lease_s=240:fairness_fraction=0.5", Themis(lease_s=240.0, fairness_fraction=0.5)),
        ("tiresias:thresholds_s=3250+7200", Tiresias(thresholds_s=(3250.0, 7200.0))),
        ("tiresias:thresholds_s=100", Tiresias(thresholds_s=(100.0,))),
        ("static:num_workers=2", Static(num_workers=2)),
        ("static:num_workers=none", Static()),
        ("fapes:communication=/a/model.bin:unit=1", Fapes(communication="/a/model.bin", unit=1)),
    ],
)
def test_parameters_stand_in_the_name(name, policy):
    assert make_policy(name) == policy
    check_policy_name(name)
    assert describe_policy(name) == describe_policy(name.partition(":")[0])


def test_parameters_of_the_call_win():
    assert make_policy("edf:caps=no", caps=True) == EarliestDeadlineFirst(caps=True)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("best", "there is no policy 'best'; choose one of springtide, elastic, edf, fifo"),
        ("edf:caps", "cannot read 'caps' in the policy edf:caps; write edf:PARAMETER=VALUE"),
        ("edf:cap=no", "the policy edf has no parameter 'cap'; it has caps=True"),
        ("edf:caps=4", "the policy edf does not take caps=4"),
        ("fifo:a=1", "the policy fifo has no parameter 'a'; it has none"),
        ("two-way", "two-way is a strategy of loans: write two-way/POLICY, as in two-way/springtide"),
        ("three-way/fifo", "there is no strategy of loans 'three-way'; choose one of "),
        ("two-way/best", "there is no policy 'best'; choose one of springtide"),
        ("two-way/one-way/fifo", "one strategy stands before a policy for training, and 'two-way/one-way/fifo' has"),
        ("two-way:gain=4/fifo", "the strategy two-way has no parameter 'gain'; it has none"),
        ("two-way/edf:cap=no", "the policy edf has no parameter 'cap'"),
        ("gandiva:quantum_s=soon", "the policy gandiva does not take quantum_s=soon"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(name, told):
    with pytest.raises(InvalidRequest) as error:
        make_policy(name)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


def test_a_strategy_stands_before_any_policy_for_training():
    assert make_policy("two-way/fapes:round_s=600:unit=1") == Loaning(
        strategy=TwoWay(), training=Fapes(round_s=600.0, unit=1)
    )
    assert make_policy("two-way/fapes:communication=/a/model.bin") == Loaning(
        strategy=TwoWay(), training=Fapes(communication="/a/model.bin")
    )
    assert make_policy("one-way/edf", caps=False) == Loaning(
        strategy=OneWay(), training=EarliestDeadlineFirst(caps=False)
    )
    check_policy_name("dedicated/springtide")


def test_every_strategy_says_in_one_line_what_it_does():
    assert set(STRATEGY_NAMES) >= {"dedicated", "one-way", "two-way"}
    assert not set(STRATEGY_NAMES) & set(POLICY_NAMES)
    for name in STRATEGY_NAMES:
        assert describe_policy(name)
        assert "\n" not in describe_policy(name)
        assert describe_policy(f"{name}/fifo") == f"{describe_policy('fifo')} {describe_policy(name)}"
        assert hasattr(make_policy(f"{name}/fifo"), "decide")


def test_the_list_loads_no_policy():
    code = (
        "import sys; import springtide.scheduling.registry; "
        "print([m for m in sys.modules if m.startswith('springtide.scheduling.') and not m.endswith('registry')], "
        "'scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


def test_a_rival_without_the_studies_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr("springtide.core.plugins.offered", lambda group: {})
    for name, what in (("sia", "the policy sia"), ("exclusive/fifo", "the packer of shares exclusive")):
        with pytest.raises(InvalidRequest, match="pip install 'springtide\\[studies\\]'") as error:
            make_policy(name)
        assert str(error.value).startswith(f"{what} comes with springtide[studies]")


def test_the_names_are_those_of_the_product_and_of_what_is_installed():
    assert len(POLICY_NAMES) == 21
    assert POLICY_NAMES[:6] == ("springtide", "elastic", "edf", "fifo", "elasticflow", "elasticflow-artifact")
    assert STRATEGY_NAMES == ("tide", "two-way", "one-way", "dedicated")
    assert PACKER_NAMES == ("dilu", "infless-l", "infless-r", "fast-gs", "exclusive")


def test_a_parameter_that_no_name_can_hold_says_so():
    with pytest.raises(InvalidRequest, match="takes hooks from Python only"):
        check_policy_name("elasticflow:hooks=quota")
