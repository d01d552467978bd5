"""Errors whose sentence depends on the reader."""

from __future__ import annotations

import pytest

from springtide.core.errors import InvalidRequest, InvalidSetting, SettingName


@pytest.mark.parametrize(
    ("setting", "flag"),
    [("functions.store", "--functions-store"), ("functions.parameter_store", "--functions-parameter-store")],
)
def test_a_setting_is_called_as_its_flag_or_as_in_files(setting: str, flag: str) -> None:
    error = InvalidSetting("a store is missing: add ", SettingName(setting), " s3://--functions-bucket/store")
    assert isinstance(error, InvalidRequest)
    assert str(error) == f"a store is missing: add {flag} s3://--functions-bucket/store"
    assert error.in_files == f"a store is missing: add {setting} s3://--functions-bucket/store"
