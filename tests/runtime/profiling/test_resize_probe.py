"""The probe's rows: what is bound by what, so that `passed` means something."""

from __future__ import annotations

import pytest

from springtide.runtime.profiling.resize_probe import _LARGE, _SMALL, Pause, _rows, measure_pauses


@pytest.mark.parametrize(
    ("model", "case", "catchup", "pause_bound_s", "first_bound_s"),
    [
        (_SMALL, "grow 1->2", False, 0.5, 2.53),
        (_LARGE, "grow 1->2", True, 0.5, 2.03),
        (_LARGE, "grow 1->2", False, 0.55, 2.53),
        (_LARGE, "shrink 3->2", False, 0.5, 2.03),
        (_LARGE, "recover 2->1 after kill -9", True, 1.5, 3.53),
    ],
)
def test_bounds(model, case, catchup, pause_bound_s, first_bound_s):
    pause = Pause(pause_s=0.1, first_step_s=1.2, usual_step_s=1.0)
    rows = _rows(model, case, pause, floor_s=0.2, size=2, catchup=catchup)
    assert [row.bound for row in rows] == pytest.approx([pause_bound_s, first_bound_s])
    assert [row.ratio for row in rows] == pytest.approx([0.5, 1.2])


@pytest.mark.slow
def test_a_small_model_goes_through_every_change():
    pauses = measure_pauses(_SMALL, catchup=True)
    assert list(pauses) == ["grow 1->2", "grow 2->4", "shrink 4->2", "recover 2->1 after kill -9"]
    assert all(pause.first_step_s > 0 and pause.usual_step_s > 0 for pause in pauses.values())
