"""How long training pauses when its group changes, measured on real workers, beside the floor measured in the same run.

Expected on two idle cores: a planned switch with catch-up pauses for 1 to 10 ms whatever the model's size, because
the group is connected and the state is delivered while training goes on; without catch-up the pause is that plus
bytes / 1 GB/s (0.5 s for 548 MB); recovery from a kill -9 takes about 100 ms from the order plus, for a large model,
what was computed of the step that is replayed. The floor is one gloo broadcast of the same bytes over as many ranks.
What a joiner still lacks at the switch is no pause of the others but shows in their first common step, which is
measured from commit to commit beside a usual one of the same group.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from springtide.core.errors import BackendError
from springtide.core.wire.workers import (
    Acknowledge,
    ChildExited,
    Failed,
    FormGroup,
    FrameDecoder,
    Hello,
    Order,
    Progress,
    Ready,
    Report,
    Spawned,
    SpawnRequest,
    Switched,
    WorkerSpec,
    ZygoteMessage,
    encode_frame,
)
from springtide.core.workload import Entrypoint, ReplicaId, TrainingJob, WorkloadId
from springtide.storage.fence import Fence

_WAIT_S = 120.0
_PAUSE_LIMIT_S = 0.5
_SYNC_FLOORS, _SYNC_ALLOWANCE_S = 1.5, 0.25
# The part of a switch that does not depend on the step: waking the new group's threads, reading the log's tail.
_FIRST_STEP_LIMIT, _FIRST_STEP_ALLOWANCE_S = 2.0, 0.03
CRITERION = (
    f"Every `ours` is at most its `bound`. A pause: {_PAUSE_LIMIT_S} s; of a large model that is synced at the switch:"
    f" {_SYNC_FLOORS} broadcasts of its bytes and {_SYNC_ALLOWANCE_S} s; after a kill: {_PAUSE_LIMIT_S} s and the usual"
    f" step, because what was computed of the interrupted one is lost. The first step after a planned change, commit to"
    f" commit: {_FIRST_STEP_LIMIT:.0f} usual steps of the same group and {_FIRST_STEP_ALLOWANCE_S} s, and"
    f" {_PAUSE_LIMIT_S} s where state moves in it;"
    " after a kill: those and the interrupted step."
)


class ResizeMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """One measured case; `ratio` is ours / baseline, `bound` the largest value of `ours` that passes."""

    case: str
    ours: float
    baseline: float
    baseline_name: str
    ratio: float
    bound: float
    unit: str = "s"


def probe_model(width: int, num_layers: int) -> Any:
    """`num_layers` square matrices, each applied to a few vectors, so that a step touches all weights cheaply."""
    import torch

    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(num_layers)))


def fit(ctx: Any) -> None:
    """The probe's training function, which the workers run."""
    import torch

    width, num_layers = int(ctx.params["width"]), int(ctx.params["layers"])
    # Data is made before prepare(), because the group waits for a joiner only after it.
    data = torch.randn(4096, width, generator=torch.Generator().manual_seed(0))
    model, _ = ctx.prepare(probe_model(width, num_layers), lambda parameters: torch.optim.SGD(parameters, lr=1e-4))
    for batch in ctx.batches(data):
        ctx.step(model(batch.x).square().mean())


@dataclass(slots=True)
class _Worker:
    connection: socket.socket | None = None
    pid: int = 0
    is_ready: bool = False
    has_exited: bool = False
    step: int = 0


