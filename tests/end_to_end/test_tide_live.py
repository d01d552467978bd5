"""Compressed days (two, in CI one) on four real slots: a service under an open-loop tide, and two jobs.

The jobs train on what it leaves. The service answers within its objective, its idle slot is loaned by night and back by
day, and nothing is lost or run twice.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import os
import sys
from pathlib import Path

import httpx2
import pytest

from kits.end_to_end.live_platform import assert_exactly_once
from kits.end_to_end.open_loop import Answer, Tidal, ask_at, attained_fraction
from kits.simulation.sweeps import part
from springtide.control.controller import Controller
from springtide.control.journal.sqlite import SqliteJournal
from springtide.control.loop import verify
from springtide.control.quotes.budget import WithinBudget
from springtide.core.actions import DrainNode, LabelNode, PreemptJob, StartReplica, StopReplica
from springtide.core.events import NodeJoined, ReplicaLost, ReplicaReady, ReplicaStopped
from springtide.core.resources import admits
from springtide.scheduling.registry import make_policy
from springtide.service.assembly.pool_settings import tide_of
from springtide.service.platform import LOCAL_OVERHEADS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("tide")]
POLICY = "tide/springtide"
# Long enough that a night outlasts what a loan needs at least: some bins of the tide, the grace of a job and a start.
DAY_S = 90.0
NUM_DAYS = part(2, least=1)
# A batch of up to four takes 50 ms, so that one replica answers 80 requests a second at most. At night 4 are asked and
# by day 60, which are four at once and more: with three at once a replica counts as busy, so one is enough by night and
# two are by day.
SERVICE_S = 0.05
SLO_S = 0.5
STATED_FRACTION = 0.95
# On a machine with time for it none is refused; beside other work a replica answers fewer than it could.
REFUSED_FRACTION = 0.3
LOAD = Tidal(low_per_s=4.0, high_per_s=60.0, day_s=DAY_S)
SLOW_DOUBLE = f"""
import os
import time

