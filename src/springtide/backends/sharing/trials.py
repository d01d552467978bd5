"""Trials of a function on shares of a CPU: one process runs it and is limited to one share after another."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from springtide.backends.sharing.fixed_share import FixedShare
from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError, InvalidRequest
from springtide.core.quantities import format_duration
from springtide.runtime.process.child_processes import MemberError, MemberFiles
from springtide.runtime.profiling.share_profiler import MODULE, JsonLines, RunAnswer, RunOrder, ShareSpec, send

DEADLINE_S = 600.0
# Other load on the machine only makes rounds longer, so the fastest of them count: a trial continues until the
# fastest agree this well, or there were enough rounds.
_AGREEMENT_FRACTION = 0.015
_NUM_AGREEING = 3
_MOST_ROUNDS = 16
# A round spans many periods of the mechanism that limits the process.
_WARM_S, _ROUND_S = 0.2, 0.25
# A batch that takes this many times as long as allowed is measured in one round only.
_HOPELESS = 2.0
# The measured process has priority over other programs, up to its share; else their load would be measured.
_WEIGHT = 64.0
_NAME = "profiled"
_LOG_CHARACTERS = 600


class ShareTrials:
    """A context that runs a function on shares of a device of `device_cpus` cores, any number of times.

    Its process is ended at exit, whatever happened. Raises InvalidRequest for errors of the function or its use,
    BackendError if it fails or exceeds the deadline. `spec` is passed without folder, name and pipes.
    """

    def __init__(
        self,
        spec: ShareSpec,
        *,
        device_cpus: float = 1.0,
        deadline_s: float = DEADLINE_S,
        tell: Callable[[str], None] = lambda _: None,
        only: str = "",
    ) -> None:
        self._spec = spec
        self._device_cpus = device_cpus
        self._deadline_s = deadline_s
        self._end_s = math.inf
        self._tell = tell
        self._only = only
        self._stack = contextlib.ExitStack()
        self.num_runs = 0
        self.is_batchable = True
        self.peak_mb = 0

    @property
    def mechanism(self) -> str:
        """The mechanism that limits the process (core/status/shares.py)."""
        return self._held.mechanism

    @property
    def enforced(self) -> str:
        """The mechanism as a sentence."""
        return self._held.enforced

    def __enter__(self) -> ShareTrials:
        """Start the process and wait until it has loaded. Raises BackendError if no mechanism can limit it."""
        try:
            self._start()
            self._held = self._stack.enter_context(
                FixedShare(self._process.pid, 1.0, self._device_cpus, only=self._only, weight=_WEIGHT)
            )
            if self._held.mechanism == "none":
                raise BackendError(
                    "nothing here holds a process to a share of the CPU (no control groups, no signals), so there is "
                    "nothing to be measured; name the share yourself, like --share 0.3..0.6"
                )
            first = self._receive()
        except BaseException:
            self._stack.close()
            raise
        self.is_batchable, self.peak_mb = first.is_batchable, first.peak_mb
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def latency_s(self, batch_size: int, share: float, bound_s: float = math.inf) -> float:
        """The seconds that a batch takes on a share; infinite if there is not enough memory for it.

        A duration far over `bound_s` is measured less precisely.
        """
        self._tell(f"trial {self.num_runs + 1}: batches of {batch_size} on {share:.0%} of {self._device()}")
        means_s, _ = self._measure(batch_size, share, bound_s * _HOPELESS)
        self._tell("    not enough memory for it" if math.isinf(means_s) else f"    {means_s * 1e3:.4g} ms a batch")
        return means_s

    def throughput_per_s(self, share: float) -> float:
        """Samples a second on a share, of a training function."""
        self._tell(f"trial {self.num_runs + 1}: {share:.1%} of {self._device()}")
        mean_s, num_samples = self._measure(1, share, math.inf)
        self._tell(f"    {num_samples / mean_s:,.1f} samples/s")
        return num_samples / mean_s

    def _device(self) -> str:
        return "a core" if self._device_cpus == 1.0 else f"{self._device_cpus:g} cores"

    def _measure(self, batch_size: int, share: float, hopeless_s: float) -> tuple[float, int]:
        """The mean duration of an iteration in the fastest rounds, and the samples of one."""
        self._held.set(share)
        self.num_runs += 1
        means_s: list[float] = []
        warm_s = _WARM_S
        while True:
            send(self._orders_fd, RunOrder(batch_size=batch_size, warm_s=warm_s, measure_s=_ROUND_S))
            answer = self._receive()
            warm_s = 0.0
            self.peak_mb = max(self.peak_mb, answer.peak_mb)
            if answer.is_too_large:
                return math.inf, answer.num_samples
            means_s.append(statistics.fmean(answer.durations_s))
            fastest = sorted(means_s)[:_NUM_AGREEING]
            is_settled = len(fastest) == _NUM_AGREEING and fastest[-1] <= fastest[0] * (1.0 + _AGREEMENT_FRACTION)
            if is_settled or len(means_s) >= _MOST_ROUNDS or fastest[0] > hopeless_s:
                return statistics.fmean(fastest), answer.num_samples

    def _start(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="springtide-shares-", ignore_cleanup_errors=True)
        self._stack.enter_context(folder)
        self._files = MemberFiles(Path(folder.name), _NAME)
        orders_out, orders_in = os.pipe()
        answers_out, answers_in = os.pipe()
        self._orders_fd, self._answers_fd = orders_in, answers_out
        self._answers = JsonLines(answers_out)
        for descriptor in (orders_in, answers_out):
            self._stack.callback(os.close, descriptor)
        try:
            spec = msgspec.structs.replace(
                self._spec, directory=folder.name, name=_NAME, orders_fd=orders_out, answers_fd=answers_in
            )
            spec_path = Path(folder.name) / "spec.json"
            spec_path.write_bytes(msgspec.json.encode(spec))
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "SPRINGTIDE_MEASUREMENT_PARENT": str(os.getpid())}
            with self._files.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(spec_path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=variables,
                    pass_fds=(orders_out, answers_in),
                    start_new_session=True,
                )
        finally:
            os.close(orders_out)
            os.close(answers_in)
        self._stack.callback(self._end)
        self._end_s = time.monotonic() + self._deadline_s

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self) -> RunAnswer:
        left_s = self._end_s - time.monotonic()
        ready, _, _ = select.select([self._answers_fd], [], [], max(0.0, left_s))
        if not ready:
            raise BackendError(
                f"it was not done after {format_duration(self._deadline_s)} and was ended{self._log_tail()}; give it "
                "longer with --limit"
            )
        answer = self._answers.read(RunAnswer)
        if answer is None:
            self._raise()
        assert answer is not None
        return answer

    def _raise(self) -> None:
        """The process is gone: raise the error that says why."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10.0)
        with contextlib.suppress(OSError):
            error = decode_json(self._files.error.read_bytes(), MemberError)
            raise (InvalidRequest if error.is_refused else BackendError)(error.sentence)
        raise BackendError(f"the process that ran it has ended ({self._process.returncode}){self._log_tail()}")

    def _log_tail(self) -> str:
        text = self._files.log.read_text(errors="replace").strip()
        return f"; the end of what it wrote:\n{text[-_LOG_CHARACTERS:]}" if text else ""
