"""Several policies at a time, each in a process of its own, which `python -m` of this module starts."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import msgspec

from springtide.core.errors import InvalidRequest, SpringtideError

Progress = Callable[[str, int, int], None]


class StudyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to play: the arguments of `simulate`, as plain values, with one policy.

    With a `study` ("package.module:function") they are those of one of its runs, which bears the policy's name: the
    function is called with them, a `timer` and `on_progress`, and returns the run's figures.
    """

    policy: str
    is_timed: bool
    arguments: dict[str, Any]
    study: str = ""


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process says: how far it is, and in the end its answer or what went wrong."""

    progress: tuple[int, int] | None = None
    answer: dict[str, Any] | None = None
    refusal: str = ""
    failure: str = ""


def play_in_processes(
    policies: Sequence[str],
    arguments: Mapping[str, Any],
    *,
    num_processes: int,
    is_timed: bool,
    on_progress: Progress | None,
    study: str = "",
) -> dict[str, Any]:
    """Play each policy in its own process, so many at a time, and merge the answers.

    `arguments` are those of `simulate`, or with a `study` those of each of its runs by name. A policy that fails does
    not cost the others: its sentence is under `errors`. Raises InvalidRequest if the request itself is wrong.
    """
    lock = threading.Lock()
    processes: list[subprocess.Popen[bytes]] = []

    def tell(policy: str, num_ended: int, num_jobs: int) -> None:
        if on_progress is not None:
            with lock:
                on_progress(policy, num_ended, num_jobs)

    def play_one(policy: str) -> _Line:
        its_own = arguments[policy] if study else arguments
        request = StudyRequest(policy=policy, is_timed=is_timed, arguments=dict(its_own), study=study)
        with subprocess.Popen(
            [sys.executable, "-m", "springtide.simulator.parallel_runs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            with lock:
                processes.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(request))
            process.stdin.close()
            last = _Line(failure="its process ended without an answer")
            for said in process.stdout:
                line = msgspec.json.decode(said, type=_Line)
                if line.progress is None:
                    last = line
                else:
                    tell(policy, *line.progress)
        return last

    with ThreadPoolExecutor(max_workers=num_processes) as pool:
        try:
            lines = list(pool.map(play_one, policies))
        except BaseException:
            # Ctrl-C: the rest is not waited for, neither the running plays nor the queued ones.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            raise
    return _merge(dict(zip(policies, lines, strict=True)))


def _merge(lines: Mapping[str, _Line]) -> dict[str, Any]:
    refusal = next((line.refusal for line in lines.values() if line.refusal), "")
    if refusal:
        raise InvalidRequest(refusal)
    answers = {policy: line.answer for policy, line in lines.items() if line.answer is not None}
    errors = {policy: line.failure for policy, line in lines.items() if line.answer is None}
    if not answers:
        raise SpringtideError("; ".join(f"{policy}: {said}" for policy, said in errors.items()))
    merged = dict(next(iter(answers.values())))
    merged["policies"] = {policy: answer["policies"][policy] for policy, answer in answers.items()}
    if errors:
        merged["errors"] = errors
    return merged


def play_request(data: bytes, out: IO[bytes]) -> None:
    """Play one request and write what is to be said, a line of JSON at a time."""

    def say(line: _Line) -> None:
        out.write(msgspec.json.encode(line) + b"\n")
        out.flush()

    request = msgspec.json.decode(data, type=StudyRequest)
    try:
        answer = _play(request, lambda num_ended, num_jobs: say(_Line(progress=(num_ended, num_jobs))))
    except InvalidRequest as error:
        say(_Line(refusal=str(error)))
    except Exception as error:  # Whatever it is, the other policies are still wanted; the sentence names it.
        where = traceback.extract_tb(error.__traceback__)[-1]
        say(_Line(failure=f"{type(error).__name__}: {error} ({Path(where.filename).name} line {where.lineno})"))
    else:
        say(_Line(answer=answer))


def _play(request: StudyRequest, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    timer = time.process_time if request.is_timed else None
    if request.study:
        module, _, function = request.study.partition(":")
        play_run = getattr(importlib.import_module(module), function)
        figures = play_run(request.arguments, timer=timer, on_progress=on_progress)
        return {"policies": {request.policy: figures}}
    from springtide.simulator.simulate import simulate

    return simulate(
        policies=[request.policy],
        timer=timer,
        on_progress=lambda _, num_ended, num_jobs: on_progress(num_ended, num_jobs),
        **request.arguments,
    )


def main() -> int:
    """Play the request on standard input. When interrupted, or when the reader is gone, exit 130 without a message."""
    try:
        play_request(sys.stdin.buffer.read(), sys.stdout.buffer)
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
