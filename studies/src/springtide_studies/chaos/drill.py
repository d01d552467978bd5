"""One run: a platform comes up, works undisturbed, then under faults, and everything that was promised is checked."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from springtide.client.api import Client
from springtide.client.sources.source import SourceFile
from springtide.control.losses import CRASH_WINDOW_S
from springtide.core.errors import BackendError, InvalidRequest, SpringtideError
from springtide.core.workload import JobState
from springtide_studies.chaos import checks
from springtide_studies.chaos.faults import FAULTS, SERVICE, ChaosFault
from springtide_studies.chaos.load import BATCH, ECHO, EPOCHS, NUM_SAMPLES, ChaosJob, ChaosLoad, draw_job, submit
from springtide_studies.chaos.platform import (
    CGROUPS,
    STATE_BYTES,
    ChaosPlatform,
    adopt_orphans,
    enter_namespaces,
    free_folder,
    mount,
    unmount,
)

Tell = Callable[[str], None]
# So long after a fault everything must go on. It takes a second or two, but other work may keep the machine busy.
RECOVERY_LIMIT_S = 120.0
_END_LIMIT_S = 300.0
_LONGEST_PAUSE_S = 2.0
_LOOK_S = 0.05
_MOST_AT_REPLICAS = 3
AT_REPLICAS = ("replica killed", "replica stopped")


class ChaosOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: for how long, from which seed, under which policy, with which kinds of faults (all if empty)."""

    minutes: float
    seed: int
    policy: str = "springtide"
    only: tuple[str, ...] = ()
    state_dir: str = ""

    @property
    def command(self) -> str:
        """The command that draws the same faults and the same jobs again."""
        only = "".join(f" --only '{kind}'" for kind in self.only)
        policy = "" if self.policy == "springtide" else f" --policy {self.policy}"
        return f"springtide chaos --minutes {self.minutes:g} --seed {self.seed}{policy}{only}"


class FaultTimes(msgspec.Struct, kw_only=True):
    """One kind of fault in a run: how often, what it hit last, the longest recovery, and what went wrong after it."""

    kind: str
    num_times: int = 0
    seen: str = ""
    num_lost: int = 0
    longest_recovery_s: float = 0.0
    violations: list[str] = []


class ChaosReport(msgspec.Struct, kw_only=True):
    """The answer of a run. `violations` are all of them, those of `faults` too; `skipped` says why a kind could not be.

    `lost` counts requests whose answer a death of the control plane took along or made impossible meanwhile.
    `first` and `last` are figures of the control plane at rest, before the first fault and after the last.
    """

    seed: int
    minutes: float
    policy: str
    command: str
    passed: bool = False
    faults: list[FaultTimes] = []
    skipped: dict[str, str] = {}
    jobs: dict[str, int] = {}
    requests: dict[str, int] = {}
    num_control_planes: int = 0
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    violations: list[str] = []
    kept: str = ""


