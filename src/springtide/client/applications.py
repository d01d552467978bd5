"""The public decorator for web applications: `st.asgi`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Unpack

from springtide.client.functions import ServeFunction
from springtide.client.serving_goals import ServeKeywords, ServeOptions
from springtide.core.errors import InvalidRequest
from springtide.serving.applications import asgi_class


def asgi(**options: Unpack[ServeKeywords]) -> Callable[[Callable[[], Any]], ServeFunction[Any]]:
    """Decorate a function that returns an ASGI application, such as one of FastAPI or Starlette:

        @st.asgi(scale=(0, 2))
        def web():
            app = FastAPI()
            ...
            return app

    Its paths are below /f/NAME/. `concurrency` is how many requests a replica works on at a time (64). Raises
    InvalidRequest for an invalid option.
    """
    checked = ServeOptions(**options)

    def decorate(function: Callable[[], Any]) -> ServeFunction[Any]:
        if not inspect.isfunction(function):
            raise InvalidRequest(f"st.asgi decorates a function that returns the application, not {function!r:.80}")
        return ServeFunction(asgi_class(function), checked)

    return decorate
