"""What a service of a language model is made of: what `st.llm` is given, checked, and written for its replicas."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from springtide.core.errors import InvalidRequest

EngineName = Literal["transformers", "llama.cpp", "vllm"]
ENGINES: Final[tuple[EngineName, ...]] = ("transformers", "llama.cpp", "vllm")
# Requests that a replica works on at a time, unless its service says another `concurrency`. llama.cpp keeps room for
# the whole context of each, so that no answer can take another's.
LLM_CONCURRENCY: Final[dict[EngineName, int]] = {"transformers": 16, "llama.cpp": 4, "vllm": 64}
# Tokens of a prompt and its answer for llama.cpp, unless a service says another `context`; never more than the model's.
LLAMA_CPP_CONTEXT: Final = 4096
_LEAST_CONTEXT: Final = 16
_GGUF: Final = ".gguf"


class LlmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a service and its engine.

    `model` is the path of a folder, or the id of one on a hub; for llama.cpp the path of a file in GGUF. `context` is
    how many tokens a prompt and its answer may have together (None: as many as the model and `cache_mb` allow, for
    llama.cpp LLAMA_CPP_CONTEXT), `cache_mb` the MiB for what the model remembers of all streams, for llama.cpp of
    prompts that no stream uses (None: chosen by the engine). Raises InvalidRequest, by `checked`.
    """

    name: str
    model: str
    engine: EngineName = "transformers"
    context: int | None = None
    cache_mb: int | None = None

    def checked(self) -> LlmSettings:
        """Itself. Raises InvalidRequest for values that no engine takes."""
        if not self.model.strip():
            raise InvalidRequest("model is empty; give the path of a model's folder, or the id of one on the hub")
        if self.engine not in ENGINES:
            raise InvalidRequest(f"there is no engine {self.engine!r:.40}; there is: {', '.join(ENGINES)}")
        if (self.engine == "llama.cpp") != is_gguf(self.model):
            takes = "takes a file that ends in .gguf" if self.engine == "llama.cpp" else "does not take files in GGUF"
            raise InvalidRequest(f"the engine {self.engine} {takes}; model is {self.model!r:.200}")
        if self.context is not None and self.context < _LEAST_CONTEXT:
            raise InvalidRequest(
                f"context={self.context} is too small; it is a number of tokens, {_LEAST_CONTEXT} or more"
            )
        if self.cache_mb is not None and self.cache_mb < 1:
            raise InvalidRequest(f"cache_mb={self.cache_mb} is too small; give MiB, such as 1024")
        return self


def is_gguf(model: str) -> bool:
    """Whether a model is named as a file in GGUF, the format of llama.cpp."""
    return model.lower().endswith(_GGUF)


def engine_for(model: str) -> EngineName:
    """The engine for a model where none is named."""
    return "llama.cpp" if is_gguf(model) else "transformers"
