"""Charts as inline SVG: lines and steps over an axis, bars in rows. Each has a text label for screen readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from springtide.simulator.report.page import NUM_SERIES, Element, element, figure, fraction, seconds

Point = tuple[float, float]
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 26, 36
_MOST_POINTS = 800
_TIME_STEPS_S = (
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200),
    *(86400, 2 * 86400, 5 * 86400, 10 * 86400, 20 * 86400, 50 * 86400, 100 * 86400),
)
_LOG_TIMES_S = (0.1, 1, 10, 60, 600, 3600, 36000, 86400, 864000, 8640000)
_TIME_NAMES: tuple[tuple[float, str], ...] = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One axis of a chart from `low` to `high`; its title carries the unit.

    `time` and `log_time` hold seconds, `fraction` 0 to 1, `count` anything.
    """

    low: float
    high: float
    title: str
    kind: Literal["count", "fraction", "time", "log_time"] = "count"

    def place(self, value: float) -> float:
        """Where `value` lies, 0 at `low` and 1 at `high`."""
        value = min(max(value, self.low), self.high)
        if self.kind == "log_time":
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """Round values and their labels, about `most` of them at most."""
        if self.kind == "log_time":
            return [(t, _time_name(t)) for t in _LOG_TIMES_S if self.low <= t <= self.high]
        span = self.high - self.low
        if self.kind == "time":
            step_s = next(
                (step for step in _TIME_STEPS_S if span / step <= most), math.ceil(span / most / 86400) * 86400
            )
            return [(self.low + i * step_s, _time_name(self.low + i * step_s)) for i in range(int(span / step_s) + 1)]
        step = _round_step(span / most)
        values = [self.low + i * step for i in range(int(span / step + 1e-9) + 1)]
        return [(v, fraction(v, 0) if self.kind == "fraction" else figure(v)) for v in values]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One series: points (x, y) in order of x. `slot` is its colour and dash; None draws it thin and grey."""

    name: str
    slot: int | None
    points: tuple[Point, ...]
    is_step: bool = False
    is_filled: bool = False


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a row: its length, its class in the style sheet, and its tooltip."""

    value: float
    look: str
    title: str


class BarRow(msgspec.Struct, frozen=True, kw_only=True):
    """A named row of bars laid end to end, with a label behind them and an outline for what was expected."""

    name: str
    bars: tuple[Bar, ...]
    label: str
    outline: float | None = None
    outline_title: str = ""
    slot: int | None = None


def points(raw: Sequence[Sequence[float]] | None) -> tuple[Point, ...]:
    """The pairs of an answer's series, thinned to _MOST_POINTS."""
    pairs = [(float(pair[0]), float(pair[1])) for pair in raw or ()]
    if len(pairs) > _MOST_POINTS:
        last = len(pairs) - 1
        pairs = [pairs[round(i * last / (_MOST_POINTS - 1))] for i in range(_MOST_POINTS)]
    return tuple(pairs)


def averaged(steps: tuple[Point, ...], num_parts: int) -> tuple[Point, ...]:
    """A step line's mean over each of `num_parts` equal parts of its length, as a step line."""
    if len(steps) <= num_parts:
        return steps
    (begin, _), (end, last) = steps[0], steps[-1]
    length = (end - begin) / num_parts
    totals = [0.0] * num_parts
    for (x0, y), (x1, _) in pairwise(steps):
        first, final = int((x0 - begin) / length), min(int((x1 - begin) / length), num_parts - 1)
        for part in range(first, final + 1):
            left, right = begin + part * length, begin + (part + 1) * length
            totals[part] += y * max(0.0, min(x1, right) - max(x0, left))
    return (*((begin + part * length, total / length) for part, total in enumerate(totals)), (end, last))


def line_chart(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    label: str,
    size: tuple[int, int] = (620, 280),
    limit: float | None = None,
) -> Element:
    """Draw the lines over two axes. `limit` is a dashed level that cannot be passed; `size` in pixels at full width."""
    width, height = size
    inner_width, inner_height = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    made = _canvas(width, height, label)
    for value, name in y.ticks(5):
        at = _TOP + inner_height * (1 - y.place(value))
        made.append(element("line", x1=_LEFT, x2=width - _RIGHT, y1=_px(at), y2=_px(at), class_="grid"))
        made.append(element("text", name, x=_LEFT - 6, y=_px(at + 4), text_anchor="end"))
    for value, name in x.ticks(7):
        at = _LEFT + inner_width * x.place(value)
        made.append(
            element("line", x1=_px(at), x2=_px(at), y1=height - _BOTTOM, y2=height - _BOTTOM + 4, class_="axis")
        )
        made.append(element("text", name, x=_px(at), y=height - _BOTTOM + 16, text_anchor="middle"))
    base = height - _BOTTOM
    made.append(element("line", x1=_LEFT, x2=width - _RIGHT, y1=base, y2=base, class_="axis"))
    made.append(element("text", x.title, x=width - _RIGHT, y=height - 5, text_anchor="end"))
    made.append(element("text", y.title, x=2, y=12, class_="strong"))
    if limit is not None and y.low <= limit <= y.high:
        at = _TOP + inner_height * (1 - y.place(limit))
        made.append(element("line", x1=_LEFT, x2=width - _RIGHT, y1=_px(at), y2=_px(at), class_="limit"))
    for line in lines:
        placed = [
            (_LEFT + inner_width * x.place(px), _TOP + inner_height * (1 - y.place(py))) for px, py in line.points
        ]
        if placed:
            made.append(_drawn(line, placed, base))
    return made


