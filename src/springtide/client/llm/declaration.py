"""The public declaration of a language model's service: `st.llm`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack, cast

import msgspec

from springtide.client.functions import ServeFunction
from springtide.client.serving_goals import ServeKeywords, ServeOptions
from springtide.client.sources.source import SourceFile
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import validate_name
from springtide.serving.applications import AsgiService, EngineService, WebService, application_class
from springtide.serving.llm_settings import LLM_CONCURRENCY, EngineName, LlmSettings, engine_for

# What replicas import: it says all that the declaration does, so that they need no file of the user.
_OBJECT = "service"
# The attribute of a service's class by which a language model is known.
_SETTINGS = "llm_settings"
# And the one of an EngineService by which its replicas ask the engine what it keeps.
_CAPACITY = "capacity"
_FILE = '''"""A language model's service, as `st.llm` wrote it."""

import springtide as st

{name} = st.llm({arguments})
'''


def llm(
    name: str,
    /,
    *,
    model: str | Path,
    engine: EngineName | None = None,
    context: int | None = None,
    cache_mb: int | None = None,
    **options: Unpack[ServeKeywords],
) -> ServeFunction[Any]:
    """Declare a service that answers OpenAI's API at /f/NAME/v1, with a language model:

        chat = st.llm("chat", model="./qwen3-0.6b", scale=(0, 2))

    `model` is the path of a folder of transformers' form or of a file that ends in .gguf, which replicas have to see as
    well, or the id of a model on the hub. `engine` is `transformers`, `llama.cpp` or `vllm`; without one llama.cpp for
    files in GGUF, else transformers. `context` is how many tokens a prompt and its answer may have together; `cache_mb`
    how many MiB the engine holds for what it has read and written. The other options are those of
    `st.serve`; `concurrency` (16; llama.cpp 4, vllm 64) is how many requests a replica works on at a time. Raises
    InvalidRequest.
    """
    found = _found(model)
    settings = LlmSettings(
        name=validate_name(name, "service"),
        model=found,
        engine=engine or engine_for(found),
        context=context,
        cache_mb=cache_mb,
    ).checked()
    # Commands list what a file itself declares.
    made = _class_of(settings, str(sys._getframe(1).f_globals.get("__name__", __name__)))
    num_at_a_time = LLM_CONCURRENCY[settings.engine]
    defaults = {"concurrency": num_at_a_time, "in_flight": num_at_a_time}
    checked = ServeOptions(**cast(ServeKeywords, {**defaults, **options, "name": name}))
    setattr(made, _SETTINGS, settings)
    return ServeFunction(made, checked, _source_of(settings))


def is_language_model(cls: type) -> bool:
    """Whether `llm` has made the class of a service."""
    return hasattr(cls, _SETTINGS)


def _class_of(settings: LlmSettings, module: str) -> type[WebService]:
    """The class that stands for the model: an application in the replica, or a command that the replica starts."""
    if settings.engine == "transformers":

        def application() -> Any:
            from springtide.runtime.serving.llm.load import load_application

            return load_application(settings)

        return application_class(AsgiService, _named(application, settings, module))
    from springtide.runtime.serving.llm.commands import CAPACITY, READY_PATH, engine_command

    def command(port: int, concurrency: int) -> list[str]:
        return engine_command(settings, port, concurrency)

    made = application_class(EngineService, _named(command, settings, module), READY_PATH)
    setattr(made, _CAPACITY, CAPACITY[settings.engine])
    return made


def _named(make: Callable[..., Any], settings: LlmSettings, module: str) -> Callable[..., Any]:
    make.__name__ = make.__qualname__ = settings.name
    make.__module__ = module
    make.__doc__ = f"The language model {settings.model}, by {settings.engine}."
    return make


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
