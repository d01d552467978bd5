"""What a service of a language model is made of: what `st.llm` is given, checked, and written for its replicas."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from springtide.core.errors import InvalidRequest

EngineName = Literal["transformers"]
ENGINES: Final[tuple[EngineName, ...]] = ("transformers",)
# Streams that a replica writes at a time, unless its service says another `concurrency`.
LLM_CONCURRENCY: Final = 16
_LEAST_CONTEXT: Final = 16


class LlmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a service and its engine.

    `model` is the path of a folder, or the id of one on a hub. `context` is how many tokens a prompt and its
    answer may have together (None: as many as the model and `cache_mb` allow), `cache_mb` the MiB for what the model
    remembers of all streams (None: chosen by the engine). Raises InvalidRequest, by `checked`.
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
        if self.context is not None and self.context < _LEAST_CONTEXT:
            raise InvalidRequest(
                f"context={self.context} is too small; it is a number of tokens, {_LEAST_CONTEXT} or more"
            )
        if self.cache_mb is not None and self.cache_mb < 1:
            raise InvalidRequest(f"cache_mb={self.cache_mb} is too small; give MiB, such as 1024")
        return self
