"""One policy plays one workload in a process of its own; the figures that the bench of completion times reports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from springtide.core.decision import Plan, Policy, Snapshot
from springtide.core.errors import InvalidRequest
from springtide.core.workload import JobState
from springtide.scheduling.decisions.cache import DecisionCache
from springtide.scheduling.registry import make_policy
from springtide.simulator.fluid.play import FluidRunResult
from springtide_studies.adaptive.jobs import BatchRule
from springtide_studies.adaptive.play import GoodputSetting, play_workload
from springtide_studies.adaptive.truth import make_truths
from springtide_studies.jct.goodput_optimus import PublishedOptimus
from springtide_studies.workloads.pollux_tables import read_applications

# The policies that choose batch sizes; all others get the requests that were tuned for them, as in the published runs.
ADAPTIVE_POLICIES = frozenset({"springtide", "goodput", "pollux", "sia", "fapes"})


class JctCase(msgspec.Struct, frozen=True, kw_only=True):
    """A workload under a policy, with everything that decides the result."""

    workload: str
    profiles: str
    policy: str
    overhead: str = "pollux"
    length: Literal["known", "unknown"] = "known"
    tables: str = "raw"
    whole_seconds: bool = False

    @property
    def batch(self) -> BatchRule:
        """Whether the policy chooses batch sizes or plays the tuned requests."""
        return "adaptive" if self.policy.partition(":")[0] in ADAPTIVE_POLICIES else "tuned"


class _Timed:
    """A policy whose decisions are timed; of several decisions at one instant the longest counts."""

    def __init__(self, policy: Policy, timer: Callable[[], float]) -> None:
        self._decisions = DecisionCache(policy)
        self._timer = timer
        self.longest_s: dict[float, float] = {}

    def decide(self, snapshot: Snapshot) -> Plan:
        """What the policy says."""
        began_s = self._timer()
        plan = self._decisions.decide(snapshot)
        took_s = self._timer() - began_s
        self.longest_s[snapshot.now_s] = max(took_s, self.longest_s.get(snapshot.now_s, 0.0))
        return plan


def play_case(case: JctCase, timer: Callable[[], float]) -> dict[str, Any]:
    """The figures of one case (see `figures_of_jct`). Raises InvalidRequest on a bad file or policy."""
    truths = make_truths(read_applications(Path(case.profiles)), case.tables)
    policy: Policy = make_policy(case.policy)
    if case.whole_seconds and case.policy == "optimus-oracle":
        # Its published figures need the artifact's own count of steps left.
        policy = PublishedOptimus(truths=truths)
    timed = _Timed(policy, timer)
    setting = GoodputSetting(
        overhead=case.overhead,
        batch=case.batch,
        knows_length=case.length == "known",
        whole_seconds=case.whole_seconds,
    )
    began_s = timer()
    played = play_workload(timed, Path(case.workload), truths, setting)
    return figures_of_jct(played, list(timed.longest_s.values())) | {"cpu_s": timer() - began_s, "batch": case.batch}


def figures_of_jct(played: FluidRunResult, decisions_s: Sequence[float]) -> dict[str, Any]:
    """Completion times in seconds over all jobs, and what they cost; `jobs` has each job's own completion time.

    `queueing` is the time from submission to the first devices. A restart is any change of devices after that.
    """
    runs = list(played.runs.values())
    late = [run.job.job_id for run in runs if run.state is not JobState.SUCCEEDED]
    if late:
        raise AssertionError(f"{len(late)} jobs did not finish, such as {late[0]}")
    times = {str(run.job.job_id): (run.ended_s or 0.0) - run.submitted_s for run in runs}
    waits = np.array([(run.started_s or 0.0) - run.submitted_s for run in runs])
    all_s, milliseconds = np.array(list(times.values())), np.array(decisions_s or [0.0]) * 1000.0
    applications = dict.fromkeys(run.job.family for run in runs)
    return {
        "jct_mean_s": float(all_s.mean()),
        "jct_p50_s": float(np.percentile(all_s, 50)),
        "jct_p95_s": float(np.percentile(all_s, 95)),
        "jct_p99_s": float(np.percentile(all_s, 99)),
        "makespan_s": max(run.ended_s or 0.0 for run in runs),
        "queueing_mean_s": float(waits.mean()),
        "queueing_p95_s": float(np.percentile(waits, 95)),
        "restarts_mean": sum(run.num_restarts for run in runs) / len(runs),
        "restarts_max": max(run.num_restarts for run in runs),
        "gpu_hours": sum(run.device_s for run in runs) / 3600.0,
        "restart_gpu_hours": sum(run.paused_device_s for run in runs) / 3600.0,
        "decisions": len(decisions_s),
        "decision_ms_p50": float(np.percentile(milliseconds, 50)),
        "decision_ms_p90": float(np.percentile(milliseconds, 90)),
        "decision_ms_max": float(milliseconds.max()),
        "jct_mean_s_by_application": {
            name: float(np.mean([times[str(run.job.job_id)] for run in runs if run.job.family == name]))
            for name in sorted(applications)
        },
        "jobs": times,
    }


def play_cases(
    cases: Sequence[JctCase], timer: Callable[[], float] | None, num_processes: int = 1
) -> Iterator[tuple[JctCase, dict[str, Any]]]:
    """The cases with their figures, as they are done; `error` in them says what went wrong with that one.

    With `num_processes` above 1 each is played in a process of its own, so many at a time, and timed there.
    Raises InvalidRequest if a case is wrong in itself.
    """
    if num_processes <= 1 or len(cases) <= 1:
        for case in cases:
            yield case, _checked(_play_or_say(case, timer or (lambda: 0.0)))
        return
    processes: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(num_processes) as pool:
        waiting = {pool.submit(_play_elsewhere, case, processes): case for case in cases}
        try:
            for done in as_completed(waiting):
                yield waiting[done], _checked(done.result())
        except BaseException:
            # Ctrl-C: end the running processes and start no queued one.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            raise


def _play_elsewhere(case: JctCase, processes: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    command = [sys.executable, "-m", "springtide_studies.jct.play"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        processes.append(process)
        said, _ = process.communicate(msgspec.json.encode(case))
    try:
        answer: dict[str, Any] = msgspec.json.decode(said, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"error": f"its process ended with code {process.returncode} and no answer"}
    return answer


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "refusal" in answer:
        raise InvalidRequest(answer["refusal"])
    return answer


def _play_or_say(case: JctCase, timer: Callable[[], float]) -> dict[str, Any]:
    try:
        return play_case(case, timer)
    except InvalidRequest as error:
        return {"refusal": str(error)}
    except Exception as error:  # Any error is reported as a sentence, so that the other cases can go on.
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"error": f"{type(error).__name__}: {error} ({Path(where.filename).name} line {where.lineno})"}


def main() -> int:
    """Play the case on standard input and write its figures."""
    try:
        case = msgspec.json.decode(sys.stdin.buffer.read(), type=JctCase)
        out = os.dup(1)
        # A solver's prints go to standard error: standard output is for the answer only.
        os.dup2(2, 1)
        with os.fdopen(out, "wb") as file:
            file.write(msgspec.json.encode(_play_or_say(case, time.process_time)))
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
