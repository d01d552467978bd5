"""Several policies at a time, each in a process of its own, which `python -m` of this module starts."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest, SpringtideError

Progress = Callable[[str, int, int], None]


class StudyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run that a process of its own plays: `study` ("package.module:function") and its arguments, as plain values.

    The function is called with the name of the policy (or row), the arguments, a `timer` and `on_progress`. It returns
    an answer whose `policies` has the run's figures under that name.
    """

    study: str
    policy: str
    is_timed: bool
    arguments: dict[str, Any]


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a process's output: its progress, or at its end its answer or what went wrong."""

    progress: tuple[int, int] | None = None
    answer: dict[str, Any] | None = None
    refusal: str = ""
    failure: str = ""


def play_in_processes(
    study: str,
    runs: Mapping[str, Mapping[str, Any]],
    *,
    num_processes: int,
    is_timed: bool,
    on_progress: Progress | None,
) -> dict[str, Any]:
    """Play each run in its own process, `num_processes` at a time, and merge the answers.

    `runs` are the arguments of `study` by the name of the policy (or row); see `StudyRequest`. If one fails, the others
    still answer, and its sentence is under `errors`. Raises InvalidRequest if the request itself is wrong.
    """
    lock = threading.Lock()
    processes: list[subprocess.Popen[bytes]] = []

    def report(policy: str, num_ended: int, num_jobs: int) -> None:
        if on_progress is not None:
            with lock:
                on_progress(policy, num_ended, num_jobs)

    def play_one(policy: str) -> _Line:
        request = StudyRequest(study=study, policy=policy, is_timed=is_timed, arguments=dict(runs[policy]))
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
            for output in process.stdout:
                line = decode_json(output, _Line)
                if line.progress is None:
                    last = line
                else:
                    report(policy, *line.progress)
        return last

    with ThreadPoolExecutor(max_workers=num_processes) as pool:
        try:
            lines = list(pool.map(play_one, runs))
        except BaseException:
            # Ctrl-C: end the running processes and start no queued one.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            raise
    return _merge(dict(zip(runs, lines, strict=True)))


def _merge(lines: Mapping[str, _Line]) -> dict[str, Any]:
    refusal = next((line.refusal for line in lines.values() if line.refusal), "")
    if refusal:
        raise InvalidRequest(refusal)
    answers = {policy: line.answer for policy, line in lines.items() if line.answer is not None}
    errors = {policy: line.failure for policy, line in lines.items() if line.answer is None}
    if not answers:
        raise SpringtideError("; ".join(f"{policy}: {failure}" for policy, failure in errors.items()))
    merged = dict(next(iter(answers.values())))
    merged["policies"] = {policy: answer["policies"][policy] for policy, answer in answers.items()}
    if errors:
        merged["errors"] = errors
    return merged


def play_request(data: bytes, out: IO[bytes]) -> None:
    """Play one request and write progress and answer to `out`, one line of JSON each."""

    def write(line: _Line) -> None:
        out.write(msgspec.json.encode(line) + b"\n")
        out.flush()

    request = decode_json(data, StudyRequest)
    try:
        answer = _play(request, lambda num_ended, num_jobs: write(_Line(progress=(num_ended, num_jobs))))
    except InvalidRequest as error:
        write(_Line(refusal=str(error)))
    except Exception as error:  # Any error is reported as a sentence, so that the other policies can go on.
        where = traceback.extract_tb(error.__traceback__)[-1]
        write(_Line(failure=f"{type(error).__name__}: {error} ({Path(where.filename).name} line {where.lineno})"))
    else:
        write(_Line(answer=answer))


def _play(request: StudyRequest, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    module, _, function = request.study.partition(":")
    play_run: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), function)
    timer = time.process_time if request.is_timed else None
    return play_run(request.policy, request.arguments, timer=timer, on_progress=on_progress)


def main() -> int:
    """Play the request on standard input. When interrupted, or when the reader is gone, exit 130 without a message."""
    try:
        play_request(sys.stdin.buffer.read(), sys.stdout.buffer)
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
