"""The public decorators for what has paths of its own: `st.asgi` and `st.process`."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from springtide.client.functions import ServeFunction
from springtide.client.serving_goals import ServeKeywords, ServeOptions
from springtide.client.sources.source import SourceFile, name_from
from springtide.core.errors import InvalidRequest
from springtide.serving.applications import AsgiService, Command, ProcessService, WebService, application_class

# The file in which a command that was typed travels.
_COMMAND_FILE = "springtide_command.py"
_COMMAND_SOURCE = """import springtide as st


@st.process(ready={ready!r})
def command():
    return {words!r}
"""


def asgi(*, ready: str = "", **options: Unpack[ServeKeywords]) -> Callable[[Callable[[], Any]], ServeFunction[Any]]:
    """Decorate a function that returns an ASGI application, such as one of FastAPI or Starlette:

        @st.asgi(scale=(0, 2), ready="/health")
        def web():
            app = FastAPI()
            ...
            return app

    Its paths are below /f/NAME/, WebSockets too. A replica gets requests once the path `ready` has answered 2xx twice
    in a row. `concurrency` is how many requests a replica works on at a time (64). Raises InvalidRequest for an
    invalid option.
    """
    return _decorator(AsgiService, "st.asgi decorates a function that returns the application", ready, options)


def process(
    *, ready: str = "", **options: Unpack[ServeKeywords]
) -> Callable[[Callable[..., Command]], ServeFunction[Any]]:
    """Decorate a function that returns a command which listens on a port, in any language:

        @st.process(ready="/health", scale=(0, 2), gpu=1)
        def llama(port):
            return f"llama-server -m {st.model_path('story')} --port {port}"

    The function is called in each replica, where the command then runs, in the service's folder, and is to listen on
    that port of 127.0.0.1, which is also in the variable PORT. It may take `concurrency` too. A text is split into
    words as a shell does, without a shell's features; or return the words. It gets what comes to /f/NAME/ without this
    prefix, WebSockets too, once the path `ready` has answered 2xx twice in a row, or, without one, once its port
    accepts connections.
    `concurrency` is how many requests a replica has at a time (64). Raises InvalidRequest for an invalid option.
    """
    return _decorator(ProcessService, "st.process decorates a function that returns the command", ready, options)


def typed_command(command: str, *, ready: str = "", folder: Path | None = None) -> ServeFunction[Any]:
    """A service of a command without a file of its own, which works in a copy of `folder` (None: the current one).

    Raises InvalidRequest.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidRequest(f"the command cannot be split into words ({error}); check its quotes") from None
    if not words:
        raise InvalidRequest('the command is empty; give one that listens on a port, "server --port {port}"')
    here = Path.cwd() if folder is None else folder
    source = SourceFile(
        filename=_COMMAND_FILE,
        text=_COMMAND_SOURCE.format(ready=check_ready(ready), words=words),
        object_name="command",
        kind="class",
        import_root=str(here),
        location=here / _COMMAND_FILE,
    )
    served = ServeFunction(application_class(ProcessService, lambda: words, ready), ServeOptions(), source)
    served.name = name_from(Path(words[0]).name)
    return served


def check_ready(path: str) -> str:
    """The path as it is given. Raises InvalidRequest unless it is one, or empty."""
    if not isinstance(path, str) or (path and (not path.startswith("/") or not path.isprintable() or " " in path)):
        raise InvalidRequest(f'ready is a path of the application, such as "/health", not {path!r:.80}')
    if not path.isascii():
        raise InvalidRequest(f"write the path {path!r:.80} with percent signs, as it is asked for")
    return path


def _decorator(
    base: type[WebService], what: str, ready: str, options: ServeKeywords
) -> Callable[[Callable[..., Any]], ServeFunction[Any]]:
    checked, path = ServeOptions(**options), check_ready(ready)

    def decorate(function: Callable[..., Any]) -> ServeFunction[Any]:
        if not inspect.isfunction(function):
            raise InvalidRequest(f"{what}, not {function!r:.80}")
        return ServeFunction(application_class(base, function, path), checked)

    return decorate
