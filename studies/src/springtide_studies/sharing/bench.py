"""`springtide bench sharing`: two services and a training job on shared devices beside exclusive and static ones, real.

Every arm plays the same arrivals on a platform of its own, one arm after the other, several times over.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from springtide.cli.commands.bench import Bench, Report, Tell
from springtide.cli.tables.columns import align
from springtide.core.errors import BackendError
from springtide.core.shares import Share
from springtide_studies.options import seed_option, small_option
from springtide_studies.sharing.load import Surge
from springtide_studies.sharing.report import SharingFigures, arms_table, make_report
from springtide_studies.sharing.trial import NUM_SLOTS, SERVICE_SOURCE, OfferedLoad, SharingTrial, TrialArm, run_trial

# What a request takes of a whole device when it goes alone. A batch of four takes about half of the objective on the
# part of the device that a service requests, as a profile would have it (Dilu, section 3.2).
REQUEST_DEVICE_S = 0.006
SLO_S = 0.15
# With what the replica itself takes for a call (about 2 ms of CPU), both surges at once and the job's request together
# are about nine tenths of one device: it fits, with little to spare.
RATE_PER_S = 6.0
SURGE_FACTOR = 4.0
# Requests fill the device, and limits what a device may be promised in all (1.5).
SERVICE_SHARE = Share(request=0.3, limit=0.45)
TRAINING_SHARE = Share(request=0.4, limit=0.6)
_THIRD = Share(request=1 / 3, limit=1 / 3)
_WHOLE = Share(request=1.0, limit=1.0)
ARMS = (
    TrialArm(name="exclusive", what="a device of its own for each, held to it", service=_WHOLE, job=_WHOLE),
    TrialArm(name="static", what="one device in three fixed equal parts, request = limit", service=_THIRD, job=_THIRD),
    TrialArm(
        name="no control",
        what="one device, every sharer always granted the limit",
        service=SERVICE_SHARE,
        job=TRAINING_SHARE,
        environment={"SPRINGTIDE_SHARE_CONTROL": "off"},
    ),
    TrialArm(
        name="ours", what="one device, between request and limit, every 5 ms", service=SERVICE_SHARE, job=TRAINING_SHARE
    ),
)
NUM_REPETITIONS = 3
_CALIBRATION = """
import time
network = Network()
network.params = {"num_layers": "400"}
network.load()
rows = [[0.1] * 16]
fastest = {}
for size in (1, 4):
    network.predict(rows * size)
    spent = []
    for _ in range(25):
        began = time.process_time()
        network.predict(rows * size)
        spent.append(time.process_time() - began)
    fastest[size] = sorted(spent)[len(spent) // 2] / 400
print(fastest[1], fastest[4])
"""


def run_sharing_bench(*, seed: int, is_small: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure and return {"bench", "machine", "rows", "arms", "criterion", "passed", ...}.

    `is_small` plays one repetition of half the length. Raises BackendError if a platform or a workload does not start.
    """
    load_before = os.getloadavg()[0]
    layer_s, layer_of_four_s = _calibrate()
    device_cpus = min(1.0, (os.cpu_count() or 1) / NUM_SLOTS)
    num_layers = max(1, round(REQUEST_DEVICE_S * device_cpus / layer_s))
    load = _load(num_layers, is_small)
    tell(
        f"a device is {device_cpus:g} of a core; a request takes {layer_s * num_layers * 1000:.1f} ms of one, four "
        f"together {layer_of_four_s * num_layers * 1000:.1f} ms"
    )
    trials: list[SharingTrial] = []
    num_repetitions = 1 if is_small else NUM_REPETITIONS
    for repetition in range(num_repetitions):
        for arm in _in_turn(ARMS, repetition):
            # The same arrivals for every arm of a repetition, others in the next.
            trials.append(run_trial(arm, load, repetition, seed + repetition, tell))
    figures = SharingFigures(
        seed=seed,
        device_cpus=device_cpus,
        request_cpu_s=layer_s * num_layers,
        request_of_four_cpu_s=layer_of_four_s * num_layers / 4,
        machine={
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "load_1m_before": round(load_before, 2),
        },
    )
    return make_report(ARMS, load, trials, figures)


def _in_turn(arms: Sequence[TrialArm], repetition: int) -> Sequence[TrialArm]:
    """Rotate the arms, so that none always runs right after the same other one."""
    first = repetition % len(arms)
    return (*arms[first:], *arms[:first])


def _load(num_layers: int, is_small: bool) -> OfferedLoad:
    """Calm, the first service's surge, both at once, the second one's, calm again."""
    unit_s = 2.0 if is_small else 4.0

    def surge(from_units: float, until_units: float) -> tuple[Surge, ...]:
        return (Surge(from_s=from_units * unit_s, until_s=until_units * unit_s, factor=SURGE_FACTOR),)

    return OfferedLoad(
        rate_per_s=RATE_PER_S,
        duration_s=6 * unit_s,
        surges=(surge(1, 3), surge(2.5, 4.5)),
        slo_s=SLO_S,
        num_layers=num_layers,
    )


def _calibrate() -> tuple[float, float]:
    """CPU seconds of one layer of the services' network for one request, and for four together."""
    done = subprocess.run(
        [sys.executable, "-c", SERVICE_SOURCE + _CALIBRATION], stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        one, four = (float(word) for word in done.stdout.split())
    except ValueError:
        raise BackendError(
            f"the services' network cannot be measured (exit code {done.returncode}); its output says why"
        ) from None
    return one, four


def _run(options: Mapping[str, Any], tell: Tell) -> Report:
    return run_sharing_bench(seed=options["seed"], is_small=options["small"], tell=tell)


def _heading(report: Report) -> list[str]:
    return [align(*arms_table(report)), *report["problems"], ""]


BENCH = Bench(run=_run, options=[small_option("One repetition of half the length."), seed_option()], heading=_heading)
