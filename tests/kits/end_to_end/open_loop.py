"""An open-loop load: requests are sent at moments drawn beforehand, whatever the answers; and what became of them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import Sequence

import httpx2


@dataclasses.dataclass(frozen=True)
class Tidal:
    """A rate that rises from `low` to `high` by the middle of each day and falls again, in requests a second.

    The square makes nights longer than days: for half of the time less than a quarter of the way to `high` is asked.
    """

    low_per_s: float
    high_per_s: float
    day_s: float

    def rate_per_s(self, at_s: float) -> float:
        return self.low_per_s + (self.high_per_s - self.low_per_s) * ((1 - self._phase(at_s)) / 2) ** 2

    def is_night(self, at_s: float) -> bool:
        """Whether it is the half of a day in which less is asked for."""
        return self._phase(at_s) > 0

    def _phase(self, at_s: float) -> float:
        return math.cos(2 * math.pi * at_s / self.day_s)

    def arrivals(self, duration_s: float, seed: int) -> list[float]:
        """The moments of a Poisson process of this rate, by thinning one of the highest rate."""
        draw = random.Random(seed)
        moments, at_s = [], 0.0
        while (at_s := at_s + draw.expovariate(self.high_per_s)) < duration_s:
            if draw.random() * self.high_per_s < self.rate_per_s(at_s):
                moments.append(at_s)
        return moments


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request: when it was due, its status (0: none came), its answer and how long after it was due that was."""

    number: int
    due_s: float
    status: int
    value: object
    latency_s: float


def attained_fraction(answers: Sequence[Answer], slo_s: float) -> float:
    """The share of all requests that were answered, and within the objective."""
    return sum(answer.status == 200 and answer.latency_s <= slo_s for answer in answers) / len(answers)


async def ask_at(http: httpx2.AsyncClient, path: str, moments: Sequence[float], first: int = 0) -> list[Answer]:
    """Send request `first + n` at `moments[n]` seconds from now, none of them waiting for another.

    To an inference function its number is what is asked, any other path is only fetched.
    """
    began_s = time.monotonic()

    async def ask(number: int, due_s: float) -> Answer:
        try:
            if path.startswith("/f/"):
                response = await http.post(path, json={"numbers": [number]})
                value = response.json().get("outputs")
            else:
                response = await http.get(path)
                value = None
            status = response.status_code
        except httpx2.HTTPError as error:
            status, value = 0, repr(error)
        return Answer(number, due_s, status, value, time.monotonic() - began_s - due_s)

    asked = []
    for number, due_s in enumerate(moments, start=first):
        left_s = due_s - (time.monotonic() - began_s)
        if left_s > 0:
            await asyncio.sleep(left_s)
        asked.append(asyncio.create_task(ask(number, due_s)))
    return list(await asyncio.gather(*asked))
