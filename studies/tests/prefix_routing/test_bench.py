"""The bench of routing by prefixes, on a part of the recorded trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.prefix_routing.bench import row_of, run_bench
from springtide_studies.prefix_routing.engine import ModelledEngine, StepTimes
from springtide_studies.prefix_routing.play import RoutingRule, play
from springtide_studies.prefix_routing.trace import (
    RecordedPrompt,
    hits_of_belady,
    hits_of_one_cache,
    read_prompts,
)

TRACE = Path(__file__).parents[3] / "tests" / "fixtures" / "prompts" / "conversations.jsonl"


def test_one_cache_finds_what_was_there_before_and_belady_no_less() -> None:
    prompts = [RecordedPrompt(0.0, 1, 1, ids) for ids in ((0, 1), (0, 2), (0, 1), (3,), (0, 1))]
    assert hits_of_one_cache(prompts, 9) == 1 + 2 + 2
    trace = read_prompts(TRACE)
    for capacity in (20, 100, 400, 10_000):
        assert hits_of_belady(trace, capacity) >= hits_of_one_cache(trace, capacity)
    assert hits_of_belady(trace, 10_000) == hits_of_one_cache(trace, 10_000)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"timestamp": "x"}\n')
    for name in ("odd.jsonl", "absent.jsonl"):
        with pytest.raises(InvalidRequest, match="is no trace"):
            read_prompts(tmp_path / name)


def test_an_engine_reads_in_pieces_and_writes_one_token_a_step() -> None:
    told: list[tuple[str, int, float]] = []
    times = StepTimes(step_s=1.0, prompt_token_s=0.0, answer_s=0.0, context_token_s=0.0, piece=512)
    engine = ModelledEngine(
        100,
        times,
        lambda number, at_s, part: told.append(("began", number, at_s)),
        lambda number: told.append(("ended", number, 0.0)),
    )
    engine.add(0, RecordedPrompt(0.0, 1024, 3, (0, 1)))
    engine.add(1, RecordedPrompt(0.0, 1030, 1, (0, 1, 2)))
    engine.finish()
    assert told == [("began", 0, 2.0), ("began", 1, 3.0), ("ended", 1, 0.0), ("ended", 0, 0.0)]
    assert (engine.num_hits, engine.busy_s) == (2, 4.0)


def test_prefixes_are_near_one_cache_and_the_longest_match_sends_all_to_one_replica() -> None:
    prompts = read_prompts(TRACE)
    pooled = hits_of_one_cache(prompts, 4_000)
    ours = play(prompts, RoutingRule(), capacity=2_000, stretch=0.12)
    longest = play(prompts, RoutingRule(name="longest match"), capacity=2_000, stretch=0.12)
    load = play(prompts, RoutingRule(name="load"), capacity=2_000, stretch=0.12)
    assert ours.num_hits >= 0.97 * pooled > load.num_hits
    assert max(ours.share_of_requests, ours.share_of_work) <= 0.6
    assert longest.share_of_requests == 1.0
    assert row_of("ours", ours, pooled)["ratio"] == ours.num_hits / pooled


@pytest.mark.slow
def test_the_bench_says_whether_the_bounds_hold() -> None:
    options = {"trace": str(TRACE), "half": "second", "stretch": 0.2, "seed": 0}
    report = run_bench(options, lambda: 0.0, lambda line: None)
    assert {row["unit"] for row in report["rows"]} == {"hits"}
    assert report["settings"]["prompts"] == 126
