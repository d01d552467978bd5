"""Real models on emulated functions with short lives, killed now and then: they finish, and nothing shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from kits.end_to_end.functions_equal import check_equal
from kits.end_to_end.functions_run import Run, job_of, plan_of, service_of
from springtide.backends.functions.emulator.config import EmulatorFaults
from springtide.core import events
from springtide.core.workload import Entrypoint

# With this seed and 40 s the second invocation is killed after 15 s, the fourth after 13 s, the fifteenth after 5 s.
KILLING_SEED = 104

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("functions")]


@pytest.fixture
def run_of(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def build(*arguments: Any, **fields: Any) -> Run:
        run = Run(tmp_path / fields.pop("folder", "run"), *arguments, **fields)
        runs.append(run)
        return run

    yield build
    for run in runs:
        run.close()


def check_nothing_shows(run: Run, quiet: Run) -> None:
    """Bit for bit what functions do whom nothing befalls."""
    assert run.losses() == quiet.losses()
    one, other = (load_file(each.of(events.JobFinished)[0].artifact_path) for each in (run, quiet))
    assert all((one[name] == other[name]).all() for name in other)


def test_digits_without_faults(run_of: Callable[..., Run]) -> None:
    plan = plan_of((5, 10), 2, num_micro_batches=3, micro_batch_size=10)
    run = run_of(job_of("functions_digits", plan, global_batch_size=60, num_epochs=2), service=service_of(120.0))
    run.start()
    run.follow()
    check_equal(run, "functions_digits")
    status = run.status()
    assert status.num_replaced == status.num_redone_steps == 0
    report(run)


def test_digits_with_short_lives_and_one_in_twenty_killed(run_of: Callable[..., Run]) -> None:
    plan = plan_of((5, 10), num_micro_batches=3, micro_batch_size=20)
    job = job_of("functions_digits", plan, global_batch_size=60, num_epochs=4)
    faults = EmulatorFaults(seed=KILLING_SEED, kill_fraction=0.05, kill_within_s=20.0)
    # A small share of a core for each function, so that steps take what they take however many cores there are.
    run = run_of(job, service=service_of(30.0), faults=faults, cpu_fraction=0.2)
    run.start()
    run.follow(limit_s=400.0)
    check_equal(run, "functions_digits")
    quiet = run_of(job, folder="quiet", service=service_of(900.0), cpu_fraction=1.0)
    quiet.start()
    quiet.follow(limit_s=400.0)
    check_nothing_shows(run, quiet)
    assert num_killed(run) >= 1
    assert run.status().num_handovers >= 1
    report(run)


def test_a_small_gpt_with_lives_of_a_minute_and_one_in_twenty_killed(run_of: Callable[..., Run]) -> None:
    plan = plan_of((4, 8, 11), num_micro_batches=4, micro_batch_size=16)
    job = job_of("functions_gpt", plan, global_batch_size=64, num_epochs=1)
    faults = EmulatorFaults(seed=KILLING_SEED, kill_fraction=0.05, kill_within_s=40.0)
    run = run_of(job, service=service_of(60.0), faults=faults, cpu_fraction=0.15)
    run.start()
    run.follow(limit_s=400.0)
    check_equal(run, "functions_gpt")
    assert num_killed(run) >= 1
    report(run)


def num_killed(run: Run) -> int:
    """How many functions were killed, those among them who only waited for their turn."""
    return (run.work_dir / "logs" / "job.coordinator.log").read_text().count(" killed")


def report(run: Run) -> None:
    """What was measured, for whoever looks at the output."""
    status = run.status()
    print(
        json.dumps(
            {
                "job": run.job.entrypoint.object_name,
                "seconds": round(run.times[-1], 1),
                "steps": len(run.losses()),
                "step_s": round(status.step_s, 2),
                "replaced": status.num_replaced,
                "handovers": status.num_handovers,
                "redone": status.num_redone_steps,
                "invocations": status.num_invocations,
                "usd": round(status.bill.total_usd, 6),
            }
        )
    )


LARGE = """
import torch
import springtide as st

WIDTH = 3328


def model():
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(16)))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, WIDTH, generator=generator), torch.zeros(16, WIDTH)


large = st.Task(model, data, torch.nn.functional.mse_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""


def test_a_model_larger_than_its_functions_is_trained_on_them(run_of: Callable[..., Run], tmp_path: Path) -> None:
    """709 MB of weights on functions of 1,024 MB, of which torch takes a third: only a stage's own may be in memory."""
    (tmp_path / "large.py").write_text(LARGE)
    plan = plan_of((4, 8, 12, 16), num_micro_batches=2)
    job = job_of("digits", plan, global_batch_size=8, num_epochs=1)
    job = msgspec.structs.replace(
        job, entrypoint=Entrypoint(source_path=str(tmp_path / "large.py"), object_name="large")
    )
    run = run_of(job, service=service_of(lifetime_s=120.0, memory_mb=(1024,)))
    run.start()
    run.follow()
    assert run.of(events.JobFinished), (run.of(events.JobFailed), run.events[-3:])
    assert run.of(events.JobFinished)[0].step == 2
    status = run.executor.status(job.job_id)
    assert status is not None
    assert status.num_replaced == 0
    assert all(0 < place.memory_used_bytes < 1024 << 20 for place in status.places)
    assert (
        sum(tensor.numel() for tensor in load_file(run.of(events.JobFinished)[0].artifact_path).values())
        == 16 * 3328**2
    )
