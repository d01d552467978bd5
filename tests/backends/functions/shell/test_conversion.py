"""A job that has moved from machines: its checkpoint becomes a state of functions before anything else begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from springtide.backends.functions.shell import conversion
from springtide.backends.functions.shell.conversion import convert_checkpoint
from springtide.backends.functions.shell.objects import JobObjects
from springtide.core.errors import CheckpointError, Fenced
from springtide.core.functions import FunctionMenu, FunctionOption, FunctionPlan, FunctionStage
from springtide.core.wire.functions import ConversionOrder, ConversionResult, Keys, StageState
from springtide.core.workload import Entrypoint, MachineRun, TrainingJob, WorkloadId
from springtide.storage.fence import Fence
from springtide.storage.stores.open import open_store

PLAN = FunctionPlan(stages=(FunctionStage(first_layer=0, end_layer=4, memory_mb=512),))
MENU = FunctionMenu(service="s", options=(FunctionOption(plan=PLAN, step_s=1.0, step_usd=0.0),))
JOB = TrainingJob(
    job_id=WorkloadId("j"),
    name="j",
    entrypoint=Entrypoint(source_path="j.py"),
    menu=MENU,
    machine_run=MachineRun(step=3, cost_usd=0.1),
)


class Bench:
    """A job's store and directory; `process` stands for the process that converts."""

    def __init__(self, folder: Path) -> None:
        self.objects = JobObjects(open_store(f"file://{folder}/store"), Keys("jobs/j"))
        self.work_dir = folder / "j"
        self.work_dir.mkdir()
        self.orders: list[ConversionOrder] = []
        self.result: ConversionResult | None = ConversionResult(step=3, ids_digest="abc")
        self.exit_code: int | None = 0

    def process(self, order_path: Path, log_path: Path, is_closed: Callable[[], bool]) -> int | None:
        order = msgspec.json.decode(order_path.read_bytes(), type=ConversionOrder)
        self.orders.append(order)
        if self.result is not None:
            Path(order.result_path).write_bytes(msgspec.json.encode(self.result))
        return self.exit_code

    def convert(self, job: TrainingJob = JOB) -> int:
        return convert_checkpoint(job, self.objects, "file:///store", self.work_dir, 7, lambda: False)

    def save(self, step: int) -> None:
        key = self.objects.keys.state(step, 0)
        meta = StageState(
            stage=0, step=step, num_seen=step, key=key, num_bytes=1, sha256="", first_layer=0, end_layer=4
        )
        self.objects.store.put(key, b"x")
        self.objects.store.put(self.objects.keys.state_meta(step, 0), msgspec.json.encode(meta))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(conversion, "_run", made.process)
    return made


def test_the_process_is_told_what_to_convert_and_nothing_of_it_is_left(bench: Bench) -> None:
    assert bench.convert() == 3
    (order,) = bench.orders
    assert (order.prefix, order.num_layers, order.work_dir) == ("jobs/j", 4, str(bench.work_dir))
    assert not list(bench.work_dir.glob("conversion*"))


def test_a_worker_of_the_machines_that_comes_back_is_fenced(bench: Bench) -> None:
    bench.convert()
    with pytest.raises(Fenced), Fence(bench.work_dir).writing(6):
        pass


def test_the_losses_of_machines_come_first_and_those_of_redone_steps_once(bench: Bench) -> None:
    lines = [
        {"generation": 1, "step": 1, "loss": 3.0, "num_samples": 8},
        {"generation": 1, "step": 2, "loss": 2.5, "num_samples": 8},
        {"generation": 2, "step": 2, "loss": 2.0, "num_samples": 8},
        {"generation": 2, "step": 3, "loss": float("nan"), "num_samples": 4},
        {"generation": 2, "step": 4, "loss": 1.0, "num_samples": 8},
    ]
    (bench.work_dir / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bench.convert()
    told = [json.loads(line) for line in (bench.work_dir / "losses.jsonl").read_text().splitlines()]
    assert told == [[1, 3.0, 8], [2, 2.0, 8], [3, None, 4]]


@pytest.mark.parametrize("step", [3, 5])
def test_a_state_that_is_there_is_not_made_again(bench: Bench, step: int) -> None:
    bench.save(step)
    (bench.work_dir / "losses.jsonl").write_text("[5, 1.0, 8]\n")
    assert bench.convert() == 0
    assert not bench.orders
    assert (bench.work_dir / "losses.jsonl").read_text() == "[5, 1.0, 8]\n"


def test_the_losses_come_first_also_where_the_process_outlived_its_control_plane(bench: Bench) -> None:
    bench.save(3)
    (bench.work_dir / "conversion.result.json").write_text("{}")
    (bench.work_dir / "steps.jsonl").write_text('{"generation": 1, "step": 1, "loss": 3.0, "num_samples": 8}\n')
    assert bench.convert() == 0
    assert not bench.orders
    assert (bench.work_dir / "losses.jsonl").read_text() == "[1, 3.0, 8]\n"
    assert not list(bench.work_dir.glob("conversion*"))


def test_a_state_of_an_earlier_move_is_not_enough(bench: Bench) -> None:
    bench.save(2)
    assert bench.convert() == 3


def test_a_job_that_was_never_on_machines_or_has_no_step_needs_none(bench: Bench) -> None:
    for run in (None, MachineRun(step=0, cost_usd=0.0)):
        assert bench.convert(msgspec.structs.replace(JOB, machine_run=run)) == 0
    assert not bench.orders


def test_what_is_wrong_with_the_checkpoint_is_told(bench: Bench) -> None:
    bench.result, bench.exit_code = ConversionResult(error="it is of another model"), 1
    with pytest.raises(CheckpointError, match=r"^it is of another model$"):
        bench.convert()
    assert not (bench.work_dir / "losses.jsonl").exists()


def test_a_process_that_is_killed_is_told(bench: Bench) -> None:
    bench.result, bench.exit_code = None, -9
    with pytest.raises(CheckpointError, match="the process that converts its checkpoint was killed by SIGKILL"):
        bench.convert()


def test_a_platform_that_ends_meanwhile_has_converted_nothing(bench: Bench) -> None:
    bench.result, bench.exit_code = None, None
    assert bench.convert() == 0


@pytest.mark.slow
def test_the_process_is_the_runtime_s_own_and_says_what_it_lacks(tmp_path: Path) -> None:
    made = Bench(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint can be read: there is none"):
        made.convert()
    assert "CheckpointError" in (made.work_dir / "logs" / "j.conversion.log").read_text()
