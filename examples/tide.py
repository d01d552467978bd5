"""A service and training jobs share four slots: what the service does not need at night trains, and comes back by day.

springtide up --slots 4 --pools inference=2 --day 2m     two slots are the service's, and a day takes two minutes
springtide deploy examples/tide.py                       one replica is guaranteed, more come with the load
springtide run examples/tide.py --detach                 a job of one to four workers; type it twice for two of them
python examples/tide.py 4m                               two days of requests
springtide top                                           in another terminal: watch the slots change hands

springtide pools says what was loaned and taken back, springtide why ID why a job has the workers that it has.
"""

from __future__ import annotations

import math
import queue
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import springtide as st
from springtide.core.quantities import parse_duration_s

DAY_S = 120.0
NIGHT_PER_S, NOON_PER_S = 3.0, 45.0


@st.serve(slo="p99 < 500ms", scale=(1, 3), in_flight=2, name="reader")
class Reader:
    """Stands for a model that takes 50 ms, however many of up to eight texts it reads at once."""

    def predict(self, texts: list[str]) -> list[int]:
        """The number of words of each text."""
        time.sleep(0.05)
        return [len(text.split()) for text in texts]


@st.train(epochs=60, global_batch=64, workers=(1, 4), name="wave")
def wave(ctx: st.TrainContext) -> None:
    """Learns a wave, slowly enough to watch it: 16 samples take a twentieth of a second."""
    x = torch.linspace(-3, 3, 512).unsqueeze(1)
    layers = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    model, _optimizer = ctx.prepare(layers, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    for batch in ctx.batches((x, torch.sin(x))):
        time.sleep(float(ctx.params.get("shard_s", "0.05")) * len(batch.x) / 16)
        ctx.step(nn.functional.mse_loss(model(batch.x), batch.y))


def tide(duration_s: float) -> list[float]:
    """Send requests as people would, more by day than by night and never waiting; return how long each took."""
    draw = random.Random(0)
    free: queue.SimpleQueue[st.Client] = queue.SimpleQueue()
    for _ in range(32):
        free.put(st.connect())

    def ask(due_s: float) -> float:
        client = free.get()
        try:
            assert client.infer("reader", texts=["the tide goes out"]) == [4]
        finally:
            free.put(client)
        return time.monotonic() - due_s

    with ThreadPoolExecutor(32) as asking:
        began_s = due_s = time.monotonic()
        asked = []
        while (due_s := due_s + draw.expovariate(NOON_PER_S)) < began_s + duration_s:
            noon = (1 - math.cos(2 * math.pi * (due_s - began_s) / DAY_S)) / 2
            if draw.random() * NOON_PER_S < NIGHT_PER_S + (NOON_PER_S - NIGHT_PER_S) * noon:
                time.sleep(max(0.0, due_s - time.monotonic()))
                asked.append(asking.submit(ask, due_s))
        return sorted(answer.result() for answer in asked)


if __name__ == "__main__":
    took_s = tide(parse_duration_s(sys.argv[1] if len(sys.argv) > 1 else "2m"))
    print(
        f"{len(took_s)} requests answered: half of them within {1000 * took_s[len(took_s) // 2]:.0f} ms, "
        f"99 of 100 within {1000 * took_s[int(0.99 * len(took_s))]:.0f} ms"
    )
