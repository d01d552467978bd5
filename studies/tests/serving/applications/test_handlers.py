"""The handlers of the bench of serving: one number for the values of a request."""

from __future__ import annotations

from springtide_studies.serving.applications.handlers import HANDLERS, Sums


def test_the_handlers_answer_one_number():
    assert set(HANDLERS) == {"sums", "mlp"}
    assert Sums().predict([1.0, 2.5]) == 3.5
