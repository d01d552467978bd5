"""What pools look like to people: in `top` and `ps`, and in `springtide pools`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace

from springtide.cli.tables.pools import handovers_table, nodes_table, pools_line, pools_text, tide_lines
from springtide.core.status.pools import (
    AffectedJob,
    DrainStatus,
    Handover,
    NodeStatus,
    PoolsReport,
    TideBand,
    TideStatus,
)
from springtide.service.status.pools import pool_statuses

REASON = "forecast for 07:30 needs 3 more"


def node(index: int, pool: Any = "training", owner: Any = "", drain: DrainStatus | None = None) -> NodeStatus:
    owner = owner or pool
    return NodeStatus(
        node_id=f"gpu-{index:02d}",
        pool=pool,
        owner=owner,
        is_loaned=pool != owner,
        num_devices=2,
        num_training=int(pool == "training"),
        num_serving=0,
        drain=drain,
    )


RECLAIM = DrainStatus(pool="inference", since_at_s=60.0, reclaim_at_s=88.0, reason=REASON, cost_s=40.0)
NODES = (
    node(0),
    node(1),
    node(2, owner="inference", drain=RECLAIM),
    node(3, owner="inference"),
    node(4, "inference"),
    node(5, "inference"),
)
DONE = Handover(
    node_id="gpu-05",
    num_devices=2,
    kind="reclaim",
    from_pool="training",
    to_pool="inference",
    is_return=True,
    state="done",
    demanded_at_s=20.0,
    reclaim_at_s=25.0,
    labelled_at_s=32.0,
    serving_at_s=34.5,
    reason=REASON,
    cost_s=120.4,
    reclaim_kind="shrinking",
    affected=(AffectedJob(workload_id="f-1", name="fit", effect="shrunk", num_workers_before=4, num_workers_after=2),),
)
TIDE = TideStatus(
    bin_s=900.0,
    day_s=86_400.0,
    from_at_s=-86_400.0,
    peaks=(3,) * 48 + (10,) * 47 + (4,),
    level=4,
    forecast_bin_s=900.0,
    forecast=(
        TideBand(at_s=0.0, expected=4.0, lower=3.0, upper=5.0),
        TideBand(at_s=900.0, expected=9.6, lower=8.0, upper=12.4),
    ),
)


def report(**changes: Any) -> PoolsReport:
    made = PoolsReport(
        now_s=100.0,
        wall_clock_offset_s=0.0,
        pools=pool_statuses(NODES),
        nodes=NODES,
        tide=TIDE,
        handovers=(DONE,),
    )
    return replace(made, **changes)


def test_one_line_says_what_each_pool_has_and_what_is_under_way() -> None:
    assert pools_line(pool_statuses(NODES), NODES) == (
        f"pools  training 4 servers (2 on loan)   inference 2 servers · 1 reclaiming: {REASON}"
    )
    assert pools_line((), ()) == ""
    soft = tuple(replace(one, drain=replace(RECLAIM, reclaim_at_s=None)) if one.drain else one for one in NODES)
    assert pools_line(pool_statuses(soft), soft).endswith(f"· 1 draining: {REASON}")


def test_the_table_of_servers_shows_labels_owners_and_drains() -> None:
    lines = nodes_table(NODES, 100.0).splitlines()
    assert lines[0].split() == ["NODE", "POOL", "OWNER", "TRAINING", "SERVICES", "FREE", "STATE"]
    assert lines[3].startswith("gpu-02  training -> inference  inference  1")
    assert lines[3].endswith(f"is reclaimed for 12.0 s: {REASON}")
    assert lines[4].endswith("on loan from inference")


def test_of_many_servers_those_on_their_way_and_on_loan_are_shown() -> None:
    lines = nodes_table((*[node(index) for index in range(10, 60)], *NODES), 100.0, most=4).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["gpu-10", "gpu-11", "gpu-02", "gpu-03"]
    assert lines[5] == "(52 more servers: springtide pools)"


@pytest.mark.parametrize("width", [80, 100])
def test_tables_fit_the_terminal(width: int) -> None:
    for line in nodes_table(NODES, 100.0, width=width).splitlines():
        assert len(line) <= width


def test_the_tide_is_a_sentence_and_a_row_of_bars() -> None:
    sentence, bars = tide_lines(TIDE, 100.0, 0.0).splitlines()
    assert sentence.startswith("tide  services need 4 devices now, at most 10 lately; highest ahead at ")
    assert sentence.endswith(": 9.6 expected, up to 12")
    past, ahead = bars.strip().split("|")
    assert (len(past), past[0], past[-1], len(ahead)) == (48, "▂", "▇", 2)
    young = tide_lines(replace(TIDE, forecast=()), 100.0, 0.0)
    assert "a forecast takes a whole day (24h00) of the past" in young
    assert tide_lines(replace(TIDE, level=None), 100.0, 0.0) == "tide  no service has been deployed yet"


def test_a_reclaim_says_whom_it_took_what_and_how_long_that_was() -> None:
    row = handovers_table((DONE,), 100.0, 0.0, None).splitlines()[1]
    assert "reclaim  gpu-05  training -> inference  7.0 s, serving 9.5 s  120       fit 4 -> 2" in row
    assert row.endswith(REASON)
    loan = replace(
        DONE,
        kind="loan",
        is_return=False,
        reclaim_at_s=None,
        labelled_at_s=20.0,
        serving_at_s=None,
        affected=(),
        cost_s=0.0,
    )
    assert "loan  gpu-05  training -> inference  at once" in handovers_table((loan,), 100.0, 0.0, None)
    under_way = replace(DONE, state="draining", labelled_at_s=None, serving_at_s=None)
    assert "1m15 so far" in handovers_table((under_way,), 100.0, 0.0, None)
    called_off = replace(DONE, state="called off", labelled_at_s=None, serving_at_s=None)
    assert "called off" in handovers_table((called_off,), 100.0, 0.0, None)


def test_the_command_asks_for_so_many_days(springtide: Callable[..., Result], client: Any) -> None:
    client.pooled = report()
    result = springtide("pools", "--days", "3")
    assert result.exit_code == 0, result.output
    assert client.calls == [("pools", 3)]
    assert "gpu-02  training -> inference" in result.output
    told = json.loads(springtide("pools", "--json").output)
    assert told["handovers"][0]["serving_at_s"] == 34.5


def test_a_platform_without_pools_says_how_to_have_some() -> None:
    assert "springtide up --slots 4 --pools inference=2" in pools_text(report(pools=(), nodes=()))
    assert "no server has been loaned" in pools_text(report(handovers=()))


def test_top_and_ps_show_pools_where_there_are_some(springtide: Callable[..., Result], client: Any) -> None:
    assert "pools" not in springtide("ps").output
    client.pooled = report()
    assert "training 4 servers (2 on loan)" in springtide("ps").output
    shown = springtide("top").output
    assert "1 reclaiming" in shown
    assert "gpu-03" in shown
