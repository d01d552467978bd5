"""Many traces under many policies, each result kept, so that an interrupted run can go on."""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

import springtide
from springtide.core.errors import InvalidRequest
from springtide.simulator import simulate as figures
from springtide.workloads.cluster import parse_cluster
from springtide_studies.options import folder_of

# The clusters on which the authors ran these traces (figures 6b, 8, 9, 10, 11); the last is a demonstration.
KNOWN_CLUSTERS = MappingProxyType(
    {
        "195job": ("16x8",),
        "elasticVpollux_e": ("16x4",),
        "philly_103959": ("32x8",),
        "cluster10": ("32x8",),
        **{f"cluster{number:02}": ("64x8",) for number in (1, 2, 3, 5, 6)},
        **{f"cluster{number:02}": ("128x8",) for number in (4, 7, 8, 9)},
        "gen_fig9_1000jobs_lam1500": ("8x8", "16x8"),
        "gen_fig10_100jobs_lam1500": ("16x8",),
        **{f"gen_fig11_200jobs_lam900_be0.{tenth}": ("8x8",) for tenth in range(1, 10)},
        "resnet_cifar_trace": ("1x8",),
    }
)
# Modules that show results and do not affect them.
_SHOWS = frozenset({"bench", "report"})
_ROOMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "springtide": ("core", "control", "perf", "scheduling", "simulator", "solvers", "workloads"),
        "springtide_studies": ("adaptive", "jct", "loans", "one_plan", "rivals", "workloads"),
    }
)


class BenchCase(msgspec.Struct, frozen=True, kw_only=True):
    """A trace on a cluster."""

    path: Path
    cluster: str

    @property
    def trace(self) -> str:
        """The trace's name."""
        return self.path.stem

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        nodes, devices_per_node = parse_cluster(self.cluster)
        return nodes * devices_per_node

    @property
    def label(self) -> str:
        """195job on 16x8."""
        return f"{self.trace} on {self.cluster}"


