"""What other distributions offer: names without imports, and errors instead of silence."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from springtide.core import plugins
from springtide.core.errors import InvalidRequest
from springtide.core.plugins import load_from_studies, offered


def test_names_are_known_without_an_import():
    points = offered("springtide.benches")
    assert list(points) == sorted(points)
    assert points["jct"].value == "springtide_studies.jct.bench:BENCH"


def test_what_is_not_offered_names_its_mend_and_a_wrong_module_is_an_error(monkeypatch):
    with pytest.raises(InvalidRequest, match="bench speed comes with springtide"):
        load_from_studies("springtide.benches", "speed", "bench speed")
    wrong = EntryPoint("speed", "springtide_studies.no.such.place" + ":BENCH", "springtide.benches")
    monkeypatch.setattr(plugins, "offered", lambda group: {"speed": wrong})
    with pytest.raises(ModuleNotFoundError, match="springtide_studies"):
        load_from_studies("springtide.benches", "speed", "bench speed")