class Driver:
    """A minimal control plane that can resize a job, with one thread; for measurements only."""

    def __init__(self, directory: Path, job: TrainingJob, zygote_path: Path, environment: dict[str, str]) -> None:
        self._directory = directory
        self._job = job
        self._environment = environment
        self._generation = 1
        self.members: tuple[str, ...] = ()
        self._workers: dict[str, _Worker] = {}
        self._switched: dict[tuple[str, int], Switched] = {}
        (directory / "rendezvous").mkdir(parents=True)
        self._address = directory / "control.sock"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._address))
        self._listener.listen()
        self._zygote = socket.socket(socket.AF_UNIX)
        self._zygote.connect(str(zygote_path))
        self._zygote_decoder: FrameDecoder[ZygoteMessage] = FrameDecoder(ZygoteMessage)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._zygote, selectors.EVENT_READ, self._read_zygote)

    def start(self, *names: str) -> None:
        """Fork workers and wait until they are warm."""
        for name in names:
            self._workers[name] = _Worker()
            spec = WorkerSpec(
                workload=self._job,
                replica_id=ReplicaId(name),
                generation=self._generation,
                control_address=f"unix://{self._address}",
                token="",
                work_dir=str(self._directory),
                log_path=str(self._directory / "logs" / f"{name}.log"),
                environment=self._environment,
            )
            self._zygote.sendall(encode_frame(SpawnRequest(spec=spec)))
        self._until(lambda: all(self._workers[name].is_ready for name in names), "ready workers")

    def form(self, *members: str, forced: bool = False) -> float:
        """Change the group, wait until each member has switched, and return rank 0's pause in seconds."""
        previous = self._generation if self.members else 0
        self._generation += 1
        if forced:
            Fence(self._directory).raise_to(self._generation)
        order = FormGroup(
            generation=self._generation,
            members=tuple(ReplicaId(name) for name in members),
            rendezvous=f"file://{self._directory}/rendezvous",
            previous=previous,
            forced=forced,
        )
        recipients = [name for name in dict.fromkeys((*members, *self.members)) if not self._workers[name].has_exited]
        self.members = members
        for name in recipients:
            self._send(self._workers[name], order)
        generation = self._generation
        self._until(lambda: all((name, generation) in self._switched for name in members), "switched workers")
        return self._switched[members[0], generation].pause_s

    def settle(self, num_steps: int) -> tuple[float, float]:
        """Wait for some steps; returns the duration of the group's first step and the median of the following ones."""
        leader = self._workers[self.members[0]]
        first_step = self._switched[self.members[0], self._generation].step
        self._until(lambda: leader.step >= first_step + num_steps, "steps")
        records = [json.loads(line) for line in (self._directory / "steps.jsonl").read_text().splitlines()]
        first, *usual = [record["took_s"] for record in records if record["generation"] == self._generation]
        return first, statistics.median(usual)

    def kill(self, name: str) -> None:
        """Kill a worker, and return when the zygote has reported it."""
        os.kill(self._workers[name].pid, signal.SIGKILL)
        self._until(lambda: self._workers[name].has_exited, "the killed worker's exit")

    def close(self) -> None:
        for worker in self._workers.values():
            if worker.pid and not worker.has_exited:
                with contextlib.suppress(OSError):
                    os.kill(worker.pid, signal.SIGKILL)
        with contextlib.suppress(BackendError):
            self._until(lambda: all(worker.has_exited for worker in self._workers.values()), "ended workers")
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _until(self, is_done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _WAIT_S
        while not is_done():
            if time.monotonic() > deadline_s:
                logs = "".join(path.read_text()[-800:] for path in self._directory.glob("logs/*"))
                raise BackendError(f"waited {_WAIT_S:.0f} s for {what} in vain; {logs}")
            self._turn()

    def answer(self, is_over: Callable[[], bool]) -> None:
        """Go on being a control plane, without which workers end, until `is_over`; on a thread of its own."""
        while not is_over():
            self._turn()

    def _turn(self) -> None:
        for key, _ in self._selector.select(0.05):
            key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        decoder: FrameDecoder[Report] = FrameDecoder(Report)
        names: list[str] = []
        self._selector.register(connection, selectors.EVENT_READ, lambda link: self._read_worker(link, decoder, names))

    def _read_worker(self, link: socket.socket, decoder: FrameDecoder[Report], names: list[str]) -> None:
        try:
            data = link.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(link)
            link.close()
            return
        for report in decoder.feed(data):
            if isinstance(report, Hello):
                names.append(report.replica_id)
                self._workers[report.replica_id].connection = link
            worker = self._workers[names[0]]
            if isinstance(report, Ready):
                worker.is_ready = True
            elif isinstance(report, Progress):
                worker.step = report.step
            elif isinstance(report, Switched):
                self._switched[names[0], report.generation] = report
            elif isinstance(report, Failed):
                raise BackendError(f"the probe's training failed: {report.error}")
            if report.seq:
                self._send(worker, Acknowledge(seq=report.seq))

    def _send(self, worker: _Worker, order: Order) -> None:
        with contextlib.suppress(OSError):
            assert worker.connection is not None
            worker.connection.sendall(encode_frame(order))

    def _read_zygote(self, link: socket.socket) -> None:
        for message in self._zygote_decoder.feed(link.recv(1 << 16)):
            if isinstance(message, Spawned):
                self._workers[message.replica_id].pid = message.pid
            elif isinstance(message, ChildExited):
                self._workers[message.replica_id].has_exited = True


@contextlib.contextmanager
def running_zygote(directory: Path) -> Iterator[Path]:
    """A zygote of its own, for as long as something is measured; yields its socket."""
    path = directory / "zygote.sock"
    process = subprocess.Popen([sys.executable, "-m", "springtide.runtime", "zygote", "--socket", str(path)])
    try:
        deadline_s = time.monotonic() + _WAIT_S
        while not path.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise BackendError("the zygote did not start")
            time.sleep(0.02)
        yield path
    finally:
        process.terminate()
        process.wait()


def measure_broadcast_s(num_bytes: int, world_size: int, repeats: int = 3) -> float:
    """The median time of a gloo broadcast of `num_bytes` among new processes: a lower bound for copying the state."""
    code = (
        "import sys, time, torch; from pathlib import Path; from springtide.runtime.elastic.group import form_group;"
        "d, rank, n, size, repeats = sys.argv[1], *map(int, sys.argv[2:]); torch.set_num_threads(1);"
        "g = form_group('file://' + d, 1, rank, n, torch.device('cpu'), is_wanted=lambda: True); g.timeout_s = 60.0;"
        "t = torch.ones(size // 4); s = torch.zeros(1); a = torch.zeros(n); times = []\n"
        "for _ in range(repeats + 1):\n"
        "    g.all_gather(a, s); began = time.perf_counter(); g.broadcast(t, 0); g.all_gather(a, s)\n"
        "    times.append(time.perf_counter() - began)\n"
        "print(sorted(times[1:])[repeats // 2], flush=True)\n"
        # A thread of the group that wakes up during interpreter shutdown aborts the process.
        "import os; os._exit(0)"
    )
    with tempfile.TemporaryDirectory() as directory:
        arguments = [str(world_size), str(num_bytes), str(repeats)]
        processes = [
            subprocess.Popen([sys.executable, "-c", code, directory, str(rank), *arguments], stdout=subprocess.PIPE)
            for rank in range(world_size)
        ]
        outputs = [process.communicate(timeout=_WAIT_S)[0] for process in processes]
    return float(outputs[0])


@dataclass(frozen=True, slots=True)
class Pause:
    """One change of the group, in seconds: rank 0's pause, the first step after it, and a typical later step."""

    pause_s: float
    first_step_s: float
    usual_step_s: float


@dataclass(frozen=True, slots=True)
class _Model:
    label: str
    width: int
    num_layers: int
    max_workers: int
    num_settle_steps: int

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_layers * self.width * (self.width + 1)


_SMALL = _Model("small model", width=64, num_layers=4, max_workers=4, num_settle_steps=20)
_LARGE = _Model("548 MB model", width=2068, num_layers=32, max_workers=3, num_settle_steps=2)


def measure_pauses(model: _Model, *, catchup: bool, is_short: bool = False) -> dict[str, Pause]:
    """Run one job through grow 1->2, grow 2->max, shrink to 2 (in short runs: to 1), and the kill of one; by case."""
    environment = {"SPRINGTIDE_CATCHUP": str(int(catchup))}
    with tempfile.TemporaryDirectory(prefix="springtide-probe-") as name, running_zygote(Path(name)) as zygote_path:
        job = TrainingJob(
            job_id=WorkloadId("probe"),
            name="probe",
            entrypoint=Entrypoint(source_path=__file__, object_name="fit"),
            global_batch_size=4,
            num_epochs=1_000_000,
            max_workers=model.max_workers,
            num_virtual_shards=4,
            checkpoint_interval_s=1e9,
            params={"width": str(model.width), "layers": str(model.num_layers)},
        )
        driver = Driver(Path(name) / "job", job, zygote_path, environment)
        try:
            pauses: dict[str, Pause] = {}

            def change(case: str, *members: str, forced: bool = False) -> None:
                pause_s = driver.form(*members, forced=forced)
                pauses[case] = Pause(pause_s, *driver.settle(model.num_settle_steps))

            driver.start("a")
            driver.form("a")
            driver.settle(model.num_settle_steps)
            driver.start("b")
            change("grow 1->2", "a", "b")
            if is_short:
                change("shrink 2->1", "a")
                return pauses
            more = [f"c{index}" for index in range(model.max_workers - 2)]
            driver.start(*more)
            change(f"grow 2->{model.max_workers}", "a", "b", *more)
            change(f"shrink {model.max_workers}->2", "a", "b")
            driver.kill("b")
            change("recover 2->1 after kill -9", "a", forced=True)
            return pauses
        finally:
            driver.close()


def _rows(
    model: _Model, case: str, pause: Pause, floor_s: float, size: int, *, catchup: bool
) -> list[ResizeMeasurement]:
    """The two rows of one change of the group."""
    moves_state = case.startswith("grow") and not catchup
    replayed_s = pause.usual_step_s if case.startswith("recover") else 0.0
    pause_bound_s = _PAUSE_LIMIT_S + replayed_s
    if moves_state and model is not _SMALL:
        pause_bound_s = _SYNC_FLOORS * floor_s + _SYNC_ALLOWANCE_S
    first_bound_s = _FIRST_STEP_LIMIT * pause.usual_step_s + _FIRST_STEP_ALLOWANCE_S + replayed_s
    mode = "catch-up" if catchup else "sync at the switch"
    return [
        ResizeMeasurement(
            case=f"{model.label}, {case}, {mode}: pause",
            ours=pause.pause_s,
            baseline=floor_s,
            baseline_name=f"gloo broadcast of {model.num_bytes / 1e6:.1f} MB over {size} ranks",
            ratio=pause.pause_s / floor_s,
            bound=pause_bound_s,
        ),
        ResizeMeasurement(
            case=f"{model.label}, {case}, {mode}: first step, commit to commit",
            ours=pause.first_step_s,
            baseline=pause.usual_step_s,
            baseline_name="a usual step of the same group",
            ratio=pause.first_step_s / pause.usual_step_s,
            bound=first_bound_s + (_PAUSE_LIMIT_S if moves_state or replayed_s else 0.0),
        ),
    ]


def measure_all(*, with_large: bool) -> list[ResizeMeasurement]:
    """All cases, for a small model and (`with_large`) one of 548 MB, with and without catch-up."""
    rows: list[ResizeMeasurement] = []
    for model in (_SMALL, _LARGE) if with_large else (_SMALL,):
        floors = {size: measure_broadcast_s(model.num_bytes, size) for size in (2, model.max_workers)}
        for catchup in (True, False):
            # A large model's steps take seconds, and one grow suffices to measure the sync.
            is_short = model is _LARGE and not catchup
            pauses = measure_pauses(model, catchup=catchup, is_short=is_short)
            for case, pause in pauses.items():
                size = model.max_workers if str(model.max_workers) in case else 2
                rows += _rows(model, case, pause, floors[size], size, catchup=catchup)
    return rows


def run_probe(*, as_json: bool, with_large: bool = True) -> int:
    """Measure and print the rows; returns 0, whether or not they pass."""
    rows = measure_all(with_large=with_large)
    passed = all(row.ours <= row.bound for row in rows)
    machine = {"cpus": os.cpu_count(), "load_1m": os.getloadavg()[0], "machine": platform.machine()}
    if as_json:
        body = {"bench": "resize", "passed": passed, "criterion": CRITERION, "machine": machine}
        body["rows"] = msgspec.to_builtins(rows)
        sys.stdout.write(json.dumps(body) + "\n")
    else:
        for row in rows:
            floor = f"{row.baseline_name} {row.baseline * 1e3:.1f} ms"
            mark = " " if row.ours <= row.bound else "!"
            sys.stdout.write(f"{mark} {row.case:84s} {row.ours * 1e3:9.1f} ms   {floor}\n")
        sys.stdout.write(f"{'passed' if passed else 'NOT passed'}. {CRITERION}\n")
    return 0
