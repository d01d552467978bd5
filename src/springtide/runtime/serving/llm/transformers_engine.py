"""An engine by transformers: a causal language model under its continuous batching, on a GPU or on CPU."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.llm.choosing import OptionalTopP, SeededChoice, choice_of
from springtide.runtime.serving.llm.engine import EngineFailed, GeneratedPiece, Sampling
from springtide.runtime.serving.llm.room import TokenRoom
from springtide.runtime.serving.llm.text import TextDecoder
from springtide.serving.llm_settings import LlmSettings

_LOG = logging.getLogger("springtide.replica")
_CPU_CACHE_MB = 1024
# Tokens of a block of the cache on CPU, and tokens of prompts in a step, for which running streams wait.
_CPU_PAGE = 32
_CPU_BATCH_TOKENS = 256
_MAX_STREAMS = 256
# An answer has room in the cache for so many tokens when it begins. The batching stops streams, and begins them again,
# where longer ones do not fit.
_SURE_TOKENS = 1024
_WATCH_S = 0.25
_STOP_S = 10.0
# Any but the ones that switch a processor off: each request brings its own.
_ANY_TEMPERATURE, _ANY_TOP_P = 0.5, 0.5


class TransformersEngine:
    """A model from a folder or of the hub. The constructor loads it, and raises InvalidRequest for what is none.

    The batching runs in a thread of its own. Its failure is that of all answers, and final.
    """

    def __init__(self, settings: LlmSettings) -> None:
        self.failure = ""
        self.cache_tokens = 0
        name, given = settings.model, Path(settings.model)
        if (name.startswith(("/", ".", "~")) or given.exists()) and not (given / "config.json").is_file():
            raise InvalidRequest(f"{name} is no model: there is no config.json in it")
        try:
            config = AutoConfig.from_pretrained(name)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
            model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto", attn_implementation="sdpa")
        except (OSError, ValueError, KeyError) as error:
            # What a hub that is not reachable and a folder with something else in it raise.
            raise InvalidRequest(f"the model {name} does not load: {' '.join(str(error).split()):.300}") from None
        is_cuda = torch.cuda.is_available()
        self._model: Any = model.to("cuda" if is_cuda else "cpu").eval()
        text = config.get_text_config()
        longest = int(getattr(text, "max_position_embeddings", 0) or 0) or 1 << 20
        if settings.context is not None and settings.context > longest:
            raise InvalidRequest(f"context={settings.context} is more than the {longest} tokens that {name} takes")
        self.context = settings.context or longest
        self._batching = self._batching_config(settings, text, is_cuda=is_cuda)
        self._ids = itertools.count()
        self._open: dict[str, asyncio.Queue[Any]] = {}
        self._num_cached: dict[str, int] = {}
        self._watch: asyncio.Task[None] | None = None
        self._embedding = asyncio.Lock()
        self._room = TokenRoom(self.context)

    def _batching_config(self, settings: LlmSettings, text: Any, *, is_cuda: bool) -> Any:
        """The batching's settings; on CPU it would take most of the memory, so the cache has a size here."""
        if is_cuda and settings.cache_mb is None:
            return ContinuousBatchingConfig(per_request_processors=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        token_bytes = 2 * text.num_hidden_layers * heads * width * self._model.dtype.itemsize
        wanted = -(-self.context // _CPU_PAGE) * _MAX_STREAMS
        num_blocks = min(wanted, ((settings.cache_mb or _CPU_CACHE_MB) << 20) // (token_bytes * _CPU_PAGE))
        # One block more than a full stream has, so that it never waits for itself.
        room = (num_blocks - 1) * _CPU_PAGE
        if room < (settings.context or _CPU_PAGE):
            needed = (self.context + 2 * _CPU_PAGE) * token_bytes // (1 << 20) + 1
            raise InvalidRequest(
                f"cache_mb is too small for a context of {self.context} tokens: that takes {needed} MiB"
            )
        if room < self.context:
            _LOG.warning("the context is %d tokens, not %d: more does not fit into cache_mb", room, self.context)
            self.context = room
        if is_cuda:
            return ContinuousBatchingConfig(num_blocks=num_blocks, page_size=_CPU_PAGE, per_request_processors=True)
        return ContinuousBatchingConfig(
            num_blocks=num_blocks,
            page_size=_CPU_PAGE,
            max_batch_tokens=_CPU_BATCH_TOKENS,
            use_cuda_graph=False,
            use_async_batching=False,
            per_request_processors=True,
        )

    async def start(self) -> None:
        """Start the batching, and write one token, so that the first request waits for nothing."""
        own = self._model.generation_config
        ends = own.eos_token_id if own.eos_token_id is not None else self._model.config.eos_token_id
        self._ends = ends if ends is not None else self._tokenizer.eos_token_id
        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=_ANY_TEMPERATURE, top_p=_ANY_TOP_P, eos_token_id=self._ends, max_new_tokens=1
        )
        manager: Any = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=self._batching
        )
        chosen = manager.logit_processor
        # Temperature, top-p and nothing else; then ours.
        temperature, top_p = chosen.logits_processor
        chosen.logits_processor[:] = [temperature, _like(top_p), SeededChoice()]
        chosen.tensors_required = len(chosen.logits_processor)
        chosen._retrieve_processors_kwargs()
        self._manager = manager
        manager.start()
        self._watch = asyncio.create_task(self._watch_batching())
        try:
            async for _ in self.generate(await self.encode("a") or [0], Sampling(max_tokens=1, temperature=0.0)):
                pass
        except BaseException:
            # Its thread would keep the process.
            await self.close()
            raise
        # A block is left over, so that a stream that takes all others does not wait for itself.
        num_tokens = (manager.batch_processor.cache.num_blocks - 1) * manager.continuous_batching_config.page_size
        self.context, self._room = min(self.context, num_tokens), TokenRoom(num_tokens)
        self._note_shared(manager.batch_processor.cache, num_tokens)

    def _note_shared(self, cache: Any, num_tokens: int) -> None:
        """Note of each prompt how much of it the cache had, if this model's cache shares anything at all."""
        if not cache.use_prefix_sharing:
            return
        self.cache_tokens, search = num_tokens, cache.search_prefix_match

        def search_and_note(name: str, prompt: list[int]) -> int:
            # Called by the batching's thread, before the first token of the answer.
            found = int(search(name, prompt))
            if name in self._open:
                self._num_cached.setdefault(name, found)
            return found

        cache.search_prefix_match = search_and_note

    async def close(self) -> None:
        """Stop the batching; what is being written fails."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._manager.stop, block=True, timeout=_STOP_S, hard_stop=True)

    async def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return await asyncio.to_thread(lambda: list(self._tokenizer(text)["input_ids"]))

    async def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation. Raises InvalidRequest."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        try:
            return await asyncio.to_thread(self._rendered, list(messages), list(tools))
        except Exception as error:
            # Templates are programs, which raise whatever they like for roles and fields that they do not take.
            why = f"{type(error).__name__}: {error!s:.300}"
            raise InvalidRequest(f"the chat template of this model does not take these messages: {why}") from None

    def _rendered(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        tokens = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in tokens]

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[GeneratedPiece]:
        """Write an answer, as one of those that the batching works on. Raises InvalidRequest and EngineFailed."""
        self._check(prompt, sampling)
        async with self._room.taken(len(prompt) + min(sampling.max_tokens, _SURE_TOKENS)):
            name = f"answer-{next(self._ids)}"
            results = self._open[name] = asyncio.Queue()
            try:
                self._add(name, prompt, sampling, results)
                async for piece in self._pieces(results, sampling):
                    yield msgspec.structs.replace(piece, num_cached=self._num_cached.get(name, 0))
            finally:
                del self._open[name]
                self._num_cached.pop(name, None)
                with self._manager.output_router._lock:
                    self._manager.output_router.result_handlers.pop(name, None)
                # Of one that is complete this does nothing.
                self._manager.cancel_request(name)

    async def _pieces(self, results: asyncio.Queue[Any], sampling: Sampling) -> AsyncGenerator[GeneratedPiece]:
        text = TextDecoder(lambda tokens: self._tokenizer.decode(tokens, skip_special_tokens=True))
        num_tokens, is_complete = 0, False
        while not is_complete:
            result = await results.get()
            # What has come together is told together.
            while not results.empty():
                result = results.get_nowait()
            if result is None or result.error is not None:
                raise EngineFailed(self.failure or f"the engine refused the request: {result.error}")
            is_complete = result.is_finished()
            new, num_tokens = result.generated_tokens[num_tokens:], len(result.generated_tokens)
            told = text.feed(new)
            if not is_complete:
                yield GeneratedPiece(told, num_tokens)
                continue
            is_end = num_tokens < sampling.max_tokens or (not sampling.ignore_eos and self._ends_with(new[-1:]))
            yield GeneratedPiece(told + text.flush(), num_tokens, "stop" if is_end else "length")

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Raise InvalidRequest for what would end the batching, and with it all other answers."""
        if not prompt or len(prompt) + sampling.max_tokens > self.context:
            raise InvalidRequest(f"the prompt and its answer must have from 2 to {self.context} tokens together")
        if not 0 <= min(prompt) <= max(prompt) < self._model.config.get_text_config().vocab_size:
            raise InvalidRequest("the prompt has tokens that are not in the vocabulary")
        if self.failure:
            raise EngineFailed(self.failure)

    def _add(self, name: str, prompt: Sequence[int], sampling: Sampling, results: asyncio.Queue[Any]) -> None:
        self._manager.register_result_handler(name, results.put_nowait)
        is_greedy = sampling.temperature == 0.0
        added = self._manager.add_request(
            list(prompt),
            request_id=name,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=-1 if sampling.ignore_eos else None,
            # A division by zero would end the batching.
            temperature=1.0 if is_greedy else max(float(sampling.temperature), 1e-3),
            top_p=1.0 if is_greedy else float(sampling.top_p),
            choice=choice_of(sampling.temperature, sampling.seed),
        )
        if added is None:
            raise EngineFailed(self.failure or "the engine has stopped")

    def _ends_with(self, last: Sequence[int]) -> bool:
        ends = self._ends if isinstance(self._ends, list | tuple) else [self._ends]
        return bool(last) and last[0] in ends

    async def embed(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The mean of the last layer's states over the tokens of each prompt, with length one."""
        async with self._embedding:
            return [await asyncio.to_thread(self._embedded, list(prompt)) for prompt in prompts]

    @torch.no_grad()
    def _embedded(self, prompt: list[int]) -> list[float]:
        tokens = torch.tensor([prompt], device=self._model.device)
        states = self._model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0].float()
        vector = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
        return [float(value) for value in vector.cpu()]

    async def _watch_batching(self) -> None:
        """Fail all answers when the batching has ended, for a request may have come just then."""
        while self._manager.is_running():
            await asyncio.sleep(_WATCH_S)
        error = self._manager.background_thread_status.fatal_error
        self.failure = f"the batching has ended: {' '.join(str(error or 'it was stopped').split()):.300}"
        for results in self._open.values():
            results.put_nowait(None)


def _like(top_p: Any) -> OptionalTopP:
    """Ours in the place of transformers' own."""
    made = OptionalTopP.__new__(OptionalTopP)
    with contextlib.suppress(AttributeError):
        made.__dict__.update(top_p.__dict__)
    return made
