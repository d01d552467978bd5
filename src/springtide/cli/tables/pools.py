"""Pools as text for people: a line for `top`, the table of nodes, the tide, loans and reclaims. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from springtide.cli.tables.columns import UNKNOWN, align, count, number
from springtide.core.quantities import format_duration
from springtide.core.status.pools import AffectedJob, Handover, NodeStatus, PoolsReport, PoolStatus, TideStatus

MAX_NODES = 16
_BARS = "▁▂▃▄▅▆▇█"
_NUM_BARS = 48


def pools_line(pools: Sequence[PoolStatus], nodes: Sequence[NodeStatus]) -> str:
    """One line about all pools and handovers in progress, as `top` and `ps` show it. Empty without pools."""
    if not pools:
        return ""
    parts = []
    for pool in pools:
        if pool.num_devices or pool.num_lent:
            loaned = f" ({pool.num_borrowed} on loan)" if pool.num_borrowed else ""
            parts.append(f"{pool.pool} {count(pool.num_nodes, 'server')}{loaned}")
    line = "pools  " + "   ".join(parts)
    reclaimed = [node for node in nodes if node.drain is not None and node.drain.reclaim_at_s is not None]
    draining = [node for node in nodes if node.drain is not None and node.drain.reclaim_at_s is None]
    for verb, group in (("reclaiming", reclaimed), ("draining", draining)):
        reasons = list(dict.fromkeys(node.drain.reason for node in group if node.drain is not None))
        if group:
            line += f" · {len(group)} {verb}" + (f": {reasons[0]}" if reasons and reasons[0] else "")
    return line


def nodes_table(nodes: Sequence[NodeStatus], now_s: float, *, most: int | None = None, width: int | None = None) -> str:
    """One line for each server. Of more than `most`, those on loan or changing pools are shown first."""
    shown = list(nodes)
    if most is not None and len(shown) > most:
        shown = sorted(shown, key=lambda node: (node.drain is None, not node.is_loaned))[:most]
        places = {node.node_id: place for place, node in enumerate(nodes)}
        shown.sort(key=lambda node: places[node.node_id])
    rows = [
        (
            node.node_id,
            node.pool if node.drain is None else f"{node.pool} -> {node.drain.pool}",
            node.owner,
            str(node.num_training),
            str(node.num_serving),
            str(max(0, node.num_devices - node.num_training - node.num_serving)),
            _node_state(node, now_s),
        )
        for node in shown
    ]
    table = align(("NODE", "POOL", "OWNER", "TRAINING", "SERVICES", "FREE", "STATE"), rows, width)
    hidden = len(nodes) - len(shown)
    return table + (f"\n({hidden} more servers: springtide pools)" if hidden else "")


def _node_state(node: NodeStatus, now_s: float) -> str:
    if node.drain is None:
        return f"on loan from {node.owner}" if node.is_loaned else ""
    since = format_duration(max(0.0, now_s - (node.drain.reclaim_at_s or node.drain.since_at_s)))
    verb = "drains" if node.drain.reclaim_at_s is None else "is reclaimed"
    return f"{verb} for {since}" + (f": {node.drain.reason}" if node.drain.reason else "")


def tide_lines(tide: TideStatus, now_s: float, wall_clock_offset_s: float) -> str:
    """The services' past and forecast demand as text and as a row of bars."""
    if tide.level is None:
        return "tide  no service has been deployed yet"
    past = max(tide.peaks, default=tide.level)
    text = f"tide  services need {count(tide.level, 'device')} now, at most {past} lately"
    if not tide.forecast:
        day = format_duration(tide.day_s)
        return f"{text}; a forecast takes a whole day ({day}) of the past\n      {_bars(tide.peaks, past)}"
    highest = max(tide.forecast, key=lambda band: band.upper)
    when = "now" if highest.at_s <= now_s else f"at {_clock(highest.at_s, wall_clock_offset_s)}"
    text += f"; highest ahead {when}: {number(highest.expected, 2)} expected, up to {number(highest.upper, 2)}"
    top = max(past, highest.upper)
    ahead = [band.expected for band in tide.forecast]
    return f"{text}\n      {_bars(tide.peaks, top)}|{_bars(ahead, top)}"


def _bars(values: Sequence[float], top: float) -> str:
    """At most _NUM_BARS bars, each with the height of its largest value."""
    stride = -(-len(values) // _NUM_BARS) or 1
    highest = [max(values[start : start + stride]) for start in range(0, len(values), stride)]
    return "".join(_BARS[min(len(_BARS) - 1, int(value / max(top, 1) * len(_BARS)))] for value in highest)


def handovers_table(handovers: Sequence[Handover], now_s: float, wall_clock_offset_s: float, width: int | None) -> str:
    """One line for each loan and reclaim, the newest first."""
    rows = [
        (
            _clock(handover.demanded_at_s, wall_clock_offset_s),
            _kind(handover),
            handover.node_id,
            f"{handover.from_pool} -> {handover.to_pool}",
            _took(handover, now_s),
            f"{handover.cost_s:.0f}" if handover.cost_s else UNKNOWN,
            ", ".join(_effect(job) for job in handover.affected) or UNKNOWN,
            handover.reason or UNKNOWN,
        )
        for handover in reversed(handovers)
    ]
    return align(("WHEN", "WHAT", "NODE", "POOLS", "TOOK", "DEVICE-S", "WHOM", "REASON"), rows, width)


def _kind(handover: Handover) -> str:
    if handover.kind == "loan":
        return "return" if handover.is_return else "loan"
    return "reclaim"


def _took(handover: Handover, now_s: float) -> str:
    """The time from the order to leave (or the decision) to the new label, and to the first ready replica."""
    began_s = handover.demanded_at_s if handover.reclaim_at_s is None else handover.reclaim_at_s
    if handover.state == "draining":
        return f"{format_duration(max(0.0, now_s - began_s))} so far"
    if handover.labelled_at_s is None:
        return handover.state
    labelled_s = handover.labelled_at_s - began_s
    label = format_duration(labelled_s) if labelled_s > 0 else "at once"
    if handover.serving_at_s is None:
        return label
    return f"{label}, serving {format_duration(handover.serving_at_s - began_s)}"


def _effect(job: AffectedJob) -> str:
    if job.effect == "stopped":
        return f"{job.name} stopped"
    if job.effect == "moved":
        return f"{job.name} moved"
    return f"{job.name} {job.num_workers_before} -> {job.num_workers_after}" + (" by force" * (job.effect == "forced"))


def _clock(at_s: float, wall_clock_offset_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s + wall_clock_offset_s):%H:%M:%S}"


def pools_text(report: PoolsReport, width: int | None = None) -> str:
    """The whole text of `springtide pools`."""
    if not report.pools:
        return (
            "this platform has no pools: every server takes jobs and services side by side\n"
            "  pools of their own: springtide up --slots 4 --pools inference=2"
        )
    offset_s = report.wall_clock_offset_s
    shown = [node for node in report.nodes if node.num_devices]
    parts = [
        pools_line(report.pools, report.nodes),
        nodes_table(shown, report.now_s, width=width),
        tide_lines(report.tide, report.now_s, offset_s),
    ]
    if report.handovers:
        parts.append(handovers_table(report.handovers, report.now_s, offset_s, width))
    else:
        parts.append("no server has been loaned or reclaimed yet")
    return "\n\n".join(parts)
