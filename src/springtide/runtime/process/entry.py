"""Loading the user's object from the copy of its source file, and running it as a training function."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from springtide.core.errors import InvalidRequest
from springtide.core.model import ONLY_ON_FUNCTIONS, call_factory
from springtide.core.workload import Entrypoint


def load_object(entrypoint: Entrypoint, module_name: str) -> Any:
    """Import the entrypoint's file as the module `module_name` and return the named object.

    Raises InvalidRequest if there is no such file or object, and whatever importing the file raises.
    """
    path = Path(entrypoint.source_path)
    add_import_roots(entrypoint)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InvalidRequest(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    found: Any = module
    for part in entrypoint.object_name.split("."):
        if not hasattr(found, part):
            raise InvalidRequest(f"{path.name} has no {entrypoint.object_name!r}")
        found = getattr(found, part)
    return found


def add_import_roots(entrypoint: Entrypoint) -> None:
    """Have the entrypoint's file find its neighbours first, as it did where it was submitted."""
    own = str(Path(entrypoint.source_path).parent) if entrypoint.kind == "script" else ""
    for root in (own, entrypoint.import_root):
        if root and root not in sys.path:
            sys.path.insert(0, root)


def as_function(found: Any) -> Callable[[Any], None]:
    """A training function from a decorated one, a plain callable, or a declared task. Raises InvalidRequest."""
    if all(hasattr(found, name) for name in ("model", "dataset", "loss", "optimizer")):
        return lambda ctx: run_task(found, ctx)
    function = getattr(found, "function", found)
    if not callable(function):
        raise InvalidRequest(f"{type(found).__name__} is neither a training function nor a task")
    return function  # type: ignore[no-any-return]


def run_task(task: Any, ctx: Any) -> None:
    """Train a declared task with a plain loop; `model`, `dataset` and `loss` may be values or factories.

    Raises InvalidRequest if the model computes its own gradients or changes its size: such tasks run only on functions.
    """
    if task.loss is None or task.optimizer is None:
        raise InvalidRequest(ONLY_ON_FUNCTIONS)
    import torch

    params = ctx.params
    model = task.model if isinstance(task.model, torch.nn.Module) else call_factory(task.model, params=params)
    if hasattr(model, "begin_epoch"):
        raise InvalidRequest(
            f"{type(model).__name__} has begin_epoch(), so it may change its size as it trains, which models of jobs "
            'on functions may (on="functions"); machines keep the model as it is'
        )
    loss = task.loss() if isinstance(task.loss, type) else task.loss
    # Load data before prepare(): until a joiner calls it the other workers train on, afterwards they wait for it.
    is_factory = callable(task.dataset) and not hasattr(task.dataset, "__getitem__")
    dataset = (
        call_factory(task.dataset, params=params) if is_factory or isinstance(task.dataset, type) else task.dataset
    )
    optimizer = partial(call_factory, task.optimizer, params=params) if callable(task.optimizer) else task.optimizer
    model, _ = ctx.prepare(model, optimizer)
    model.train()
    for batch in ctx.batches(dataset):
        ctx.step(loss(model(batch.x), batch.y))


def describe_error(error: BaseException, source_path: str) -> str:
    """One sentence: the error's type, its first line, and the line of the user's file that raised it."""
    text = str(error).strip().partition("\n")[0][:400]
    sentence = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == source_path] or list(frames)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{sentence} ({Path(error.filename).name}:{error.lineno})"
    return f"{sentence} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else sentence
