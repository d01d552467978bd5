"""Springtide: an elastic serverless platform for machine learning.

    import springtide as st

The public names (`st.train`, `st.serve`, `st.Task`, ...) are imported on first use, so that importing one subpackage (a
policy, say) does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from springtide.client.api import Client as Client
    from springtide.client.api import connect as connect
    from springtide.client.applications import asgi as asgi
    from springtide.client.applications import process as process
    from springtide.client.calls.services import deployed as deployed
    from springtide.client.datasets import append_dataset as append_dataset
    from springtide.client.datasets import close_dataset as close_dataset
    from springtide.client.datasets import dataset as dataset
    from springtide.client.datasets import datasets as datasets
    from springtide.client.datasets import remove_dataset as remove_dataset
    from springtide.client.datasets import stream as stream
    from springtide.client.datasets import upload_dataset as upload_dataset
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
        serve as serve,
    )
    from springtide.client.functions import (
        train as train,
    )
    from springtide.client.llm.declaration import llm as llm
    from springtide.client.models import jax_model as jax_model
    from springtide.client.saved_models import model_path as model_path
    from springtide.client.tuning import tune as tune
    from springtide.core.context import Batch as Batch
    from springtide.core.context import TrainContext as TrainContext
    from springtide.core.model import Model as Model
    from springtide.core.status.quote import Quote as Quote
    from springtide.runtime.adoption import adopt as adopt
    from springtide.runtime.script_reports import report as report
    from springtide.serving.events import sse as sse

_PUBLIC = {
    "Batch": "springtide.core.context",
    "Client": "springtide.client.api",
    "Model": "springtide.core.model",
    "Quote": "springtide.core.status.quote",
    "ServeFunction": "springtide.client.functions",
    "Task": "springtide.client.functions",
    "TrainContext": "springtide.core.context",
    "TrainFunction": "springtide.client.functions",
    "adopt": "springtide.runtime.adoption",
    "append_dataset": "springtide.client.datasets",
    "asgi": "springtide.client.applications",
    "auto": "springtide.client.functions",
    "close_dataset": "springtide.client.datasets",
    "connect": "springtide.client.api",
    "dataset": "springtide.client.datasets",
    "datasets": "springtide.client.datasets",
    "deployed": "springtide.client.calls.services",
    "jax_model": "springtide.client.models",
    "llm": "springtide.client.llm.declaration",
    "model_path": "springtide.client.saved_models",
    "remove_dataset": "springtide.client.datasets",
    "process": "springtide.client.applications",
    "report": "springtide.runtime.script_reports",
    "serve": "springtide.client.functions",
    "sse": "springtide.serving.events",
    "stream": "springtide.client.datasets",
    "train": "springtide.client.functions",
    "tune": "springtide.client.tuning",
    "upload_dataset": "springtide.client.datasets",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    module_name = _PUBLIC.get(name)
    if module_name is None:
        raise AttributeError(f"module 'springtide' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module_name), name)
