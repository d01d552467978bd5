"""The start of a job that has moved from machines: a process makes its checkpoint a state from which functions start.

Only a process with torch can read a checkpoint, and building the user's model runs their code, so both happen in one of
their own, as workers on this machine do. What it writes follows from the checkpoint alone: done twice it is the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from springtide.backends.functions.shell.notes import LOSSES_FILE, log_name
from springtide.backends.functions.shell.objects import JobObjects
from springtide.backends.processes import describe_exit, worker_environment
from springtide.core.decoding import decode_json
from springtide.core.errors import CheckpointError, StorageError
from springtide.core.wire.functions import ConversionOrder, ConversionResult
from springtide.core.workload import TrainingJob
from springtide.storage.fence import Fence
from springtide.storage.files import make_private, open_private, write_durable
from springtide.storage.step_lines import is_gap, whole_lines

# How long a conversion may take: it imports torch, builds the model, and reads and writes its whole state.
CONVERSION_S = 900.0
_POLL_S = 0.05
_STEPS_FILE = "steps.jsonl"
# In the job's directory while the process runs: what it is to do, and what it has done.
_ORDER, _RESULT = "conversion.json", "conversion.result.json"


def convert_checkpoint(
    job: TrainingJob,
    objects: JobObjects,
    store_url: str,
    work_dir: Path,
    generation: int,
    is_closed: Callable[[], bool],
) -> int:
    """Make the state of functions that `job` starts from; returns its step. 0: there is one, or none is needed.

    The job and its code are in the store already. From now on no worker on machines of an earlier generation writes
    into `work_dir`. The losses of the steps on machines precede those on functions. Raises CheckpointError if functions
    cannot start from the checkpoint, and StorageError. Once `is_closed`, the process is ended, and 0 is returned.
    """
    run, menu = job.machine_run, job.menu
    if run is None or menu is None or run.step == 0:
        return 0
    num_layers = menu.options[menu.recommended].plan.stages[-1].end_layer
    found = objects.find_states(num_layers).step
    step = 0
    try:
        if found < run.step:
            Fence(work_dir).raise_to(generation)
            step = found = _convert(job, objects, store_url, work_dir, num_layers, is_closed)
        # Also if the process has ended after the control plane that had started it.
        if found and not (work_dir / LOSSES_FILE).exists():
            _begin_losses(work_dir, found)
    except OSError as error:
        raise StorageError(f"a checkpoint of machines could not be converted: {error}") from error
    finally:
        for name in (_ORDER, _RESULT):
            with contextlib.suppress(OSError):
                (work_dir / name).unlink(missing_ok=True)
    return step


def _convert(
    job: TrainingJob,
    objects: JobObjects,
    store_url: str,
    work_dir: Path,
    num_layers: int,
    is_closed: Callable[[], bool],
) -> int:
    """Have a process convert the checkpoint; the step of the state, 0 if the platform ends. Raises CheckpointError."""
    order_path, result_path = work_dir / _ORDER, work_dir / _RESULT
    log_path = work_dir / log_name(str(job.job_id), "conversion")
    order = ConversionOrder(
        store_url=store_url,
        prefix=objects.keys.prefix,
        work_dir=str(work_dir),
        num_layers=num_layers,
        result_path=str(result_path),
    )
    result_path.unlink(missing_ok=True)
    write_durable(order_path, msgspec.json.encode(order), mode=0o600)
    exit_code = _run(order_path, log_path, is_closed)
    if exit_code is None:
        return 0
    result = _result(result_path, exit_code, log_path)
    if result.error:
        raise CheckpointError(result.error)
    return result.step


def _run(order_path: Path, log_path: Path, is_closed: Callable[[], bool]) -> int | None:
    """Run the process; its exit code, or None if it was ended because the platform ends."""
    make_private(log_path.parent)
    command = [sys.executable, "-m", "springtide.runtime", "convert-checkpoint", "--order", str(order_path)]
    environment = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), **worker_environment()}
    with open_private(log_path, "ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    end_s = time.monotonic() + CONVERSION_S
    try:
        while (exit_code := process.poll()) is None:
            if is_closed():
                return None
            if time.monotonic() > end_s:
                raise CheckpointError(f"its checkpoint could not be converted within {CONVERSION_S:.0f} s")
            time.sleep(_POLL_S)
        return exit_code
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _result(path: Path, exit_code: int, log_path: Path) -> ConversionResult:
    """What the process has written. Raises CheckpointError if it has died before."""
    try:
        return decode_json(path.read_bytes(), ConversionResult)
    except FileNotFoundError:
        told = describe_exit(exit_code, log_path).removeprefix("the worker ")
        raise CheckpointError(f"the process that converts its checkpoint {told}") from None
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"the process that converts its checkpoint has written another result: {error}") from None


def _begin_losses(work_dir: Path, last_step: int) -> None:
    """Let the losses of the job begin with those of the steps on machines, as their log has them."""
    path = work_dir / LOSSES_FILE
    try:
        data = (work_dir / _STEPS_FILE).read_bytes()
    except FileNotFoundError:
        return
    told: dict[int, str] = {}
    for step, line in whole_lines(data):
        record = json.loads(line)
        if step <= last_step and not is_gap(record):
            # Of a step that was done again after a restart, the last line counts. NaN is not JSON.
            loss = record.get("loss")
            is_finite = isinstance(loss, int | float) and abs(loss) < float("inf")
            told[step] = json.dumps([step, loss if is_finite else None, record.get("num_samples", 0)])
    write_durable(path, "".join(f"{told[step]}\n" for step in sorted(told)).encode(), mode=0o600)
