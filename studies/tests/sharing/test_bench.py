"""The bench of shared devices: its load is drawn beforehand and sent on time, its verdict follows from the trials."""

from __future__ import annotations

import asyncio
import time

import pytest

from springtide.core.shares import has_room, load_of
from springtide.core.status.shares import SharingStatus
from springtide_studies.sharing.bench import ARMS, SERVICE_SHARE, TRAINING_SHARE, _in_turn, _load
from springtide_studies.sharing.load import LoadReply, Order, Surge, Target, draw_moments, send_all
from springtide_studies.sharing.report import (
    SharingFigures,
    arms_table,
    make_report,
    percentile,
)
from springtide_studies.sharing.trial import SERVICES, SharingTrial, is_violation

LOAD = _load(100, is_small=True)
FIGURES = SharingFigures(
    seed=3, device_cpus=0.5, request_cpu_s=0.0045, request_of_four_cpu_s=0.003, machine={"cpus": 2}
)


def answers(num: int, num_late: int, num_refused: int = 0) -> tuple[LoadReply, ...]:
    """So many requests, the first of them late or refused."""
    made = []
    for index in range(num):
        due_s = LOAD.duration_s * index / num
        latency_s = 2 * LOAD.slo_s if index < num_late else LOAD.slo_s / 4
        status = 503 if num_late <= index < num_late + num_refused else 200
        made.append(LoadReply(due_s=due_s, sent_s=due_s + 0.001, answered_s=due_s + latency_s, status=status))
    return tuple(made)


def trial(
    arm: str, num_late: int, num_steps: int, *, device: str = "", cpu_s: float = 1.0, mechanism: str = "cgroup-v1"
) -> SharingTrial:
    """One trial in which each service had 400 requests, `num_late` of them too late."""
    names = (*SERVICES, "training")
    return SharingTrial(
        arm=arm,
        repetition=0,
        duration_s=LOAD.duration_s,
        answers=(answers(400, num_late), answers(400, num_late)),
        num_steps=num_steps,
        cpu_s=dict.fromkeys(names, cpu_s),
        devices={name: device or f"local/{index}" for index, name in enumerate(names)},
        sharing=SharingStatus(mechanism=mechanism),
        states={"NONE": 2},
        load_1m=0.5,
    )


def report(*trials: SharingTrial):
    return make_report(ARMS, LOAD, trials, FIGURES)


def test_arrivals_are_those_of_the_rate_and_of_its_surges():
    surges = (Surge(from_s=200.0, until_s=400.0, factor=4.0),)
    moments = draw_moments(10.0, 1000.0, surges, seed=5)
    assert moments == draw_moments(10.0, 1000.0, surges, seed=5)
    assert moments != draw_moments(10.0, 1000.0, surges, seed=6)
    assert list(moments) == sorted(moments)
    within = [moment for moment in moments if 200.0 <= moment < 400.0]
    assert len(within) == pytest.approx(8000, rel=0.05)
    assert len(moments) - len(within) == pytest.approx(8000, rel=0.05)


