"""`springtide bench interpose`: what the CUDA interposition library adds to a launch, beside the driver alone.

Programs that launch, one for each arm, run side by side against the stub driver of the sources and are asked by turns:
the differences are of turns that followed each other, in the launching thread's own CPU time. The stub stands for a
driver that costs nothing, so that what is added shows; it says nothing of what a launch costs on a device.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec

from springtide.backends.sharing.gpu.build import build_library, find_compiler, find_headers
from springtide.backends.sharing.gpu.library import find_library, preload, sources_directory
from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.core.errors import BackendError
from springtide_studies.interposition.daemon import BenchTenant, RunningDaemon
from springtide_studies.options import seed_option

# Asked for at which name of the driver each path's launches arrive is up to native/bench/interpose.c.
# "shapes" is the legacy path with 256 kernels by turns.
PATHS = ("named", "legacy", "shapes", "ptsz", "ex", "ex_ptsz", "cooperative", "cooperative_ptsz", "graph", "graph_ptsz")
BARE, INERT, LOST, HELD, HELD_OF_TWO = "bare", "inert", "no daemon", "unthrottled", "unthrottled of two"
ARMS: Mapping[str, str] = {
    BARE: "the stub driver alone",
    INERT: "the library, told of no daemon",
    LOST: "the library, whose daemon is not there",
    HELD: "the library, with tokens of a running daemon that grants all it can use",
    HELD_OF_TWO: "the same in a process that sees two devices, where each launch has to ask whose context is current",
}
_HELD = (HELD, HELD_OF_TWO)
# The first device for all but the last arm, which begins with the second one and so is alone there.
_VISIBLE = {HELD_OF_TWO: "1,0"}
NUM_LAUNCHES = 1_000_000
# One turn: long beside the reading of the clock, short beside a time slice of the machine.
LAUNCHES_A_TURN = 5_000
# Launches that only warm the caches after another arm's turn; they are counted like all others.
WARMING_LAUNCHES = 200
MOST_ADDED_NS = 30.0
_NORMAL_95 = 1.96
_STUB_FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread")
_PROGRAM_FLAGS = ("-std=gnu11", "-O2", "-g", "-pthread")


class LaunchTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What the launching program says of one turn; `calls` is how many launches arrived at the driver."""

    path: str
    count: int
    cpu_ns: int
    wall_ns: int
    calls: int | None


class _Ready(msgspec.Struct, frozen=True):
    uuid: str


@dataclass(slots=True)
class KernelLauncher:
    """One running program that launches when it is asked to.

    `num_counted` is what the library counted in shared memory; the few launches before the daemon knew the process,
    which cannot be counted there, are added to it.
    """

    process: subprocess.Popen[bytes]
    uuid: str = ""
    num_asked: int = 0
    num_arrived: int = 0
    num_counted: int = 0
    ns: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, path: str, count: int) -> LaunchTurn:
        """Let it launch `count` times on this path. Raises BackendError if it does not answer."""
        stdin = self.process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{path} {count}\n".encode())
            stdin.flush()
        turn = msgspec.json.decode(self._line(), type=LaunchTurn)
        self.num_asked += count
        self.num_arrived += turn.calls or 0
        return turn

    @property
    def num_held(self) -> int:
        """How many launches the daemon should have seen counted."""
        return self.num_arrived - self.num_counted

    def begin(self) -> None:
        """Wait until it is ready to be asked."""
        self.uuid = msgspec.json.decode(self._line(), type=_Ready).uuid

    def end(self) -> None:
        """Let it end."""
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise BackendError(f"the program that launches ended with code {code}; what it said stands above")
        return line


