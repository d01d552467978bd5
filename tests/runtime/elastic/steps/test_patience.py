"""How long a member waits for the others in a step."""

from __future__ import annotations

import pytest

from springtide.runtime.elastic.group import OPERATION_TIMEOUT_S
from springtide.runtime.elastic.steps import patience
from springtide.runtime.elastic.steps.patience import FIRST_STEP_TIMEOUT_S, StepPatience


def test_the_first_step_of_a_generation_may_take_longer_and_long_steps_make_patient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    waiting = StepPatience()
    assert waiting.timeout_s == FIRST_STEP_TIMEOUT_S
    waiting.begin_step()
    now[0] += 1.0
    waiting.end_step()
    assert waiting.timeout_s == max(OPERATION_TIMEOUT_S, 10.0)
    waiting.begin_generation()
    assert waiting.timeout_s == FIRST_STEP_TIMEOUT_S
    waiting.begin_step()
    now[0] += 50.0
    waiting.end_step()
    assert waiting.timeout_s == 500.0
    waiting.begin_step()
    waiting.end_step()
    assert waiting.timeout_s == pytest.approx(450.0)