def test_a_request_goes_out_when_it_is_due_although_the_one_before_has_no_answer_yet():
    """An open loop: a server that answers late makes latency, not less load; a silent one makes failures."""
    seen: list[float] = []

    async def slow_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                assert b"Bearer secret" in head
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
                seen.append(time.monotonic())
                if len(seen) == 4:
                    return
                while len(seen) < 3:
                    await asyncio.sleep(0)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def play() -> list[list[LoadReply]]:
        server = await asyncio.start_server(slow_server, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        targets = (Target(path="/f/x", body="{}", moments=(0.0, 0.01, 0.02)),)
        order = Order(port=port, token="secret", starts_at_s=time.monotonic(), timeout_s=20.0, targets=targets)
        first = await send_all(order)
        late = (Target(path="/f/x", body="{}", moments=(0.0,)),)
        silent = Order(port=port, token="secret", starts_at_s=time.monotonic(), timeout_s=0.05, targets=late)
        second = await send_all(silent)
        server.close()
        return [*first, *second]

    answered, unanswered = asyncio.run(play())
    assert [answer.status for answer in answered] == [200, 200, 200]
    assert [answer.due_s for answer in answered] == [0.0, 0.01, 0.02]
    assert all(answer.sent_s >= answer.due_s for answer in answered)
    assert answered[0].answered_s >= answered[2].sent_s, "the first was not waited for"
    assert unanswered[0].status == 0


@pytest.mark.slow
def test_a_connection_that_the_server_closed_meanwhile_fails_no_request():
    num_connections = 0

    async def forgetful_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def play() -> list[LoadReply]:
        server = await asyncio.start_server(forgetful_server, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        targets = (Target(path="/f/x", body="{}", moments=(0.0, 0.3, 0.6)),)
        order = Order(port=port, token="t", starts_at_s=time.monotonic(), timeout_s=20.0, targets=targets)
        (answers,) = await send_all(order)
        server.close()
        return answers

    assert [answer.status for answer in asyncio.run(play())] == [200, 200, 200]
    assert num_connections == 3


def test_latency_counts_from_when_a_request_was_due_not_from_when_it_was_sent():
    stalled = LoadReply(due_s=1.0, sent_s=1.5, answered_s=1.51, status=200)
    assert is_violation(stalled, 0.12)
    assert not is_violation(LoadReply(due_s=1.0, sent_s=1.0, answered_s=1.1, status=200), 0.12)
    assert is_violation(LoadReply(due_s=1.0, sent_s=1.0, answered_s=1.1, status=503), 0.12), "a refusal is no answer"


def test_the_shares_of_every_arm_fit_on_one_device():
    shares = [SERVICE_SHARE, SERVICE_SHARE, TRAINING_SHARE]
    for index, share in enumerate(shares):
        assert has_room(load_of(shares[:index]), share, max_limit=1.5)
    static = next(arm for arm in ARMS if arm.name == "static")
    assert static.service == static.job
    assert static.service.request == static.service.limit
    assert has_room(load_of([static.service, static.service]), static.job)


def test_every_arm_has_its_turn_in_every_repetition_and_another_begins():
    turns = [[arm.name for arm in _in_turn(ARMS, repetition)] for repetition in range(4)]
    assert len({turn[0] for turn in turns}) == len(ARMS)
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)


def test_it_passes_when_services_and_training_both_keep_what_they_need():
    told = report(trial("exclusive", 8, 1000), trial("static", 40, 330, device="local/0"),
                  trial("ours", 10, 400, device="local/0"))  # fmt: skip
    assert told["passed"], told["rows"]
    ours = told["arms"][2]
    assert ours["training_of_exclusive"] == pytest.approx(0.4)
    assert ours["training_of_request"] == pytest.approx(1.0)
    assert ours["training_per_cpu_of_exclusive"] == pytest.approx(0.4), "the same CPU time for fewer steps"
    assert ours["services"]["first"]["violation_fraction"] == pytest.approx(10 / 400)
    assert ours["sum_of_exclusive"] == pytest.approx(0.4 + 2 * 390 / 392)
    beside = next(row for row in told["rows"] if row["baseline_name"] == "static")
    assert beside["ratio"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("late", "steps", "device", "cpu_s", "why"),
    [
        (11, 400, "local/0", 1.0, "more than 1.3 times exclusive's misses"),
        (8, 350, "local/0", 1.0, "training below nine tenths of its request"),
        (8, 400, "", 1.0, "nobody shares a device at all"),
        (8, 400, "local/0", 2.3, "a device that is larger than a device"),
    ],
)
def test_it_does_not_pass(late, steps, device, cpu_s, why):
    exclusive, ours = trial("exclusive", 8, 1000), trial("ours", late, steps, device=device, cpu_s=cpu_s)
    assert not report(exclusive, ours)["passed"], why


def test_it_does_not_pass_where_nobody_is_held_to_anything():
    free = (trial("exclusive", 8, 1000, mechanism="none"), trial("ours", 8, 400, device="local/0", mechanism="none"))
    told = report(*free)
    assert not told["passed"]
    assert "nobody is held to a share on this machine" in told["problems"][0]


def test_where_exclusive_misses_next_to_nothing_one_request_in_a_hundred_is_the_measure():
    assert report(trial("exclusive", 0, 1000), trial("ours", 5, 400, device="local/0"))["passed"]
    assert not report(trial("exclusive", 0, 1000), trial("ours", 6, 400, device="local/0"))["passed"]


def test_requests_that_got_no_answer_have_no_percentile():
    assert percentile([], 0.5) == float("inf")
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    refused = trial("exclusive", 0, 1000)
    refused = SharingTrial(**{**{f: getattr(refused, f) for f in SharingTrial.__struct_fields__},
                       "answers": (answers(400, 0, 400), answers(400, 0))})  # fmt: skip
    services = report(refused)["arms"][0]["services"]
    assert services["first"]["p50_s"] is None
    assert services["first"]["num_unanswered"] == 400


def test_the_table_has_a_line_for_each_arm_and_service():
    header, rows = arms_table(report(trial("exclusive", 8, 1000), trial("ours", 10, 400, device="local/0")))
    assert len(rows) == 4
    assert all(len(row) == len(header) for row in rows)
    assert rows[2][:4] == ("ours", "1", "40%", "100%")
