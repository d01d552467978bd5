"""The engine by transformers with a tiny model: what it writes, what it refuses, and its end."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from kits.runtime.tiny_llm import write_tiny_llm
from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.llm.engine import EngineFailed, Sampling
from springtide.runtime.serving.llm.load import load_application
from springtide.serving.llm_settings import LlmSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_llm(tmp_path_factory.mktemp("llm") / "model", context=128))


@asynccontextmanager
async def started(model):
    from springtide.runtime.serving.llm.transformers_engine import TransformersEngine

    engine = TransformersEngine(LlmSettings(name="tiny", model=model, cache_mb=8))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def written(engine, prompt, sampling=GREEDY):
    return "".join([piece.text async for piece in engine.generate(prompt, sampling)])


def test_company_changes_no_answer_and_what_would_end_the_batching_is_refused(model):
    import torch

    async def scenario():
        async with started(model) as engine:
            prompts = [[5 + number, 70, 80 + number] for number in range(6)]
            given = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
            ids = [engine._model.generate(torch.tensor([prompt]), **given)[0, 3:].tolist() for prompt in prompts]
            expected = [engine._tokenizer.decode(each, skip_special_tokens=True) for each in ids]
            seeded = Sampling(max_tokens=12, seed=11, top_p=0.9, ignore_eos=True)
            alone = await written(engine, prompts[0], seeded)
            found = await asyncio.gather(
                *(written(engine, prompt) for prompt in prompts),
                written(engine, prompts[0], seeded),
                written(engine, prompts[1], Sampling(max_tokens=12, temperature=1e-9)),
            )
            assert found[:6] == expected
            assert found[6] == alone
            assert alone != await written(engine, prompts[0], Sampling(max_tokens=12, seed=12, ignore_eos=True))
            for prompt, sampling in (([], GREEDY), ([5] * 120, GREEDY), ([10**6], GREEDY), ([-1], GREEDY)):
                with pytest.raises(InvalidRequest):
                    await written(engine, prompt, sampling)
            for template, why in (
                ("{{ raise_exception('odd') }}", "does not take these messages"),
                (None, "has no chat"),
            ):
                engine._tokenizer.chat_template = template
                with pytest.raises(InvalidRequest, match=why):
                    await engine.render([{"role": "user", "content": "x"}], [])
            full = Sampling(max_tokens=engine.context - 100, temperature=0.0, ignore_eos=True)
            await asyncio.gather(*(written(engine, [5 + number] * 100, full) for number in range(4)))
            assert engine.failure == ""

    asyncio.run(scenario())


def test_when_the_batching_ends_all_answers_fail_and_say_why(model):
    async def scenario():
        async with started(model) as engine:

            async def first_piece_and_rest():
                pieces = engine.generate([5, 6], Sampling(max_tokens=100, ignore_eos=True))
                await anext(pieces)

                def fail(model):
                    raise RuntimeError("planted")

                engine._manager.batch_processor._generation_step = fail
                async for _ in pieces:
                    pass

            with pytest.raises(EngineFailed, match="planted"):
                await first_piece_and_rest()
            async with asyncio.timeout(30):
                while not engine.failure:
                    await asyncio.sleep(0.01)
            with pytest.raises(EngineFailed, match="planted"):
                await written(engine, [5])

    asyncio.run(scenario())


def test_what_is_no_model_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"there is no config\.json"):
        load_application(LlmSettings(name="x", model=str(tmp_path / "empty")))
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(InvalidRequest, match="does not load"):
        load_application(LlmSettings(name="x", model=str(tmp_path / "empty")))


def test_seeded_choices_have_the_probabilities_of_the_scores():
    import torch

    from springtide.runtime.serving.llm.choosing import FREE, GREEDY, SeededChoice, choice_of

    choice = SeededChoice()
    words = [choice._word(choice_of(1.0, seed), place) for seed in range(200) for place in range(100)]
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    scores = probabilities.log().repeat(len(words), 1)
    drawn = choice(scores, torch.tensor(words, dtype=torch.int32)).argmax(dim=1)
    shares = torch.bincount(drawn, minlength=4) / len(words)
    assert torch.allclose(shares, probabilities, atol=0.015)
    left = choice(scores[:2], torch.tensor([GREEDY, FREE], dtype=torch.int32))
    assert left[0].isfinite().tolist() == [True, False, False, False]
    assert torch.equal(left[1], scores[1])
