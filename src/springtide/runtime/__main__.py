"""The entry points of the runtime: the commands that start workers, zygotes, probes and profiles."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m springtide.runtime", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    zygote = commands.add_parser("zygote", help="fork warm workers on request")
    zygote.add_argument("--socket", required=True, type=Path)
    worker = commands.add_parser("worker", help="run one worker")
    worker.add_argument("--spec", required=True, type=Path, help="a WorkerSpec as JSON")
    environment = commands.add_parser("environment", help="make a worker's environment, then run the worker in it")
    environment.add_argument("--spec", required=True, type=Path, help="a WorkerSpec as JSON")
    environment.add_argument("--cache", required=True, type=Path, help="the directory of all environments")
    commands.add_parser(
        "pod", help="run as the first process of a worker's container, with the spec in the environment"
    )
    in_pod = commands.add_parser("pod-worker", help="run a container's worker, in the environment that was made for it")
    in_pod.add_argument("--spec", required=True, type=Path, help="a WorkerSpec as JSON")
    hook = commands.add_parser("prestop", help="ask the worker of this container to save and leave, and wait for it")
    hook.add_argument("--grace", type=float, help="seconds to wait at most (the workload's own)")
    probe = commands.add_parser("probe-resize", help="measure the pause of every kind of resize")
    probe.add_argument("--json", action="store_true", help="print the rows as JSON")
    probe.add_argument("--small", action="store_true", help="leave out the large model")
    profile = commands.add_parser("profile", help="run one worker of a profile")
    profile.add_argument("--spec", required=True, type=Path, help="a ProfileSpec as JSON")
    sample = commands.add_parser("sample-communication", help="run one member of a measurement of collectives")
    sample.add_argument("--spec", required=True, type=Path, help="a SampleSpec as JSON")
    conversion = commands.add_parser("convert-checkpoint", help="make a checkpoint a state from which functions start")
    conversion.add_argument("--order", required=True, type=Path, help="a ConversionOrder as JSON")
    layers = commands.add_parser("profile-layers", help="profile the layers of a task, on one thread")
    layers.add_argument("--spec", type=Path, help="a LayerSpec as JSON: run the process that measures")
    layers.add_argument("--source", help="the file that declares an st.Task")
    layers.add_argument("--object", help="its name in the file")
    layers.add_argument("--import-root", default="")
    layers.add_argument("--micro-batch", type=int, default=4)
    layers.add_argument("--out", type=Path, help="where the profile goes")
    return parser


def _read(path: Path, kind: type[T]) -> T:
    # Imported here because the preStop hook needs no decoding and must start fast.
    from springtide.core.decoding import decode_json

    return decode_json(path.read_bytes(), kind)


def main(arguments: list[str]) -> int:
    """Run one entry point and return the process's exit code."""
    options = _parser().parse_args(arguments)
    # Libraries must not start thread pools before the worker sets its number of threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.command == "prestop":
        from springtide.runtime.prestop import run_prestop

        return run_prestop(grace_s=options.grace)
    if options.command == "pod":
        from springtide.runtime.pod import run_pod
        from springtide.runtime.process.exits import exit_now

        exit_now(run_pod())
    if options.command == "pod-worker":
        from springtide.core.wire.workers import WorkerSpec
        from springtide.runtime.pod import run_pod_worker
        from springtide.runtime.process.exits import exit_now

        exit_now(run_pod_worker(_read(options.spec, WorkerSpec)))
    if options.command == "zygote":
        from springtide.runtime.zygote.process import run_zygote

        return run_zygote(options.socket)
    if options.command == "environment":
        from springtide.core.wire.workers import WorkerSpec
        from springtide.runtime.environment import run_in_environment
        from springtide.runtime.process.exits import exit_now

        exit_now(run_in_environment(_read(options.spec, WorkerSpec), options.cache))
    if options.command == "worker":
        from springtide.core.wire.workers import WorkerSpec
        from springtide.runtime.process.exits import exit_now
        from springtide.runtime.worker import main as run_worker

        # Threads of process groups may still run: one that wakes up during interpreter shutdown aborts the process.
        exit_now(run_worker(_read(options.spec, WorkerSpec)))
    if options.command == "profile":
        from springtide.runtime.profiling.step_profiling import ProfileSpec
        from springtide.runtime.profiling.step_worker import run_profile_worker

        run_profile_worker(_read(options.spec, ProfileSpec))
    if options.command == "sample-communication":
        from springtide.runtime.profiling.collective_sampler import SampleSpec
        from springtide.runtime.profiling.collective_worker import run_sample_worker

        run_sample_worker(_read(options.spec, SampleSpec))
    if options.command == "convert-checkpoint":
        from springtide.core.wire.functions import ConversionOrder
        from springtide.runtime.functions.conversion import run_conversion

        return run_conversion(_read(options.order, ConversionOrder))
    if options.command == "profile-layers" and options.spec is not None:
        from springtide.runtime.profiling.layer_profiling import LayerSpec
        from springtide.runtime.profiling.layer_profiling_worker import run_layer_profile_worker

        run_layer_profile_worker(_read(options.spec, LayerSpec))
    if options.command == "profile-layers":
        from springtide.runtime.profiling.layer_profiling import main as profile_layers

        return profile_layers(options)
    from springtide.runtime.profiling.resize_probe import run_probe

    return run_probe(as_json=options.json, with_large=not options.small)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
