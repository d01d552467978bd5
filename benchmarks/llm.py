"""Continuous batching against one answer after the other, and what the gateway adds to the first token.

    python benchmarks/llm.py MODEL                       the engine alone, in this process
    python benchmarks/llm.py --url URL --token TOKEN     a deployed service, of which no other client asks meanwhile
    python benchmarks/llm.py --url URL --token TOKEN --replica PID --gateway PID      processor time of both, by streams

Prints JSON lines. Rounds are interleaved; compare ratios, and CPU seconds where other work shares the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_TOKENS = 32
_STREAMS = (1, 4, 16)
_GATEWAY_STREAMS, _STREAM_TOKENS = (1, 8, 16), 64
# Of processes below a replica.
_DEPTH = 3


def _prompt(number: int) -> list[int]:
    return [5 + (number * 7 + place * 3) % 200 for place in range(16)]


async def _timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Wall and CPU seconds of the work."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    await work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


async def compare_engines(model: str, rounds: int) -> None:
    """Tokens a second of `generate`, one prompt after the other, and of the engine with all of them at once."""
    import torch

    from springtide.runtime.serving.llm.engine import Sampling
    from springtide.runtime.serving.llm.transformers_engine import TransformersEngine
    from springtide.serving.llm_settings import LlmSettings

    engine = TransformersEngine(LlmSettings(name="bench", model=model, cache_mb=256))
    await engine.start()
    sampling = Sampling(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)

    async def one_by_one(num: int) -> None:
        for number in range(num):
            given = {"do_sample": False, "max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS}
            engine._model.generate(torch.tensor([_prompt(number)]), **given)

    async def answer(number: int) -> None:
        async for _ in engine.generate(_prompt(number), sampling):
            pass

    async def together(num: int) -> None:
        await asyncio.gather(*(answer(number) for number in range(num)))

    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    try:
        for _ in range(rounds):
            for num in _STREAMS:
                for way in (one_by_one, together):
                    found.setdefault((num, way.__name__), []).append(await _timed(lambda w=way, n=num: w(n)))
    finally:
        await engine.close()
    for num in _STREAMS:
        told: dict[str, Any] = {"streams": num, "tokens_each": _TOKENS, "rounds": rounds}
        for index, kind in enumerate(("wall", "cpu")):
            rates = {
                way: statistics.median(num * _TOKENS / times[index] for times in found[num, way])
                for way in ("one_by_one", "together")
            }
            told |= {f"{way}_per_{kind}_s": round(rate, 1) for way, rate in rates.items()}
            told[f"{kind}_ratio"] = round(rates["together"] / rates["one_by_one"], 2)
        print(json.dumps(told))


def measure_hop(url: str, token: str, num: int) -> None:
    """The mean time to the first token as a client sees it, and as the replica measures it of the same requests."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    name = url.rstrip("/").rpartition("/")[2]

    def observed() -> tuple[float, float]:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=headers)) as answer:
            lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        first = "springtide_llm_first_token_seconds"
        return float(lines[f"{first}_count"]), float(lines[f"{first}_sum"])

    body = {"model": name, "prompt": _prompt(0), "max_tokens": 4, "stream": True, "ignore_eos": True}
    before = observed()
    seen = []
    for _ in range(num):
        began_s = time.perf_counter()
        asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked) as answer:
            answer.readline()
            seen.append(time.perf_counter() - began_s)
            answer.read()
    after = observed()
    inside_s = (after[1] - before[1]) / (after[0] - before[0])
    outside_s = statistics.mean(seen)
    told = {"requests": num, "first_token_ms": {"client": outside_s * 1000, "replica": inside_s * 1000}}
    told["added_ms"] = (outside_s - inside_s) * 1000
    print(json.dumps(told))


def _used_s(parent: int) -> float:
    """Processor seconds that a process and the ones below it have used so far."""
    fields = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    family = {parent}
    for _ in range(_DEPTH):
        family |= {pid for pid, values in fields.items() if int(values[1]) in family}
    ticks = sum(int(fields[pid][11]) + int(fields[pid][12]) for pid in family if pid in fields)
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_streams(url: str, token: str, pids: dict[str, int], rounds: int) -> None:
    """Tokens for each processor second of the replica, and the gateway's for each token, at 1, 8 and 16 streams."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    name = url.rstrip("/").rpartition("/")[2]

    def stream(number: int) -> None:
        words = [{"role": "user", "content": f"{number} {'the quick brown fox ' * 3}"}]
        asked = {"model": name, "messages": words, "max_tokens": _STREAM_TOKENS, "stream": True}
        body = json.dumps(asked | {"temperature": 0, "ignore_eos": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as answer:
            answer.read()

    found: dict[int, list[dict[str, float]]] = {}
    with ThreadPoolExecutor(max(_GATEWAY_STREAMS)) as clients:
        for _ in range(rounds):
            for num in _GATEWAY_STREAMS:
                before = {part: _used_s(pid) for part, pid in pids.items()}
                # So many one after the other that the clock of processor time, of 10 ms, does not matter.
                for _ in range(max(_GATEWAY_STREAMS) // num):
                    list(clients.map(stream, range(num)))
                found.setdefault(num, []).append({part: _used_s(pid) - before[part] for part, pid in pids.items()})
    num_tokens = max(_GATEWAY_STREAMS) * _STREAM_TOKENS
    for num, used in found.items():
        rates = sorted(num_tokens / each["replica"] for each in used)
        told = {"streams": num, "tokens_each": _STREAM_TOKENS, "rounds": rounds}
        told |= {"tokens_per_cpu_s": {"min": rates[0], "median": statistics.median(rates), "max": rates[-1]}}
        told["gateway_us_per_token"] = statistics.median(each["gateway"] for each in used) / num_tokens * 1e6
        print(json.dumps(told))


def main() -> None:
    """Read the arguments, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--url")
    parser.add_argument("--token", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--replica", type=int)
    parser.add_argument("--gateway", type=int)
    given = parser.parse_args()
    if given.model:
        asyncio.run(compare_engines(given.model, given.rounds))
    if given.url and given.replica:
        pids = {"replica": given.replica, "gateway": given.gateway}
        measure_streams(given.url.rstrip("/"), given.token, pids, given.rounds)
    elif given.url:
        measure_hop(given.url.rstrip("/"), given.token, given.requests)


if __name__ == "__main__":
    main()
