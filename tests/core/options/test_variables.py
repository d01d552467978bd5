"""Variables of a workload's environment: what may be set, and that no sentence repeats a value."""

from __future__ import annotations

import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.options.variables import MAX_VARIABLES, MAX_VARIABLES_BYTES, check_variables


def test_values_become_strings() -> None:
    assert check_variables({"HF_HOME": "/data", "_N": 3, "RATE": 0.5, "EMPTY": ""}, "env") == {
        "HF_HOME": "/data",
        "_N": "3",
        "RATE": "0.5",
        "EMPTY": "",
    }


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A=B", "A B", "Ä", "A" * 129, 3])
def test_a_name_is_one_of_a_variable(name: object) -> None:
    with pytest.raises(InvalidRequest, match=r"env has .* which is no name of a variable"):
        check_variables({name: "1"}, "env")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("SPRINGTIDE_STATE", "the platform sets it"),
        ("RANK", "the platform sets it"),
        ("WORLD_SIZE", "the platform sets it"),
        ("MASTER_PORT", "the platform sets it"),
        ("TORCHELASTIC_RUN_ID", "the platform sets it"),
        ("CUDA_VISIBLE_DEVICES", "the platform sets it"),
        ("LD_PRELOAD", "it is read when a process starts"),
        ("PYTHONPATH", "it is read when a process starts"),
    ],
)
def test_what_the_platform_sets_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"options.env cannot set {name}: {why}"):
        check_variables({name: "x"}, "options.env")


@pytest.mark.parametrize("value", ["private\0", "private\ud800", ["private"], {"private": 1}])
def test_a_refusal_names_the_variable_and_not_its_value(value: object) -> None:
    with pytest.raises(InvalidRequest, match="the value of TOKEN") as refusal:
        check_variables({"TOKEN": value}, "env")
    assert "private" not in str(refusal.value)


@pytest.mark.parametrize("value", [None, "A=1", ["A"]])
def test_it_is_a_mapping(value: object) -> None:
    with pytest.raises(InvalidRequest, match="env must map names to values"):
        check_variables(value, "env")


def test_number_and_bytes_are_bounded() -> None:
    full = {f"A{number}": "" for number in range(MAX_VARIABLES)}
    assert len(check_variables(full, "env")) == MAX_VARIABLES
    with pytest.raises(InvalidRequest, match=f"at most {MAX_VARIABLES} are possible"):
        check_variables({**full, "B": ""}, "env")
    assert check_variables({"A": "ä" * (MAX_VARIABLES_BYTES // 2 - 1)}, "env")
    with pytest.raises(InvalidRequest, match="32,769 bytes, and 32,768 are possible"):
        check_variables({"A": "a" * MAX_VARIABLES_BYTES}, "env")
