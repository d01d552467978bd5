"""Web applications as services: what `st.asgi` and `st.process` make of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

# What a service's function returns as the command that listens: a text as for a shell without its features, or words.
Command = str | Sequence[str]


class EngineCapacity(NamedTuple):
    """How an engine says for how many tokens of prompts it keeps what it has computed.

    `path` answers it, and `tokens_in` reads it of the answer's body: raises ValueError or LookupError.
    """

    path: str
    tokens_in: Callable[[bytes], int]


class WebService:
    """What has paths of its own, below /f/NAME/, instead of a method; `make` is the user's function.

    `ready`: the path that answers 2xx when it can take requests; empty without one. `cache_tokens`: how many tokens of
    prompts a language model keeps; 0 for others.
    """

    make: Callable[..., Any]
    ready: ClassVar[str] = ""
    cache_tokens: ClassVar[int] = 0

    def predict(self) -> None:
        """Stand in for the method of other services. Raises NotImplementedError."""
        raise NotImplementedError("an application is called by its own paths")


class AsgiService(WebService):
    """The base of the class that `st.asgi` makes of a function that returns an ASGI application."""


class ProcessService(WebService):
    """The base of the class that `st.process` makes of a function, of the port if it takes one, that returns a command.

    `{port}` in the command stands for the port.
    """


class EngineService(ProcessService):
    """The base of the class of a language model whose engine is a command that listens on a port."""

    capacity: ClassVar[EngineCapacity]


def application_class(base: type[WebService], function: Callable[..., Any], ready: str = "") -> type[WebService]:
    """The class that stands for a function, under the function's name."""
    namespace = {
        "make": staticmethod(function),
        "ready": ready,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
    }
    return type(function.__name__, (base,), namespace)