def run_chaos(given: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Run what the command line asks for and return the report as plain data. Raises SpringtideError.

    This process changes for good: it gets namespaces of its own where it may, and adopts orphans.
    """
    options = msgspec.convert(given, ChaosOptions)
    unknown = [kind for kind in options.only if kind not in FAULTS]
    if unknown:
        raise InvalidRequest(f"there is no fault {unknown[0]!r}; known are {', '.join(FAULTS)}")
    # As at Ctrl-C: the platform that was started must end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    why_not = enter_namespaces()
    adopt_orphans()
    with _state_folder(options.state_dir, is_mounted=not why_not) as folder:
        platform = ChaosPlatform(folder / "state", options.policy)
        run = ChaosRun(options, platform, _skipped(options.only, why_not), tell)
        try:
            run.play()
        finally:
            platform.kill_all()
        if run.report.violations and not options.state_dir:
            run.report.kept = tempfile.mkdtemp(prefix="springtide-chaos-kept-")
        if run.report.violations or options.state_dir:
            run.report.kept = run.report.kept or str(Path(options.state_dir).absolute())
            shutil.copytree(folder, run.report.kept, ignore=shutil.ignore_patterns("*.sock"), dirs_exist_ok=True)
    report: dict[str, Any] = msgspec.to_builtins(run.report)
    return report


@contextlib.contextmanager
def _state_folder(asked: str, *, is_mounted: bool) -> Iterator[Path]:
    """A folder for the run, on a disk of its own where that may be mounted."""
    if asked:
        free_folder(Path(asked))
    with tempfile.TemporaryDirectory(prefix="springtide-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if is_mounted:
            folder = folder / "disk"
            folder.mkdir()
            mount("springtide-chaos", folder, "tmpfs", options=f"size={STATE_BYTES},mode=700")
        try:
            yield folder
        finally:
            if is_mounted:
                unmount(folder)


def _skipped(only: Sequence[str], no_namespaces: str) -> dict[str, str]:
    """The kinds of faults that cannot be injected here, and why."""
    no_cgroups = (
        "" if os.access(CGROUPS, os.W_OK) else "needs the right to make groups of cgroup v1's memory controller"
    )
    why = {"": "", "namespaces": no_namespaces, "cgroups": no_cgroups}
    kinds = {kind: why[fault.needs] for kind, fault in FAULTS.items() if not only or kind in only}
    return {kind: sentence for kind, sentence in kinds.items() if sentence}


class ChaosRun:
    """A platform, its load and the faults, from up to down."""

    def __init__(self, options: ChaosOptions, platform: ChaosPlatform, skipped: dict[str, str], tell: Tell) -> None:
        self.options = options
        self.platform = platform
        self.tell = tell
        self.rng = random.Random(options.seed)
        self.load = ChaosLoad(connect=platform.connect, rng=random.Random(options.seed + 1))
        self.report = ChaosReport(
            seed=options.seed,
            minutes=options.minutes,
            policy=options.policy,
            command=options.command,
            skipped=skipped,
            faults=[FaultTimes(kind=k) for k in FAULTS if k not in skipped and k in (options.only or FAULTS)],
        )
        self._digests: dict[int, str] = {}
        self._references: list[ChaosJob] = []
        self._price = 0.0
        self._windows: list[tuple[float, float, FaultTimes]] = []

    def play(self) -> None:
        """The whole run; what it finds is in the report."""
        report = self.report
        if not report.faults:
            raise BackendError("none of these faults can be injected here: " + "; ".join(report.skipped.values()))
        self.tell(f"seed {report.seed}: a platform of its own comes up and does the work undisturbed first ...")
        self.platform.up()
        with self.platform.connect() as client:
            self._work_undisturbed(client)
            report.first = self.platform.figures()
            self.load.start()
            began = time.monotonic()
            try:
                self._inject(client)
            except KeyboardInterrupt:
                # The work is still judged; a second interrupt ends everything at once.
                report.minutes = round((time.monotonic() - began) / 60.0, 2)
                self.tell(f"interrupted after {report.minutes:g} minutes of faults")
            self.tell("no more faults; waiting for the jobs to end ...")
            if not self.load.close(_END_LIMIT_S):
                waiting = [job.name for job in self.load.jobs if not job.has_ended]
                report.violations.append(f"{', '.join(waiting)} have not ended {_END_LIMIT_S:g} s after the last fault")
            with contextlib.suppress(SpringtideError):
                client.remove_service(SERVICE)
                self._wait(lambda: not self.platform.workers(), RECOVERY_LIMIT_S)
            report.last = self.platform.figures()
        self._judge()

    def _work_undisturbed(self, client: Client) -> None:
        """One job of each length, whose artifacts are what all others must equal; the service; figures at rest."""
        echo = SourceFile(filename="echo.py", text=ECHO, object_name="Echo", kind="class")
        client.deploy_service(SERVICE, echo, {"min_replicas": 2, "max_replicas": 2})
        for num_epochs in EPOCHS:
            job = draw_job(0, random.Random(0))
            job.name, job.asks = f"undisturbed-{num_epochs}", []
            job.options |= {"num_epochs": num_epochs, "max_workers": 1, "min_workers": 1, "params": {"shard_s": "0"}}
            submit(client, job)
            self._references.append(job)
            if not self._wait(lambda: JobState(client.job(job.job_id).state).is_terminal, RECOVERY_LIMIT_S):  # noqa: B023
                raise BackendError(f"{job.name} did not end although nothing disturbed it")
            self._digests[num_epochs] = checks.artifact_digest(self.platform.state_dir / "workloads" / job.job_id)
        self._price = client.export().usd_per_device_hour
        client.infer(SERVICE, numbers=[1.0], timeout_s=RECOVERY_LIMIT_S)

    # --- faults ------------------------------------------------------------------------------------------------------

    def _inject(self, client: Client) -> None:
        """Every kind once in a drawn order, then all of them again, until the time is over."""
        began = time.monotonic()
        waiting: list[FaultTimes] = []
        while time.monotonic() < began + self.options.minutes * 60.0:
            if not waiting:
                waiting = self.rng.sample(self.report.faults, len(self.report.faults))
            times = waiting.pop()
            # Everything that a fault needs is drawn before anything happens, so that the sequence is the seed's.
            pause_s, own = self.rng.uniform(0.1, _LONGEST_PAUSE_S), random.Random(self.rng.random())
            time.sleep(pause_s)
            at = time.monotonic()
            if times.kind in AT_REPLICAS and self._num_at_replicas(at) >= _MOST_AT_REPLICAS:
                continue
            try:
                hit = FAULTS[times.kind].inject(self.platform, own)
            except OSError as error:
                # Mostly a process that ended just then.
                self.tell(f"{at - began:6.1f} s  {times.kind}: could not be injected: {error}")
                continue
            if not hit:
                continue
            times.num_times, times.seen = times.num_times + 1, hit
            lifted = time.monotonic()
            missing = self._recover(client, lifted)
            recovery_s = time.monotonic() - lifted
            self._windows.append((at, time.monotonic(), times))
            times.longest_recovery_s = max(times.longest_recovery_s, recovery_s)
            self.tell(f"{at - began:6.1f} s  {times.kind}: {hit}; went on after {recovery_s:.1f} s")
            if missing:
                self._complain(times, f"{RECOVERY_LIMIT_S:g} s after it these had not gone on: {missing}")
            for wrong in self._take_contradictions():
                self._complain(times, wrong)

    def _num_at_replicas(self, now: float) -> int:
        """How often replicas were hit lately: with each crash the pause before the next start grows."""
        return sum(times.kind in AT_REPLICAS for at, _, times in self._windows if at > now - CRASH_WINDOW_S)

    def _complain(self, times: FaultTimes, sentence: str) -> None:
        self.tell(f"          VIOLATION: {sentence}")
        times.violations.append(sentence)
        self.report.violations.append(f"{times.kind}: {sentence}")

    def _take_contradictions(self) -> list[str]:
        found = []
        while self.load.contradictions:
            found.append(self.load.contradictions.pop(0))
        return found

    def _recover(self, client: Client, lifted: float) -> str:
        """Wait until decisions are made, a request sent after the fault is answered, and every job goes on.

        Returns what did not within RECOVERY_LIMIT_S; "" if all did.
        """
        at_work, steps, missing = self.load.at_work(), dict[str, int](), ["the control plane"]

        def is_over() -> bool:
            self.platform.up()
            trouble = client.status().trouble
            answered = any(r.sent_at > lifted and r.outcome == "answered" for r in self.load.requests[-20:])
            missing[:] = [job.job_id for job in at_work if not job.goes_on(lifted, steps)]
            missing.extend(["answers to requests"] * (not answered) + [f"decisions: {trouble}"] * bool(trouble))
            return not missing

        return "" if self._wait(is_over, RECOVERY_LIMIT_S) else ", ".join(missing)

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            with contextlib.suppress(SpringtideError):
                if condition():
                    return True
            time.sleep(_LOOK_S)
        return False

    # --- the verdict -------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """End the platform and read what it has left."""
        report, state_dir = self.report, self.platform.state_dir
        jobs = [*self._references, *self.load.jobs]
        wrong = [*self._take_contradictions(), *self.platform.stop()]
        wrong += checks.wrong_with_figures(report.first, report.last)
        for job in self.load.jobs:
            state = "" if job.status is None else job.status.state
            report.jobs[state] = report.jobs.get(state, 0) + 1
            is_right = state == JobState.CANCELLED if job.is_cancelled else state == JobState.SUCCEEDED
            if not is_right and not (job.may_be_cancelled and not job.is_cancelled and state == JobState.CANCELLED):
                wrong.append(
                    f"{job.name} ({job.job_id}) is {state}: {job.status.reason if job.status else 'never seen'}"
                )
            if state == JobState.SUCCEEDED:
                workload, digest = state_dir / "workloads" / job.job_id, self._digests[job.num_epochs]
                wrong += checks.wrong_with_results(workload, NUM_SAMPLES, BATCH, job.num_epochs, digest)
        journal = state_dir / "journal.db"
        wrong += checks.wrong_with_ends(journal, [job.job_id for job in jobs if job.job_id])
        wrong += checks.wrong_with_replay(journal, self.options.policy, self._price)
        report.violations += wrong
        self._judge_requests()
        report.num_control_planes = len(self.platform.num_control_planes)
        report.passed = not report.violations

    def _judge_requests(self) -> None:
        """No request may be lost but those that a fault that takes the control plane along overlaps."""
        found: dict[str, int] = {}
        for request in self.load.requests:
            self.report.requests[request.outcome] = self.report.requests.get(request.outcome, 0) + 1
            if request.outcome not in ("lost", "wrong"):
                continue
            over = [times for at, until, times in self._windows if request.sent_at <= until and request.ended_at >= at]
            excuses = [times for times in over if FAULTS[times.kind].loses_requests and request.outcome == "lost"]
            if excuses:
                excuses[0].num_lost += 1
                continue
            after = f"{over[0].kind}: " if over else ""
            sentence = f"{after}a request was {request.outcome}: {request.detail}"
            if over and sentence not in found:
                over[0].violations.append(sentence)
            found[sentence] = found.get(sentence, 0) + 1
        self.report.violations += [f"{sentence} ({count} times)" for sentence, count in found.items()]


__all__ = ["ChaosFault", "ChaosOptions", "ChaosReport", "run_chaos"]
