"""How far the performance model of a pipeline is off: plans predicted, then run on emulated functions by boto3 calls.

python benchmarks/pipeline_prediction.py [--json] [--cases 1x1,2x1,...] [--store file|shm]

Profiles are taken on the functions themselves, one for each memory size (FuncPipe, appendix E), and besides scaled from
one core of this machine. Functions get a part of a core, so that all of them together do not need more than there is.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from springtide.backends.functions.emulator.config import EmulatorConfig
from springtide.backends.functions.emulator.launch import ensure_emulator, stop_emulator
from springtide.backends.functions.provider import FunctionProvider, InvocationEnd
from springtide.backends.functions.providers.aws import emulator_provider
from springtide.core.errors import BackendError, ObjectMissing
from springtide.core.functions import FunctionPlan, FunctionService, FunctionStage, ModelProfile
from springtide.core.ports import Store
from springtide.core.wire.functions import ControlRecord, FunctionOrder, FunctionReport, Keys, Place, ProfileOrder
from springtide.core.workload import Entrypoint, TrainingJob, WorkloadId
from springtide.perf.functions.pipeline.step_time import estimate_step
from springtide.perf.functions.scale import scaled_profile
from springtide.perf.functions.services import emulator
from springtide.runtime.profiling.layer_profiling import profile_source_layers
from springtide.storage.bundles import pack
from springtide.storage.stores.open import open_store

SOURCE = Path(__file__).with_name("prediction_task.py")
MEMORY_MB = (1024, 1769)
BYTES_PER_S, LATENCY_S = 4e6, 0.02
CPU_FRACTION = 0.25
MICRO_BATCH, BATCH, NUM_LAYERS = 4, 16, 8
# Stages x replicas, and the memory of each stage: small ones, or all large ("l"), or small and large by turns ("m").
CASES = ("1x1", "2x1", "4x1", "1x2", "2x2", "2x1m", "4x1m")
NUM_WARM_UP = 2
RUN_LIMIT_S = 400.0
JOB = WorkloadId("prediction")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One plan as predicted from two profiles and as it ran: the median of its steps, in seconds."""

    case: str
    predicted_s: float
    scaled_s: float
    measured_s: float
    num_steps: int
    slowest_s: float
    fastest_s: float

    @property
    def error_fraction(self) -> float:
        """|predicted - measured| / measured, with profiles taken on functions."""
        return abs(self.predicted_s / self.measured_s - 1.0)


def plan_of(case: str) -> FunctionPlan:
    """The plan of that name: equal stages."""
    num_stages, num_replicas = (int(part) for part in case.rstrip("ml").split("x"))
    sizes = {"m": MEMORY_MB, "l": MEMORY_MB[1:]}.get(case[-1], MEMORY_MB[:1])
    share = NUM_LAYERS // num_stages
    return FunctionPlan(
        stages=tuple(
            FunctionStage(
                first_layer=stage * share,
                end_layer=(stage + 1) * share,
                memory_mb=sizes[stage % len(sizes)],
            )
            for stage in range(num_stages)
        ),
        num_replicas=num_replicas,
        num_micro_batches=BATCH // MICRO_BATCH // num_replicas,
        micro_batch_size=MICRO_BATCH,
        num_chunks=2,
    )


class Bench:
    """An emulator, a store, and what it takes to run one plan on them."""

    def __init__(self, provider: FunctionProvider, store_url: str) -> None:
        self.provider = provider
        self.store_url = store_url
        self.store: Store = open_store(store_url)
        self.job = TrainingJob(
            job_id=JOB,
            name="prediction",
            entrypoint=Entrypoint(source_path=str(SOURCE), object_name="task", import_root=""),
            global_batch_size=BATCH,
            num_epochs=1,
        )

    def close(self) -> None:
        """Delete the store's objects: shared memory does not go with the folder."""
        self.store.delete(self.store.keys("jobs"))
        self.store.close()

    def prepare(self, prefix: str) -> Keys:
        """Upload the job and its code under a prefix of its own."""
        keys = Keys(prefix)
        self.store.put(keys.job, msgspec.json.encode(self.job))
        self.store.put(keys.bundle, pack(SOURCE.name, SOURCE.read_text()))
        return keys

    def call(self, memory_mb: int, payload: bytes, ends: list[InvocationEnd], done: threading.Semaphore) -> None:
        """Invoke one function; its end is added to `ends`."""

        def on_end(end: InvocationEnd) -> None:
            ends.append(end)
            done.release()

        self.provider.invoke(memory_mb, payload, on_end)

    def profile(self) -> ModelProfile:
        """The layers on each memory size, by an invocation of each, put together."""
        keys = self.prepare("jobs/profile")
        profiles: list[ModelProfile] = []
        for memory_mb in MEMORY_MB:
            order = ProfileOrder(
                job_id=JOB, store_url=self.store_url, prefix=keys.prefix, micro_batch_size=MICRO_BATCH, num_rounds=5
            )
            ends: list[InvocationEnd] = []
            done = threading.Semaphore(0)
            self.call(memory_mb, msgspec.json.encode(order), ends, done)
            if not done.acquire(timeout=RUN_LIMIT_S) or ends[0].outcome != "returned":
                raise BackendError(f"the profile on {memory_mb} MB: {ends[0].outcome if ends else 'no answer'}")
            answer = msgspec.json.decode(ends[0].payload)
            if answer.get("error"):
                raise BackendError(answer["error"])
            profiles.append(msgspec.convert(answer["profile"], ModelProfile))
        return joined(profiles, self.provider.service)

    def run(self, case: str) -> list[float]:
        """The time of each step of the plan, in order, from commit to commit at the first place."""
        plan = plan_of(case)
        keys = self.prepare(f"jobs/{case}")
        places = [Place(stage, replica) for stage in range(len(plan.stages)) for replica in range(plan.num_replicas)]
        record = ControlRecord(
            generation=1,
            attempt=0,
            restore_step=0,
            plan=plan,
            incarnations={str(place): 0 for place in places},
            save_every=1000,
        )
        self.store.put(keys.control, msgspec.json.encode(record))
        ends: list[InvocationEnd] = []
        done = threading.Semaphore(0)
        for place in places:
            order = FunctionOrder(
                job_id=JOB,
                store_url=self.store_url,
                prefix=keys.prefix,
                generation=1,
                attempt=0,
                stage=place.stage,
                replica=place.replica,
                incarnation=0,
            )
            self.call(plan.stages[place.stage].memory_mb, msgspec.json.encode(order), ends, done)
        return self._watch(keys, places, ends)

    def _watch(self, keys: Keys, places: Sequence[Place], ends: list[InvocationEnd]) -> list[float]:
        """Collect each step's time from the first place's reports until all functions have ended."""
        steps: dict[int, float] = {}
        deadline_s = time.monotonic() + RUN_LIMIT_S
        while len(ends) < len(places):
            report = self._report(keys, places[0])
            if report is not None and report.step and report.lanes.step_s > 0:
                steps[report.step] = report.lanes.step_s
            if time.monotonic() > deadline_s:
                raise BackendError(f"{keys.prefix} was not done after {RUN_LIMIT_S:.0f} s")
            time.sleep(0.05)
        bad = [end for end in ends if end.outcome != "returned" or b'"failed"' in end.payload]
        if bad:
            raise BackendError(f"{keys.prefix}: {bad[0].outcome} {bad[0].error} {bad[0].payload[:500]!r}")
        return [steps[step] for step in sorted(steps)]

    def _report(self, keys: Keys, place: Place) -> FunctionReport | None:
        try:
            return msgspec.json.decode(self.store.get(keys.report(place, 0)), type=FunctionReport)
        except (ObjectMissing, msgspec.MsgspecError):
            return None


