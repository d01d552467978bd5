"""Loading a service's model: from its settings to the application that answers."""

from __future__ import annotations

from pathlib import Path

from springtide.core.errors import InvalidRequest
from springtide.runtime.serving.llm.application import OpenAiApplication
from springtide.runtime.serving.llm.engine import TextEngine
from springtide.serving.llm_settings import LlmSettings


def load_application(settings: LlmSettings) -> OpenAiApplication:
    """Load the model. Raises InvalidRequest, which says what is missing."""
    also_called = [settings.model, Path(settings.model).name]
    return OpenAiApplication(settings.name, _engine_of(settings), also_called=also_called)


def _engine_of(settings: LlmSettings) -> TextEngine:
    # Each engine's library is imported only where it is used: they take seconds and are extras.
    try:
        from springtide.runtime.serving.llm.transformers_engine import TransformersEngine

        return TransformersEngine(settings)
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"the engine {settings.engine} needs {error.name}, which is not installed: pip install 'springtide[llm]'"
        ) from None