def _drawn(line: Line, placed: Sequence[Point], base: float) -> Element:
    look = "all" if line.slot is None else f"s{line.slot % NUM_SERIES}"
    path = _path(placed, is_step=line.is_step)
    group = element("g", element("title", line.name), class_=None if line.slot is None else f"of-{line.slot}")
    if line.is_filled:
        closed = f"{path}V{_px(base)}H{_px(placed[0][0])}Z"
        group.append(element("path", d=closed, class_=f"area {look}"))
    group.append(element("path", d=path, class_=f"line {look}"))
    return group


def _path(placed: Sequence[Point], *, is_step: bool) -> str:
    (x0, y0), *rest = placed
    if is_step:
        return f"M{_px(x0)} {_px(y0)}" + "".join(f"H{_px(x)}V{_px(y)}" for x, y in rest)
    return f"M{_px(x0)} {_px(y0)}" + "".join(f"L{_px(x)} {_px(y)}" for x, y in rest)


def bar_chart(
    rows: Sequence[BarRow], high: float, *, label: str, width: int = 900, name_width: int = 120, label_width: int = 110
) -> Element:
    """Draw rows of bars from 0 to `high`, each with its name before and its label behind."""
    row_height = 26
    height = row_height * len(rows) + 4
    room = width - name_width - label_width
    made = _canvas(width, height, label)
    made.append(element("line", x1=name_width, x2=name_width, y1=0, y2=height, class_="axis"))
    for index, row in enumerate(rows):
        top = 4 + index * row_height
        # Rows below a hidden row keep their place: the gap shows that something is missing.
        group = element("g", class_=None if row.slot is None else f"of-{row.slot}")
        group.append(element("text", row.name, x=name_width - 8, y=top + 14, text_anchor="end", class_="strong"))
        at = float(name_width)
        for bar in row.bars:
            length = room * min(bar.value, high) / high
            if length > 0:
                drawn = element("rect", element("title", bar.title), class_=f"bar {bar.look}")
                drawn.attrib.update(x=_px(at), y=str(top), width=_px(max(length - 1.5, 0.8)), height="19", rx="2")
                group.append(drawn)
            at += length
        if row.outline is not None:
            box = element("rect", element("title", row.outline_title), class_="bar published", x=name_width, y=top + 3)
            box.attrib.update(width=_px(room * min(row.outline, high) / high), height="13", rx="2")
            group.append(box)
            at = max(at, name_width + room * min(row.outline, high) / high)
        group.append(element("text", row.label, x=_px(at + 8), y=top + 14, class_="value"))
        made.append(group)
    return made


def _canvas(width: int, height: int, label: str) -> Element:
    # A chart fills its container, up to a width at which its text is not much larger than the text around it.
    size = {"viewBox": f"0 0 {width} {height}", "style": f"max-width: {round(width * 1.25)}px"}
    return element("svg", class_="chart", role="img", aria_label=label, **size)


def time_axis(high: float, title: str) -> Axis:
    """Seconds from 0 on, with room for at least one second."""
    return Axis(low=0.0, high=max(high, 1.0), title=title, kind="time")


def log_time_axis(values: Sequence[float], title: str) -> Axis:
    """Seconds over several powers of ten; values below 0.1 s are drawn at the left edge."""
    known = [value for value in values if value > 0]
    low = max(min(known, default=1.0), 0.1)
    high = max(max(known, default=10.0), low * 10)
    return Axis(low=low, high=high, title=title, kind="log_time")


def count_axis(high: float, title: str) -> Axis:
    """From 0 to a round number at or above `high`."""
    step = _round_step(max(high, 1.0) / 5)
    return Axis(low=0.0, high=step * math.ceil(max(high, 1.0) / step), title=title)


def fraction_axis(title: str) -> Axis:
    """From 0 to 100 %."""
    return Axis(low=0.0, high=1.0, title=title, kind="fraction")


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least * (1 - 1e-9))


def _time_name(value: float) -> str:
    if value == 0:
        return "0"
    for unit_s, name in _TIME_NAMES:
        if value >= unit_s:
            return f"{value / unit_s:.3g} {name}"
    return seconds(value)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
