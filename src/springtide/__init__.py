"""Springtide: an elastic serverless platform for machine learning.

The public surface (`st.train`, `st.serve`, `st.Task`, ...) is loaded lazily, so that importing one room of the house
(a policy, say) never pays for another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from springtide.client.api import Client as Client
    from springtide.client.api import connect as connect
    from springtide.client.functions import (
        ServeFunction as ServeFunction,
    )
    from springtide.client.functions import (
        Task as Task,
    )
    from springtide.client.functions import (
        TrainFunction as TrainFunction,
    )
    from springtide.client.functions import (
        auto as auto,
    )
    from springtide.client.functions import (
        model_path as model_path,
    )
    from springtide.client.functions import (
        serve as serve,
    )
    from springtide.client.functions import (
        train as train,
    )
    from springtide.core.context import Batch as Batch
    from springtide.core.context import TrainContext as TrainContext
    from springtide.core.quote import Quote as Quote

_PUBLIC = {
    "Batch": "springtide.core.context",
    "Client": "springtide.client.api",
    "Quote": "springtide.core.quote",
    "ServeFunction": "springtide.client.functions",
    "Task": "springtide.client.functions",
    "TrainContext": "springtide.core.context",
    "TrainFunction": "springtide.client.functions",
    "auto": "springtide.client.functions",
    "connect": "springtide.client.api",
    "model_path": "springtide.client.functions",
    "serve": "springtide.client.functions",
    "train": "springtide.client.functions",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    module_name = _PUBLIC.get(name)
    if module_name is None:
        raise AttributeError(f"module 'springtide' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module_name), name)
