"""The public declaration of a language model's service: `st.llm`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Unpack, cast

import msgspec

from springtide.client.functions import ServeFunction
from springtide.client.serving_goals import ServeKeywords, ServeOptions
from springtide.client.sources.source import SourceFile
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import validate_name
from springtide.serving.applications import AsgiService, application_class
from springtide.serving.llm_settings import LLM_CONCURRENCY, EngineName, LlmSettings

# What replicas import: it says all that the declaration does, so that they need no file of the user.
_OBJECT = "service"
# The attribute of a service's class by which a language model is known.
_SETTINGS = "llm_settings"
_FILE = '''"""A language model's service, as `st.llm` wrote it."""

import springtide as st

{name} = st.llm({arguments})
'''


def llm(
    name: str,
    /,
    *,
    model: str | Path,
    engine: EngineName = "transformers",
    context: int | None = None,
    cache_mb: int | None = None,
    **options: Unpack[ServeKeywords],
) -> ServeFunction[Any]:
    """Declare a service that answers OpenAI's API at /f/NAME/v1, with a language model:

        chat = st.llm("chat", model="./qwen3-0.6b", scale=(0, 2))

    `model` is the path of a folder of transformers' form, which replicas have to see as well, or the id of a model on
    the hub. `context` is how many tokens a prompt and its answer may have
    together; `cache_mb` how many MiB the engine holds for what it has read and written. The other options are those of
    `st.serve`; `concurrency` (16) is how many requests a replica works on at a time. Raises InvalidRequest.
    """
    settings = LlmSettings(
        name=validate_name(name, "service"), model=_found(model), engine=engine, context=context, cache_mb=cache_mb
    ).checked()

    def make() -> Any:
        from springtide.runtime.serving.llm.load import load_application

        return load_application(settings)

    make.__name__ = make.__qualname__ = name
    # Commands list what a file itself declares.
    make.__module__ = str(sys._getframe(1).f_globals.get("__name__", __name__))
    make.__doc__ = f"The language model {settings.model}, by {settings.engine}."
    defaults = {"concurrency": LLM_CONCURRENCY, "in_flight": LLM_CONCURRENCY}
    checked = ServeOptions(**cast(ServeKeywords, {**defaults, **options, "name": name}))
    made = application_class(AsgiService, make)
    setattr(made, _SETTINGS, settings)
    return ServeFunction(made, checked, _source_of(settings))


def is_language_model(cls: type) -> bool:
    """Whether `llm` has made the class of a service."""
    return hasattr(cls, _SETTINGS)


def _found(model: str | Path) -> str:
    """The absolute path of a model that is here, or its id. Raises InvalidRequest for a path that is not there."""
    text, path = str(model), Path(model).expanduser()
    if path.exists():
        return str(path.resolve())
    if isinstance(model, Path) or text.startswith(("/", ".", "~")):
        raise InvalidRequest(f"there is no model at {text!r:.200}")
    return text


def _source_of(settings: LlmSettings) -> SourceFile:
    given = msgspec.structs.asdict(settings)
    name = given.pop("name")
    arguments = ", ".join([repr(name), *(f"{key}={value!r}" for key, value in given.items())])
    return SourceFile(
        filename="llm.py", text=_FILE.format(name=_OBJECT, arguments=arguments), object_name=_OBJECT, kind="class"
    )