class Double:
    def load(self):
        self.log = os.open(self.params["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def predict(self, numbers: list[float]) -> list[float]:
        time.sleep({SERVICE_S})
        os.write(self.log, "".join(f"{{number:.0f}}\\n" for number in numbers).encode())
        return [2 * number for number in numbers]
"""
# A step of a job takes 0.2 s on one worker and half of that on two: more than training can do in these days, so that it
# has work in every night.
NUM_EPOCHS = 110 * NUM_DAYS
SHARD_S = 0.05


@dataclasses.dataclass
class Story:
    """What the journal says of devices: who was where, and which label each node had."""

    labels: dict[str, str]
    owners: dict[str, str]
    changes: list[tuple[float, str, str, str]]
    drains: list[tuple[float, DrainNode]]
    held: list[tuple[float, float, str, bool]]
    ready: list[tuple[float, int]]
    num_preemptions: int = 0


def read_story(journal: SqliteJournal) -> Story:
    """Walk the journal; a replica may start only where the label of its node admits it at that moment."""
    story = Story({}, {}, [], [], [], [])
    open_holds: dict[str, tuple[float, str, bool]] = {}
    ready: set[str] = set()
    now_s = 0.0
    for _, step in journal.read():
        now_s = step.now_s
        for event in step.events:
            if isinstance(event, NodeJoined):
                story.labels.setdefault(event.node.node_id, event.node.pool)
                story.owners[event.node.node_id] = event.node.owner
            elif isinstance(event, ReplicaReady) and open_holds[event.replica_id][2] is False:
                ready.add(event.replica_id)
            elif isinstance(event, ReplicaStopped | ReplicaLost) and event.replica_id in open_holds:
                from_s, node_id, is_job = open_holds.pop(event.replica_id)
                story.held.append((from_s, now_s, node_id, is_job))
                ready.discard(event.replica_id)
        for action in step.actions:
            if isinstance(action, LabelNode):
                before = story.labels[action.node_id]
                if before != action.pool:
                    story.changes.append((now_s, action.node_id, before, action.pool))
                    held = {is_job for _, node_id, is_job in open_holds.values() if node_id == action.node_id}
                    assert all(admits(action.pool, is_job=is_job) for is_job in held), "a label over who is still there"
                story.labels[action.node_id] = action.pool
            elif isinstance(action, DrainNode):
                story.drains.append((now_s, action))
            elif isinstance(action, StartReplica) and action.replica_id not in open_holds:
                node_id = action.device_id.partition("/")[0]
                is_job = hasattr(action.workload, "job_id")
                assert admits(story.labels[node_id], is_job=is_job), f"{action.replica_id} starts on {node_id}"
                open_holds[action.replica_id] = (now_s, node_id, is_job)
            elif isinstance(action, StopReplica):
                ready.discard(action.replica_id)
            elif isinstance(action, PreemptJob):
                story.num_preemptions += 1
        story.ready.append((now_s, len(ready)))
    story.held += [(from_s, now_s, node_id, is_job) for from_s, node_id, is_job in open_holds.values()]
    return story


def training_device_s(story: Story, began_s: float, *, at_night: bool) -> float:
    """Device-seconds that jobs held in the nights or the days of the load, to a tenth of a second."""
    moments = [number / 10 for number in range(int(NUM_DAYS * DAY_S * 10)) if LOAD.is_night(number / 10) == at_night]
    held = [(from_s - began_s, until_s - began_s) for from_s, until_s, _, is_job in story.held if is_job]
    return sum(sum(from_s <= at_s < until_s for from_s, until_s in held) for at_s in moments) / 10


async def type_command(state_dir: Path, *words: str) -> str:
    """`springtide WORDS` as a user types it, beside the load."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "springtide", "--state", str(state_dir), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    return told.decode()


async def look(state_dir: Path, jobs: list[str], at_s: float) -> dict[str, str]:
    """What people see at that moment of the load."""
    await asyncio.sleep(at_s)
    asked = (("ps",), ("why", jobs[0]), ("why", "double"), ("logs", "double"))
    return {" ".join(words): await type_command(state_dir, *words) for words in asked}


@dataclasses.dataclass
class Lived:
    """What became of the requests to a service at rest, of the tide's, and of looks at the platform all the while."""

    calm: list[Answer]
    answers: list[Answer]
    probes: list[Answer]
    began_s: float
    seen: dict[str, str]

    def when_the_machine_answered(self) -> list[Answer]:
        """The requests around which the platform gave its sign of life at once.

        Where the machine itself was too busy with others to run it, no service could have answered in time.
        """
        slow_s = [probe.due_s for probe in self.probes if probe.status != 200 or probe.latency_s > SERVICE_S]
        busy = {int(due_s + late_s) for due_s in slow_s for late_s in (-1.0, 0.0, 1.0)}
        return [answer for answer in self.answers if int(answer.due_s) not in busy]


async def live_through_the_days(platform, jobs: list[str]) -> Lived:
    """First a few requests to a service at rest, then the tide; beside it a user looks at noon of the last day."""
    url, headers = str(platform.http.base_url), dict(platform.http.headers)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=50)
    headers = {"Authorization": headers["authorization"]}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=30.0, limits=limits, trust_env=False) as http:
        calm = await ask_at(http, "/f/double", [0.25 * number for number in range(20)])
        began_s = platform.request("GET", "/v1/status")["now_s"]
        arrivals = LOAD.arrivals(NUM_DAYS * DAY_S, seed=11)
        seen, answers, probes = await asyncio.gather(
            look(platform.state_dir, jobs, (NUM_DAYS - 0.5) * DAY_S),
            ask_at(http, "/f/double", arrivals, first=len(calm)),
            ask_at(http, "/healthz", [number / 5 for number in range(int(NUM_DAYS * DAY_S * 5))]),
        )
    return Lived(calm, answers, probes, began_s, seen)


def check_service(lived: Lived, story: Story, answered: list[int]) -> None:
    """No request was forgotten, each that was let in got the answer to its question, once, and in time.

    What a busy machine cannot answer in time is refused at once, as the service has an SLO.
    """
    asked = [*lived.calm, *lived.answers]
    let_in = [answer for answer in asked if answer.status != 429]
    assert len(asked) - len(let_in) <= REFUSED_FRACTION * len(asked)
    assert collections.Counter(answer.status for answer in let_in) == {200: len(let_in)}
    assert all(answer.value == [2.0 * answer.number] for answer in let_in)
    assert collections.Counter(answered) == dict.fromkeys([-1, *(answer.number for answer in let_in)], 1)
    fair = [answer for answer in lived.when_the_machine_answered() if answer.status == 200]
    assert len(fair) >= len(lived.answers) / 10, "the machine is too busy with others for a service to be judged"
    assert attained_fraction(fair, SLO_S) >= STATED_FRACTION
    first_ready_s = next(at_s for at_s, count in story.ready if count)
    while_asked = [count for at_s, count in story.ready if first_ready_s <= at_s < lived.began_s + NUM_DAYS * DAY_S]
    assert min(while_asked) >= 1, "the guaranteed minimum was not there"
    assert max(while_asked) >= 2, "the day never had a second replica"


