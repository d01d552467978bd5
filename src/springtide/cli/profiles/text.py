"""Profiles as text: the parts of a step, its timeline drawn in characters, operators, buckets, speeds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from springtide.cli.tables.columns import align, number

if TYPE_CHECKING:
    from springtide.perf.communication.query import SampleFile
    from springtide.runtime.profiling.step_profiling import FunctionProfile

_MAX_OPERATORS = 10
_MIN_WIDTH = 40
_LABEL = "computation  "
_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def profile_text(profile: FunctionProfile, intervals: Sequence[tuple[float, float]], width: int = 100) -> str:
    """The whole profile. `intervals` are (begin, end) of each bucket's exchange, in seconds from the step's start."""
    step = profile.step
    size = f"batch {profile.global_batch_size} on {profile.num_workers} {profile.device_kind} workers"
    title = f"{profile.name}: {size}, {step.local_batch_size} samples each, medians of {profile.num_iterations}"
    parts = [
        title,
        f"  forward {_ms(step.forward_s)}   backward {_ms(step.backward_s)}   update {_ms(step.update_s)}   "
        f"of the computation {profile.fixed_fraction:.0%} does not depend on the batch",
        drawing(profile, intervals, width),
        buckets_table(profile),
        operators_table(profile),
        curve_table(profile),
    ]
    return "\n\n".join([parts[0] + "\n" + parts[1], *(part for part in parts[2:] if part)])


def drawing(profile: FunctionProfile, intervals: Sequence[tuple[float, float]], width: int = 100) -> str:
    """The step from left to right: computation above, the exchanged bucket below (0 is the first)."""
    step = profile.step
    pass_s = step.forward_s + step.backward_s
    exchanged_s = max([pass_s, *(end for _, end in intervals)])
    total_s = exchanged_s + step.update_s
    columns = max(_MIN_WIDTH, width - len(_LABEL) - 2)
    above, below = [" "] * columns, [" "] * columns
    _fill(above, "F", 0.0, step.forward_s, total_s)
    _fill(above, "B", step.forward_s, pass_s, total_s)
    _fill(above, "U", exchanged_s, total_s, total_s)
    for place, (begin, end) in enumerate(intervals):
        _fill(below, _MARKS[place % len(_MARKS)], begin, end, total_s)
    blank = " " * len(_LABEL)
    return "\n".join(
        [
            f"{_LABEL}|{''.join(above)}|",
            f"{'exchanges'.ljust(len(_LABEL))}|{''.join(below)}|",
            f"{blank} 0{_ms(total_s).rjust(columns - 1)}",
            f"{blank} F forward, B backward, U update; below, the number of the bucket that is exchanged",
            f"{blank} a step: {_ms(profile.predicted_step_s)} on the critical path, {_ms(profile.measured_step_s)} "
            "measured with exchanges under way",
        ]
    )


def _fill(row: list[str], mark: str, begin_s: float, end_s: float, total_s: float) -> None:
    """Draw a part of the timeline, at least one character wide."""
    if end_s <= begin_s or total_s <= 0:
        return
    first = min(len(row) - 1, round(begin_s / total_s * len(row)))
    last = max(first + 1, round(end_s / total_s * len(row)))
    row[first:last] = mark * (min(last, len(row)) - first)


def buckets_table(profile: FunctionProfile) -> str:
    """One line for each bucket of gradients."""
    rows = [
        (_MARKS[place % len(_MARKS)], size_text(bucket.num_bytes), _ms(bucket.ready_s), _ms(exchange_s))
        for place, (bucket, exchange_s) in enumerate(zip(profile.step.buckets, profile.exchange_s, strict=True))
    ]
    return align(("BUCKET", "SIZE", "READY AT", f"EXCHANGE ({profile.backend})"), rows)


def operators_table(profile: FunctionProfile) -> str:
    """The operators with the longest self time in an iteration."""
    all_s = sum(total.self_s for total in profile.operator_totals)
    rows = [
        (total.name, number(total.num_calls), _ms(total.self_s), f"{total.self_s / all_s:.0%}")
        for total in profile.operator_totals[:_MAX_OPERATORS]
    ]
    return align(("OPERATOR", "CALLS", "OWN TIME", "SHARE"), rows)


def curve_table(profile: FunctionProfile) -> str:
    """The predicted speed on each number of workers, and the model of exchange times that it is based on."""
    if not profile.steps_per_s:
        return ""
    first = next(iter(profile.steps_per_s.values()))
    batch = profile.global_batch_size
    rows = [
        (str(count), str(-(-batch // count)), _ms(1.0 / rate), _rate(rate * batch), f"{rate / first:.2f}x")
        for count, rate in profile.steps_per_s.items()
    ]
    table = align(("WORKERS", "BATCH/WORKER", "STEP", "SAMPLES/S", "SPEEDUP"), rows)
    return f"predicted, exchanges by {profile.communication_model}\n{table}"


def samples_text(samples: SampleFile) -> str:
    """One line for each group of workers: its time for each size."""
    node_of = {str(device.device_id): node.node_id for node in samples.nodes for device in node.devices}
    rack_of = {node.node_id: node.switches[0] if node.switches else "" for node in samples.nodes}
    sizes = sorted({sample.num_bytes for sample in samples.samples})
    times: dict[tuple[str, ...], dict[int, float]] = {}
    for sample in samples.samples:
        times.setdefault(tuple(sample.device_ids), {})[sample.num_bytes] = sample.duration_s
    rows = []
    for device_ids, by_size in times.items():
        racks: dict[str, dict[str, int]] = {}
        for device_id in device_ids:
            node = node_of[device_id]
            nodes = racks.setdefault(rack_of[node], {})
            nodes[node] = nodes.get(node, 0) + 1
        counts = sorted((sorted(nodes.values(), reverse=True) for nodes in racks.values()), reverse=True)
        spread = " | ".join("+".join(str(n) for n in nodes) for nodes in counts)
        cells = [_ms(by_size[size]) if size in by_size else "-" for size in sizes]
        rows.append((str(len(device_ids)), spread, *cells))
    return align(("WORKERS", "ON NODES | RACKS", *(size_text(size) for size in sizes)), rows)


def size_text(num_bytes: int) -> str:
    """4 KiB, 1.5 MiB."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else number(per_s, 3)
