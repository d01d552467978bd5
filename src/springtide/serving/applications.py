"""Web applications as services: what `st.asgi` makes of a function that returns one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AsgiService:
    """The base of the class that `st.asgi` makes of a function; `make` is that function."""

    make: Callable[[], Any]

    def predict(self) -> None:
        """Stand in for the method of other services. Raises NotImplementedError."""
        raise NotImplementedError("an application is called by its own paths")


def asgi_class(function: Callable[[], Any]) -> type[AsgiService]:
    """The class that stands for a function that returns an ASGI application, under the function's name."""
    namespace = {
        "make": staticmethod(function),
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
    }
    return type(function.__name__, (AsgiService,), namespace)