def check_loans(lived: Lived, story: Story) -> None:
    """Every night training has a slot more than it owns, every day inference has all of its own again.

    Which slot that is does not matter: the strategy takes the one whose job loses least.
    """
    serving = {node_id for node_id, pool in story.owners.items() if pool == "inference"}
    num_owned = len(serving)
    moved: list[tuple[float, int]] = [(-lived.began_s, num_owned)]
    for at_s, node_id, _, pool in story.changes:
        serving = serving | {node_id} if pool == "inference" else serving - {node_id}
        moved.append((at_s - lived.began_s, len(serving)))
    for day in range(NUM_DAYS):
        seen: dict[bool, set[int]] = {True: set(), False: set()}
        for number in range(int(DAY_S)):
            at_s = day * DAY_S + number
            seen[LOAD.is_night(at_s)].add(next(count for since_s, count in reversed(moved) if since_s <= at_s))
        assert min(seen[True]) < num_owned, f"nothing was on loan in the night of day {day + 1}: {moved}"
        assert max(seen[False]) >= num_owned, f"inference never had its slots on day {day + 1}: {moved}"
    pools = [pool for _, _, _, pool in story.changes]
    assert pools.count("training") >= NUM_DAYS
    assert pools.count("inference") >= NUM_DAYS


def told(lived: Lived, story: Story) -> str:
    """The figures of the run, and what was seen of it."""
    nights_s, days_s = (training_device_s(story, lived.began_s, at_night=at_night) for at_night in (True, False))
    latencies = sorted(answer.latency_s for answer in lived.answers)
    fair = lived.when_the_machine_answered() or lived.answers
    changes = [f"{at_s - lived.began_s:.1f} s {node_id} -> {pool}" for at_s, node_id, _, pool in story.changes]
    drains = [f"{at_s - lived.began_s:.1f} s {drain.node_id}: {drain.reason}" for at_s, drain in story.drains]
    return "\n".join(
        [
            f"{len(latencies)} requests: p50 {latencies[len(latencies) // 2]:.3f} s, "
            f"p99 {latencies[int(0.99 * len(latencies))]:.3f} s, within {SLO_S} s "
            f"{attained_fraction(lived.answers, SLO_S):.4f}; of the {len(fair)} while the machine answered "
            f"{attained_fraction(fair, SLO_S):.4f}",
            f"training held {nights_s:.0f} device-seconds by night and {days_s:.0f} by day, "
            f"{story.num_preemptions} preemptions",
            *("labels: " + "; ".join(changes), "drains: " + "; ".join(drains)),
            *(f"$ springtide {words}\n{text}" for words, text in lived.seen.items()),
        ]
    )


def test_days_of_a_service_and_two_jobs(platform, tmp_path):
    platform.start(policy="springtide", options=("--pools", "inference=2", "--day", str(DAY_S)))
    log = tmp_path / "answered.txt"
    source = {"filename": "double.py", "text": SLOW_DOUBLE, "object_name": "Double", "kind": "class"}
    bounds = {"min_replicas": 1, "max_replicas": 3, "slo_s": SLO_S, "target_in_flight": 3, "max_batch_size": 4}
    body = {"source": source, "options": {**bounds, "params": {"log": str(log)}}}
    platform.request("PUT", "/v1/services/double", body)
    jobs = [platform.submit(name, num_epochs=NUM_EPOCHS, shard_s=SHARD_S) for name in ("first", "second")]
    for job_id in jobs:
        platform.wait_job(job_id, 60.0, states=("RUNNING",))
    assert platform.request("POST", "/f/double", {"numbers": [-1.0]})["outputs"] == [-2.0]
    lived = asyncio.run(live_through_the_days(platform, jobs))
    ended = [platform.wait_job(job_id, 240.0) for job_id in jobs]
    platform.stop()

    journal = SqliteJournal(platform.state_dir / "journal.db", read_only=True)
    story = read_story(journal)
    print(told(lived, story))
    check_service(lived, story, [int(line) for line in log.read_text().split()])
    check_loans(lived, story)
    nights_s, days_s = (training_device_s(story, lived.began_s, at_night=at_night) for at_night in (True, False))
    assert nights_s > days_s
    for job_id, status in zip(jobs, ended, strict=True):
        assert status["state"] == "SUCCEEDED", status["reason"]
        assert status["num_restarts"] == 0
        assert_exactly_once(platform.workload(job_id), num_samples=96, batch=16, num_epochs=NUM_EPOCHS)
    policy = WithinBudget(make_policy(POLICY), 0.0)
    assert verify(Controller(policy, overheads=LOCAL_OVERHEADS, tide=tide_of(DAY_S)), journal) > 10
    journal.close()
