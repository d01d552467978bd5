"""The child process that measures a task's layers: it loads the task, profiles it on one thread, writes the result."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from springtide.runtime.data.shards import seed_everything
from springtide.runtime.models.user_models import explain_missing_framework
from springtide.runtime.process.child_member import run_member
from springtide.runtime.process.child_processes import MemberFiles
from springtide.runtime.process.entry import load_object
from springtide.runtime.profiling.layer_profiling import LayerSpec
from springtide.runtime.profiling.place import BYTES_PER_S, loopback_transfer, machine_memory_mb
from springtide.runtime.profiling.task_profile import TaskProfile
from springtide.runtime.profiling.task_profiler import profile_task, use_one_thread


def run_layer_profile_worker(spec: LayerSpec) -> NoReturn:
    """Measure, write the result and end the process."""
    files = MemberFiles(Path(spec.directory), spec.name)
    run_member(files, lambda: files.finish(_measure(spec, files)), source_path=spec.entrypoint.source_path)


def _measure(spec: LayerSpec, files: MemberFiles) -> TaskProfile:
    seed_everything(spec.seed)
    with explain_missing_framework():
        task = load_object(spec.entrypoint, "springtide_user_layers")
    use_one_thread()
    # CPU time, because other processes may use this machine.
    return profile_task(
        task,
        name=spec.model_name,
        micro_batch_size=spec.micro_batch_size,
        num_rounds=spec.num_rounds,
        memory_mb=machine_memory_mb(),
        bytes_per_s=BYTES_PER_S,
        clock=time.process_time,
        transfer=partial(loopback_transfer, BYTES_PER_S),
        seed=spec.seed,
        params=spec.params,
        largest_micro_batch=spec.largest_micro_batch,
        on_progress=lambda text: files.report_progress(f"profiling {spec.model_name}: {text}"),
    )