def trace_files(folders: Sequence[Path]) -> list[Path]:
    """The CSV files of the folders; of a folder that has `traces` or `generated` inside, the files of these.

    The smallest comes first, so that results do. Raises InvalidRequest if there is none.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        inside = [folder / name for name in ("traces", "generated") if (folder / name).is_dir()]
        for place in inside or [folder]:
            found |= {path.name: path for path in sorted(place.glob("*.csv")) if path.is_file()}
    if not found:
        names = ", ".join(str(folder) for folder in folders) or "nothing"
        raise InvalidRequest(
            f"no trace in {names}; name a folder of CSV files with --traces DIR or in SPRINGTIDE_TRACES"
        )
    return sorted(found.values(), key=lambda path: (path.stat().st_size, path.name))


def find_cases(files: Iterable[Path], only: Sequence[str] = (), cluster: str | None = None) -> list[BenchCase]:
    """The cases of these traces, or of those named in `only`: on the clusters of their paper, else on `cluster`.

    A trace that no cluster is known for is left out unless it was asked for. Raises InvalidRequest.
    """
    paths = {path.stem: path for path in files}
    missing = [name for name in only if name not in paths]
    if missing:
        raise InvalidRequest(f"there is no trace {missing[0]!r}; there are {', '.join(sorted(paths))}")
    cases = []
    for name, path in paths.items():
        if only and name not in only:
            continue
        clusters = KNOWN_CLUSTERS.get(name, () if cluster is None else (cluster,))
        if not clusters and only:
            raise InvalidRequest(f"the cluster of {name!r} is not known; name one with --cluster NODESxDEVICES")
        cases += [BenchCase(path=path, cluster=shape) for shape in clusters]
    return cases


def source_digest() -> str:
    """A hash of what decides results: the version and the source of every room that does, of product and studies."""
    hashed = hashlib.sha256(springtide.__version__.encode())
    for package, rooms in _ROOMS.items():
        root = Path(str(importlib.import_module(package).__file__)).parent
        for path in sorted(path for room in rooms for path in (root / room).rglob("*.py")):
            if not _SHOWS & {path.stem, path.parent.name}:
                hashed.update(f"{package}/{path.relative_to(root).as_posix()}".encode() + path.read_bytes())
    return hashed.hexdigest()[:16]


class Runs:
    """Runs cases, or takes what a cache folder holds of the same trace, policy, seed and source.

    `timer` counts CPU seconds, `tell` is given a line for each result. Without `cache` nothing is kept. With
    `num_processes` above 1 so many policies play a trace at a time.
    """

    def __init__(
        self,
        *,
        timer: Callable[[], float],
        seed: int = 0,
        overhead: str = "elasticflow",
        profiles: Path | None = None,
        cache: Path | None = None,
        num_processes: int = 1,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.seed = seed
        self.overhead = overhead
        self._timer = timer
        self._profiles = profiles
        self._cache = cache
        self._num_processes = num_processes
        self._tell = tell
        self._digest = source_digest()
        if cache is not None:
            try:
                cache.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidRequest(f"results cannot be kept in {cache}: {error}; name another --cache DIR") from error

    @classmethod
    def of(cls, options: Mapping[str, Any], tell: Callable[[str], None]) -> Runs:
        """As a bench's options say; see `trace_options`."""
        return cls(
            timer=time.process_time,
            seed=options["seed"],
            overhead=options["overhead"],
            profiles=folder_of(options, "profiles"),
            cache=folder_of(options, "cache"),
            num_processes=options["processes"],
            tell=tell,
        )

    def all(self, cases: Sequence[BenchCase], policies: Sequence[str]) -> dict[tuple[BenchCase, str], dict[str, Any]]:
        """The figures of every case under every policy (see `simulate`).

        Where a run failed, its figures have only `error`, the reason; the other runs are not affected.
        """
        found: dict[tuple[BenchCase, str], dict[str, Any]] = {}
        num_all = len(cases) * len(policies)
        for case in cases:
            waiting = []
            for policy in policies:
                kept = self._kept(case, policy)
                if kept is None:
                    waiting.append(policy)
                    continue
                found[case, policy] = kept
                self._tell(f"[{len(found)}/{num_all}] {case.label}, {policy}: {_said(kept)} (kept from an earlier run)")
            size = self._num_processes
            for group in (waiting[start : start + size] for start in range(0, len(waiting), size)):
                for policy, figures_or_error in self._play(case, group).items():
                    found[case, policy] = figures_or_error
                    self._tell(f"[{len(found)}/{num_all}] {case.label}, {policy}: {_said(figures_or_error)}")
        # In the order asked for, whatever was kept or ran first.
        return {(case, policy): found[case, policy] for case in cases for policy in policies}

    def _play(self, case: BenchCase, policies: Sequence[str]) -> dict[str, dict[str, Any]]:
        try:
            answer = figures.simulate(
                str(case.path),
                case.cluster,
                policies,
                overhead=self.overhead,
                seed=self.seed,
                profiles=self._profiles,
                # A promise that is broken is a result here, and the table shows it.
                strict=False,
                timer=self._timer,
                with_series=True,
                num_processes=self._num_processes,
            )
        except InvalidRequest:
            raise
        except Exception as error:
            # With one process there is one policy in the group, so the error is that policy's.
            return {policy: {"error": f"{type(error).__name__}: {error}"} for policy in policies}
        failed = answer.get("errors", {})
        found = {
            policy: {"error": str(failed.get(policy, "no result"))}
            if policy not in answer["policies"]
            else dict(answer["policies"][policy])
            for policy in policies
        }
        for policy, figures_or_error in found.items():
            self._keep(case, policy, figures_or_error)
        return found

    def _kept(self, case: BenchCase, policy: str) -> dict[str, Any] | None:
        place = self._place(case, policy)
        if place is None or not place.is_file():
            return None
        kept: dict[str, Any] = msgspec.json.decode(place.read_bytes(), type=dict[str, Any])
        return kept

    def _keep(self, case: BenchCase, policy: str, found: dict[str, Any]) -> None:
        place = self._place(case, policy)
        if place is not None and "error" not in found:
            part = place.with_suffix(".part")
            part.write_bytes(msgspec.json.encode(found))
            part.replace(place)

    def _place(self, case: BenchCase, policy: str) -> Path | None:
        if self._cache is None:
            return None
        return self._cache / f"{case.trace}-{case.cluster}-{self._key(case, policy)}.json"

    def _key(self, case: BenchCase, policy: str) -> str:
        trace = hashlib.sha256(case.path.read_bytes()).hexdigest()
        said = "|".join((trace, case.cluster, policy, str(self.seed), self.overhead, str(self._profiles), self._digest))
        return f"{policy}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def _said(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    said = f"{found['deadlines_met']:,} of {found['deadline_jobs']:,} deadlines met, "
    said += f"{found['admitted_and_broken']:,} promises broken, " if found["promised"] else ""
    return f"{said}{found['cpu_s'] or 0.0:.1f} CPU s"
