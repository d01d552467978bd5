"""Draws collectives.svg: what is on the links of four workers under each schedule, from the walk of its events."""

from __future__ import annotations

from pathlib import Path

from springtide.collectives.schedule import make_schedule
from springtide.core.functions import Collective
from springtide_studies.communication.collective_walk import StoreLink, Walk, walk
from springtide_studies.exchange.probe import lower_bound_s

N, NUM_ELEMENTS = 4, 4_800_000
# One second is what the whole gradient takes on one link.
LINK = StoreLink(up_bytes_per_s=4.0 * NUM_ELEMENTS, down_bytes_per_s=4.0 * NUM_ELEMENTS)
SHOWN: tuple[tuple[Collective, int, str], ...] = (
    ("smlt", 1, "SMLT: hierarchical aggregation, m = n"),
    ("lambdaml", 1, "LambdaML: three phases"),
    ("funcpipe", 1, "FuncPipe: pipelined"),
    ("duplex", 4, "duplex, 4 chunks"),
)
LEFT, WIDTH, LANE, GAP, TOP, MOST_S = 92, 640, 9, 44, 30, 3.3
COLOURS = {"raw": "#4c78a8", "sum": "#f58518"}


def x_of(seconds: float) -> float:
    """Where an instant lies."""
    return LEFT + seconds / MOST_S * WIDTH


def text(x: float, y: float, words: str, *, size: int = 12, colour: str = "#222", anchor: str = "start") -> str:
    """Words at a place."""
    look = f'font-family="sans-serif" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{words}</text>'


def panel(walked: Walk, title: str, top: float) -> list[str]:
    """One schedule: a pair of lanes for each worker, uploads above downloads."""
    parts = [text(LEFT, top - 6, f"{title}: {walked.took_s:.2f} S/w")]
    for rank in range(N):
        for lane, name in enumerate(("up", "down")):
            y = top + rank * (2 * LANE + 4) + lane * LANE
            label = f"worker {rank} {name}" if lane == 0 else name
            parts.append(text(LEFT - 6, y + LANE - 1, label, size=9, anchor="end"))
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{LANE - 1}" fill="#f2f2f2"/>')
    for transfer in walked.transfers:
        y = top + transfer.rank * (2 * LANE + 4) + (0 if transfer.is_upload else LANE)
        width = x_of(transfer.end_s) - x_of(transfer.begin_s) - 0.6
        parts.append(
            f'<rect x="{x_of(transfer.begin_s):.1f}" y="{y}" width="{width:.1f}" height="{LANE - 1}" '
            f'fill="{COLOURS[transfer.key[:3]]}"><title>{transfer.key}</title></rect>'
        )
    bound = x_of(lower_bound_s(N, 1.0, 1.0))
    bottom = top + N * (2 * LANE + 4)
    parts.append(
        f'<line x1="{bound}" x2="{bound}" y1="{top - 2}" y2="{bottom}" stroke="#d62728" stroke-dasharray="4 2"/>'
    )
    return parts


def draw() -> str:
    """The picture, as SVG."""
    height = N * (2 * LANE + 4) + GAP
    parts: list[str] = []
    for number, (name, chunks, title) in enumerate(SHOWN):
        parts += panel(walk(make_schedule(name, N, NUM_ELEMENTS, chunks), LINK, 1), title, TOP + number * height)
    bottom = TOP + len(SHOWN) * height - GAP + 18
    for tick in range(4):
        parts.append(text(x_of(tick), bottom, f"{tick} S/w", anchor="middle"))
    legend = (("raw", "own parts, not yet added"), ("sum", "sums"))
    for number, (kind, words) in enumerate(legend):
        x = LEFT + number * 190
        parts.append(f'<rect x="{x}" y="{bottom + 12}" width="12" height="10" fill="{COLOURS[kind]}"/>')
        parts.append(text(x + 18, bottom + 21, words))
    parts.append(text(LEFT + 330, bottom + 21, "- - the lower bound, 2 (n - 1) / n", colour="#d62728"))
    size = f'width="{LEFT + WIDTH + 20}" height="{bottom + 34}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>Schedules of four workers</title>'
    body = "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"])
    return body + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("collectives.svg").write_text(draw(), encoding="utf-8")
