"""The example of a service and a job on one device: here in this process, and on a real platform side by side."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kits.examples.local_context import LocalContext, fell, load
from kits.examples.terminal import EXAMPLES, Terminal
from springtide.core.shares import has_room, load_of, make_share


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield load("shared_device", monkeypatch)
    sys.modules.pop("shared_device", None)


def test_it_learns_and_scores_without_a_platform(example):
    context = LocalContext(max_steps=40)
    example.fit.function(context)
    assert fell(context.losses)
    scores = example.Scorer.local().predict([[0.5] * example.NUM_FEATURES, [0.25] * example.NUM_FEATURES])
    assert len(scores) == 2
    assert scores == example.Scorer.local().predict([[0.5] * example.NUM_FEATURES, [0.25] * example.NUM_FEATURES])


def test_both_fit_on_one_device(example):
    job, service = (make_share(*part) for part in ((0.4, 0.9), (0.3, 0.6)))
    assert (example.fit.options.values["share"], example.Scorer.options.values["share"]) == ((0.4, 0.9), (0.3, 0.6))
    assert has_room(load_of([job]), service)


@pytest.mark.examples
@pytest.mark.timeout(600)
def test_a_service_and_a_job_run_on_one_device(tmp_path: Path):
    terminal = Terminal(tmp_path / "state")
    terminal.type("up", "--slots", "1", "--port", "0")
    try:
        path = str(EXAMPLES / "shared_device.py")
        terminal.type("deploy", f"{path}:Scorer")
        terminal.type("run", f"{path}:fit", "--epochs", "20000", "--detach")
        token = (terminal.state / "token").read_text().strip()
        url = json.loads((terminal.state / "platform.json").read_text())["url"]
        answer = httpx2.post(
            f"{url}/f/scorer",
            json={"rows": [[0.5] * 32]},
            headers={"Authorization": f"Bearer {token}"},
            timeout=120.0,
        )
        assert answer.status_code == 200, answer.text
        end_s = time.monotonic() + 120.0
        while terminal.ask("status", "waves")["step"] == 0 and time.monotonic() < end_s:
            time.sleep(0.5)
        devices = terminal.ask("devices")
        holders = {holder["workload_name"] for holder in devices["devices"][0]["holders"]}
        assert {"waves", "scorer"} <= holders
        assert terminal.ask("status", "waves")["step"] > 0
        assert any("beside" in line for line in terminal.ask("why", "waves")["evidence"])
        terminal.type("cancel", "waves")
    finally:
        terminal.type("down")