def run_interpose_bench(*, num_launches: int, seed: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure and return {"bench", "machine", "arms", "counts", "rows", "criterion", "passed"}.

    Every path is launched `num_launches` times in every arm. `seed` chooses which arm begins. Raises BackendError where
    there is no compiler, no cuda.h or no source of the stub driver.
    """
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="springtide-interpose-") as text:
        folder = Path(text)
        tell("compiling the stub driver and the program that launches ...")
        program, stub = _build(folder)
        library = find_library()
        with RunningDaemon(folder) as daemon, _launchers(program, stub, library, daemon) as launchers:
            daemon.grant({arm: BenchTenant(launchers[arm].process.pid, launchers[arm].uuid) for arm in _HELD})
            for arm in _HELD:
                _wait_until_held(daemon, arm, launchers[arm])
            tell(f"{num_launches:,} launches on each of {len(PATHS)} paths in each of {len(ARMS)} arms ...")
            _play(launchers, num_launches, seed)
            for arm in _HELD:
                launchers[arm].num_counted += daemon.num_launches(arm, at_least=launchers[arm].num_held)
    machine = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "compiler": _compiler_version(),
        "load_1m_before": round(load_before, 2),
    }
    return make_report(launchers, machine, num_launches)


def make_report(
    launchers: Mapping[str, KernelLauncher], machine: Mapping[str, Any], num_launches: int
) -> dict[str, Any]:
    """From the turns to the verdict."""
    rows = []
    for arm in (*_HELD, INERT, LOST):
        for path in PATHS:
            rows.append(_row(arm, path, launchers[arm].ns[path], launchers[BARE].ns[path]))
    counts = {
        arm: {"asked": launcher.num_asked, "arrived_at_the_driver": launcher.num_arrived}
        for arm, launcher in launchers.items()
    }
    for arm in _HELD:
        counts[arm]["counted_by_the_library"] = launchers[arm].num_counted
    is_exact = all(len(set(numbers.values())) == 1 for numbers in counts.values())
    return {
        "bench": "interpose",
        "machine": dict(machine),
        "arms": dict(ARMS),
        "num_launches": num_launches,
        "launches_a_turn": LAUNCHES_A_TURN,
        "counts": counts,
        "are_counts_exact": is_exact,
        "rows": rows,
        "criterion": (
            f"unthrottled, the library adds at most {MOST_ADDED_NS:g} ns of CPU time to a launch on every path (the "
            "upper end of the 95 % interval of the median over paired turns), and no launch is lost or counted twice: "
            + ("all counts agree" if is_exact else f"THE COUNTS DO NOT AGREE: {counts}")
        ),
        "passed": is_exact and all(row["is_met"] for row in rows if "is_met" in row),
    }


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its distribution-free 95 % interval (by ranks): low, median, high."""
    ordered = sorted(values)
    middle, half = len(ordered) / 2, _NORMAL_95 * len(ordered) ** 0.5 / 2
    low, high = max(0, int(middle - half)), min(len(ordered) - 1, int(middle + half))
    return ordered[low], statistics.median(ordered), ordered[high]


def _row(arm: str, path: str, ours: Sequence[float], bare: Sequence[float]) -> dict[str, Any]:
    low, added, high = median_interval([mine - theirs for mine, theirs in zip(ours, bare, strict=True)])
    row: dict[str, Any] = {
        "case": f"{path}, {arm}",
        "path": path,
        "arm": arm,
        "ours": round(statistics.median(ours), 2),
        "baseline": round(statistics.median(bare), 2),
        "baseline_name": f"{BARE} (stub driver)",
        "ratio": round(statistics.median(ours) / statistics.median(bare), 3),
        "added_ns": round(added, 2),
        "added_ns_interval": [round(low, 2), round(high, 2)],
        "num_turns": len(ours),
        "unit": "ns of CPU a launch",
    }
    if arm in _HELD:
        row |= {"bound": round(statistics.median(bare) + MOST_ADDED_NS, 2), "is_met": high <= MOST_ADDED_NS}
    return row


def _wait_until_held(daemon: RunningDaemon, arm: str, launcher: KernelLauncher) -> None:
    daemon.until(lambda: launcher.ask(PATHS[0], 1).count > 0 and daemon.num_launches(arm) > 0, "no launch is counted")
    launcher.num_counted = launcher.num_arrived - daemon.num_launches(arm)


def _play(launchers: Mapping[str, KernelLauncher], num_launches: int, seed: int) -> None:
    """Measure all arms in turn; each round begins with another arm, so that none always follows the same one."""
    arms = list(launchers)
    for launcher in launchers.values():
        launcher.ns = {path: [] for path in PATHS}
    left, turn = num_launches, seed
    while left > 0:
        count = min(LAUNCHES_A_TURN, left)
        left -= count
        for path in PATHS:
            turn += 1
            first = turn % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                launchers[arm].ask(path, WARMING_LAUNCHES)
                measured = launchers[arm].ask(path, count)
                launchers[arm].ns[path].append(measured.cpu_ns / count)


@contextlib.contextmanager
def _launchers(program: Path, stub: Path, library: Path, daemon: RunningDaemon) -> Iterator[dict[str, KernelLauncher]]:
    clean = {name: value for name, value in os.environ.items() if not re.match(r"STUB_|CUDA_|LD_|SPRINGTIDE_GPU", name)}
    clean |= {"LD_LIBRARY_PATH": str(stub), "STUB_CLOCK": "off"}
    preloaded = {**clean, **preload({}, library)}
    environments = {
        BARE: clean,
        INERT: preloaded,
        LOST: {**preloaded, **daemon.environment(is_there=False)},
        HELD: {**preloaded, **daemon.environment(is_there=True)},
        HELD_OF_TWO: {**preloaded, **daemon.environment(is_there=True)},
    }
    launchers: dict[str, KernelLauncher] = {}
    try:
        for arm, environment in environments.items():
            visible = {"CUDA_VISIBLE_DEVICES": _VISIBLE.get(arm, "0")}
            launchers[arm] = KernelLauncher(
                subprocess.Popen(
                    [str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**environment, **visible}
                )
            )
            launchers[arm].begin()
        yield launchers
    finally:
        for launcher in launchers.values():
            launcher.end()


def _build(folder: Path) -> tuple[Path, Path]:
    """The launching program, and the folder with the stub driver."""
    native = sources_directory()
    sources = [path for path in sorted((native / "stub").glob("stub_*.c")) if path.name != "stub_nvml.c"]
    if not sources or not (native / "bench" / "interpose.c").is_file():
        raise BackendError("the stub driver's sources are not in this installation: measure in a checkout")
    headers = find_headers()
    stub = folder / "stub" / "libcuda.so.1"
    exports = folder / "exports.map"
    exports.write_text("{ global: cu*; stub_*; local: *; };\n", encoding="utf-8")
    build_library(
        stub,
        sources=sources,
        headers=[native / "stub", headers],
        flags=_STUB_FLAGS,
        links=["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", f"-Wl,--version-script={exports}"],
    )
    program = folder / "interpose"
    build_library(
        program, sources=[native / "bench" / "interpose.c"], headers=[headers], flags=_PROGRAM_FLAGS, links=["-ldl"]
    )
    return program, stub.parent


def _compiler_version() -> str:
    said = subprocess.run([str(find_compiler()), "--version"], capture_output=True, text=True, check=False).stdout
    return said.splitlines()[0] if said else "unknown"


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return run_interpose_bench(num_launches=options["launches"], seed=options["seed"], tell=tell)


BENCH = Bench(
    run=_run,
    options=[
        click.Option(
            ["--launches"],
            type=click.IntRange(min=1),
            metavar="N",
            default=NUM_LAUNCHES,
            help=f"On each path. [default: {NUM_LAUNCHES}]",
        ),
        seed_option(),
    ],
)