def joined(profiles: Sequence[ModelProfile], service: FunctionService) -> ModelProfile:
    """Profiles of one model on one size each, in ascending order, as one; links are the service's."""
    layers = tuple(
        msgspec.structs.replace(
            parts[0],
            forward_s=tuple(part.forward_s[0] for part in parts),
            backward_s=tuple(part.backward_s[0] for part in parts),
        )
        for parts in zip(*(profile.layers for profile in profiles), strict=True)
    )
    return msgspec.structs.replace(
        profiles[0],
        layers=layers,
        memory_mb=tuple(size.memory_mb for size in service.sizes),
        bytes_per_s=tuple(size.bytes_per_s for size in service.sizes),
        latency_s=service.latency_s,
        base_bytes=max(profile.base_bytes for profile in profiles),
    )


def measure(cases: Sequence[str], folder: Path, store_url: str) -> list[Case]:
    """Predict and run each case on an emulator in the folder, which is stopped afterwards."""
    service = emulator(MEMORY_MB, bytes_per_s=BYTES_PER_S, latency_s=LATENCY_S, cold_start_s=0.5, concurrency=16)
    here = profile_source_layers(
        Entrypoint(source_path=str(SOURCE), object_name="task", import_root=""),
        name="prediction",
        micro_batch_size=MICRO_BATCH,
    ).profile
    scaled = scaled_profile(here, service, core_speed=CPU_FRACTION)
    config = EmulatorConfig(service=service, cpu_fraction=CPU_FRACTION, warm_template=True, preload=("torch",))
    provider = emulator_provider(ensure_emulator(folder / "emulator", config), service)
    bench = Bench(provider, store_url)
    try:
        provider.deploy(MEMORY_MB)
        profile = bench.profile()
        found = []
        for case in cases:
            plan = plan_of(case)
            steps = bench.run(case)[NUM_WARM_UP:]
            if not steps:
                raise BackendError(f"{case} ran fewer than {NUM_WARM_UP + 1} steps")
            found.append(
                Case(
                    case=case,
                    predicted_s=estimate_step(profile, plan).step_s,
                    scaled_s=estimate_step(scaled, plan).step_s,
                    measured_s=statistics.median(steps),
                    num_steps=len(steps),
                    slowest_s=max(steps),
                    fastest_s=min(steps),
                )
            )
            sys.stderr.write(line_of(found[-1]) + "\n")
        return found
    finally:
        provider.close()
        stop_emulator(folder / "emulator")
        bench.close()


def line_of(case: Case) -> str:
    """One row of the printed table."""
    return (
        f"| {case.case} | {case.predicted_s:.2f} | {case.scaled_s:.2f} | {case.measured_s:.2f} | "
        f"{case.fastest_s:.2f} to {case.slowest_s:.2f} | {case.num_steps} | {case.error_fraction:.1%} | "
        f"{abs(case.scaled_s / case.measured_s - 1):.1%} |"
    )


def main() -> int:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--store", choices=("file", "shm"), default="file", help="polled, or waking a waiting reader")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="springtide-prediction-", ignore_cleanup_errors=True) as folder:
        store_url = f"shm://{Path(folder).name}" if options.store == "shm" else f"file://{folder}/store"
        found = measure([name for name in options.cases.split(",") if name], Path(folder), store_url)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    print("| case | predicted s | from one core s | measured s | steps s | steps | error | error from one core |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in found:
        print(line_of(case))
    print(f"mean error {statistics.mean(case.error_fraction for case in found):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
