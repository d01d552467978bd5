"""The main function of a worker process: it connects, runs the workload's entrypoint, and reports how that ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from springtide.core.errors import StorageError
from springtide.core.options.library_versions import untested_package
from springtide.core.wire.workers import (
    Failed,
    FenceOrder,
    Finished,
    FormGroup,
    Order,
    Preempt,
    Ready,
    Stop,
    Switched,
    WorkerSpec,
)
from springtide.core.workload import Entrypoint, TrainingJob
from springtide.runtime.adoption import run_adopted
from springtide.runtime.data.batch_loader import is_loader_lost
from springtide.runtime.data.shards import seed_everything
from springtide.runtime.elastic.context import ElasticContext, TrainerArtifacts, publish_result
from springtide.runtime.elastic.trainer import Trainer
from springtide.runtime.libraries.library_cursor import LibraryCursor
from springtide.runtime.libraries.program import CannotBeResized, run_program
from springtide.runtime.process.control_link import ControlLink
from springtide.runtime.process.deferred_compiler import defer_compiler
from springtide.runtime.process.device_seen import device_seen
from springtide.runtime.process.devices import worker_devices
from springtide.runtime.process.entry import add_import_roots, as_function, describe_error, load_object
from springtide.runtime.process.exits import EXIT_CRASHED, EXIT_FENCED, WorkerExit, exit_at, exit_now
from springtide.runtime.process.job_folder import enter_job, hand_in_results
from springtide.runtime.process.memory import keep_freed_memory
from springtide.runtime.process.redaction import redact_output
from springtide.runtime.process.user_environment import set_user_environment
from springtide.runtime.script import ScriptReporter, is_peer_lost, run_script
from springtide.runtime.zygote.libraries import import_libraries


def run_worker(spec: WorkerSpec, libraries: Sequence[tuple[str, str]] = ()) -> int:
    """Run the worker that `spec` describes; returns its exit code: 0 if it finished or left, 1 if user code failed.

    `libraries` are what its program imports that other workers of it may have been forked with.
    """
    torch.set_num_threads(max(1, spec.num_threads))
    defer_compiler()
    os.environ.update(spec.environment)
    try:
        redactor = set_user_environment(spec)
    except StorageError as error:
        link = ControlLink(spec)
        link.start()
        return _fail(spec, link, spec.generation, error)
    if spec.workload.secrets is not None:
        # In a container its supervisor does that.
        redact_output(redactor)
    link = ControlLink(spec, redact=redactor.text)
    entrypoint = spec.workload.entrypoint
    if entrypoint.kind == "class":
        from springtide.runtime.serving.replica import run_replica

        link.start()
        try:
            return run_replica(spec, link)
        finally:
            link.close()
    try:
        if entrypoint.is_plain_script:
            return _run_script_worker(spec, link, entrypoint)
        return _run_trainer(spec, link, entrypoint, libraries)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        link.close()


def _run_trainer(
    spec: WorkerSpec, link: ControlLink, entrypoint: Entrypoint, libraries: Sequence[tuple[str, str]]
) -> int:
    job = spec.workload
    assert isinstance(job, TrainingJob)
    keep_freed_memory()
    devices = worker_devices(spec.device_kind, spec.device_index, spec.num_devices)
    # A library's update is its own, so that a joiner cannot follow it gradient by gradient.
    catchup = os.environ.get("SPRINGTIDE_CATCHUP", "1") != "0" and not entrypoint.has_library_loop
    checks_state = os.environ.get("SPRINGTIDE_DEBUG_STATE", "0") == "1"
    cursor = LibraryCursor(job) if entrypoint.has_library_loop else None
    trainer = Trainer(spec, link, devices[0], catchup=catchup, checks_state=checks_state, library_cursor=cursor)
    _listen(trainer, link, spec)
    context = ElasticContext(
        trainer, TrainerArtifacts(trainer), Path(spec.work_dir), devices, job.params, spec.store_url
    )
    try:
        enter_job(spec)
        if libraries:
            add_import_roots(entrypoint)
            with contextlib.suppress(Exception):
                # Before seeding, because some of them draw random numbers. What fails here fails in the program.
                import_libraries(libraries)
        # Seeded alike on every worker: a first group copies no state, so each must build the same initial model.
        seed_everything(job.seed)
        if entrypoint.library == "springtide":
            run_adopted(context, trainer, entrypoint)
            return _end(trainer, spec)
        if entrypoint.library:
            if told := untested_package(entrypoint.library):
                return _cannot_be_resized(spec, link, told)
            run_program(trainer, entrypoint)
            return _end(trainer, spec)
        function = as_function(load_object(entrypoint, f"springtide_user_{os.getpid()}"))
        link.phases.ended("import")
        seed_everything(job.seed)
        function(context)
        if not context.is_prepared:
            raise RuntimeError("the training function returned without ctx.prepare(); it has trained nothing")
        if trainer.step == 0:
            raise RuntimeError(
                "the training function returned before its first step was complete; loop over all of ctx.batches(...)"
            )
        return _end(trainer, spec)
    except WorkerExit as stop:
        return stop.code
    except CannotBeResized as told:
        return _cannot_be_resized(spec, link, str(told))
    except (Exception, SystemExit) as error:
        # sys.exit() in user code counts as a failure, not as a crash: a restart would end the same way.
        return _fail(spec, link, trainer.membership.generation, error)


def _end(trainer: Trainer, spec: WorkerSpec) -> int:
    """Hand in what the job leaves, and stay until the platform knows."""
    if trainer.rank == 0:
        hand_in_results(spec, trainer.membership.generation, trainer.step)
    return trainer.finish(lambda: publish_result(trainer))


def _listen(trainer: Trainer, link: ControlLink, spec: WorkerSpec) -> None:
    """Begin to take orders for the trainer."""
    membership = trainer.membership

    def handle_order(order: Order) -> None:
        """Called on the control thread, so it must not block."""
        if isinstance(order, FenceOrder):
            exit_now(EXIT_FENCED)
        elif isinstance(order, Stop):
            exit_now(0)
        elif isinstance(order, FormGroup):
            if membership.take_formation(order) is not None and order.forced:
                trainer.abort_receiver()
        elif isinstance(order, Preempt):
            membership.take_preempt(order.generation)
            trainer.abort_receiver()
            exit_at(order.grace_s)

    def leave() -> None:
        if spec.store_url:
            # Only this pod is being removed: the members on other machines train on.
            membership.take_departure()
            trainer.abort_receiver()
        else:
            membership.take_preempt(None)
        exit_at(spec.workload.grace_s)

    link.on_order = handle_order
    link.on_lease_expired = leave
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: leave())
    link.start()


def _fail(spec: WorkerSpec, link: ControlLink, generation: int, error: Exception | SystemExit) -> int:
    if is_loader_lost(error):
        # A crash, of which nothing is reported: another worker takes the place of this one.
        sys.stderr.write(f"springtide: {error}\n")
        return EXIT_CRASHED
    traceback.print_exc()
    sys.stderr.flush()
    sentence = describe_error(error, spec.workload.entrypoint.source_path)
    seq = link.send(Failed(generation=generation or spec.generation, error=sentence))
    link.wait_acknowledged(seq, spec.lease_s)
    return 1


def _cannot_be_resized(spec: WorkerSpec, link: ControlLink, told: str) -> int:
    """Ask for a start of the program as a plain script on one worker; no report is made of a failure of its own."""
    sys.stderr.write(f"springtide: {told}; it runs as a plain script with one worker\n")
    sys.stderr.flush()
    seq = link.send(Failed(generation=spec.generation, error=told, is_fixed_size=True))
    link.wait_acknowledged(seq, spec.lease_s)
    return 1


def _run_script_worker(spec: WorkerSpec, link: ControlLink, entrypoint: Entrypoint) -> int:
    """Run a torchrun script. It cannot be resized in place: a member that must leave or start over exits."""
    formed = threading.Event()
    orders: list[FormGroup] = []

    def handle_order(order: Order) -> None:
        if isinstance(order, FormGroup):
            if spec.replica_id in order.members and not orders:
                orders.append(order)
                formed.set()
        elif isinstance(order, FenceOrder):
            exit_now(EXIT_FENCED)
        elif isinstance(order, Stop | Preempt):
            exit_now(0)

    link.on_order = handle_order
    link.on_lease_expired = lambda: exit_now(1)
    link.update(is_ready=True)
    link.start()
    seen = device_seen(spec.device_kind, spec.num_devices)
    link.send(Ready(phases_s=link.phases.seconds(), device_seen=seen))
    formed.wait()
    order = orders[0]
    generation = order.generation
    link.update(generation=generation)
    link.send(
        Switched(
            generation=generation,
            rank=order.members.index(spec.replica_id),
            world_size=len(order.members),
            step=0,
            pause_s=0.0,
            direction="start",
        )
    )
    reporter = ScriptReporter(link, spec, order)
    try:
        enter_job(spec)
        code = run_script(entrypoint, spec, order, reporter)
        if code:
            raise RuntimeError(f"the script ended with exit code {code}")
        if order.members.index(spec.replica_id) == 0:
            hand_in_results(spec, generation, 0)
    except Exception as error:
        reporter.flush()
        if len(order.members) > 1 and is_peer_lost(error):
            # That rank tells what went wrong, if it was an error of its own. Else the script starts again.
            traceback.print_exc()
            sys.stderr.write("springtide: another rank of this script is gone\n")
            return EXIT_CRASHED
        return _fail(spec, link, generation, error)
    reporter.flush()
    seq = link.send(Finished(generation=generation, step=reporter.step, diverged_at_step=reporter.diverged_at_step))
    link.wait_acknowledged(seq, spec.lease_s)
    return 0


def main(spec: WorkerSpec, libraries: Sequence[tuple[str, str]] = ()) -> int:
    """Run a worker process; every error becomes an exit code."""
    try:
        return run_worker(spec, libraries)
    except Exception:
        traceback.print_exc()
        return 1
