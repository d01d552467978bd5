"""Texts of options that several benches have."""

from __future__ import annotations

import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.options import names_of, sizes_of, trace_folders


def test_lists_are_read_with_and_without_blanks():
    assert names_of(" a, b,,c ") == ["a", "b", "c"]
    assert names_of(None) == []
    assert sizes_of("64,512", 8, 1024, "devices", "multiples of 8", 8) == [64, 512]


@pytest.mark.parametrize("text", ["0", "7", "2000", "some", "8,12", "-8"])
def test_sizes_out_of_range_are_refused(text):
    with pytest.raises(InvalidRequest, match="is no number of devices; give multiples of 8"):
        sizes_of(text, 8, 1024, "devices", "multiples of 8", 8)


def test_traces_come_from_the_option_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SPRINGTIDE_TRACES", str(tmp_path))
    assert trace_folders({"traces": ()}) == [tmp_path]
    with pytest.raises(InvalidRequest, match="there is no folder 'nowhere'"):
        trace_folders({"traces": ("nowhere",)})
