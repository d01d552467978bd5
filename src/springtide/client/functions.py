"""The public decorators and classes: `st.train`, `st.serve`, `st.Task`, and what they return."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from springtide.client.goals import Auto, TrainKeywords, TrainOptions, auto
from springtide.client.handles import JobHandle, ServiceHandle
from springtide.client.layer_profiles import with_layers
from springtide.client.requirements import with_packages
from springtide.client.serving_goals import ServeKeywords, ServeOptions
from springtide.client.shares import is_auto
from springtide.client.sources.source import (
    SourceFile,
    name_from,
    object_name_in,
    read_source,
    refuse_while_importing,
    source_of,
)
from springtide.core.context import TrainContext
from springtide.core.errors import InvalidRequest
from springtide.core.model import ONLY_ON_FUNCTIONS, call_factory
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.option import check_names
from springtide.core.options.rules import NO_FUNCTIONS, ONLY_DECLARED
from springtide.core.quantities import validate_name
from springtide.core.status.quote import Quote

if TYPE_CHECKING:
    from springtide.client.api import Client
    from springtide.client.folders.choice import FolderWish
    from springtide.runtime.local.function_task import LocalResult

__all__ = ["Auto", "ServeFunction", "Task", "TrainFunction", "auto", "serve", "train"]

TrainingCallable = Callable[[TrainContext], Any]
ServedT = TypeVar("ServedT")


class TrainFunction:
    """A training function with its options; `st.train` makes it. Calling it calls the decorated function."""

    def __init__(self, function: TrainingCallable, options: TrainOptions) -> None:
        if not callable(function) or isinstance(function, type):
            raise InvalidRequest(f"st.train decorates a function that takes a TrainContext, not {function!r:.80}")
        self.function = function
        self.options = options
        self.name = options.values["name"] or name_from(function.__name__)
        functools.update_wrapper(self, function)

    def __call__(self, context: TrainContext) -> Any:
        """Call the decorated function with a context of your own, as in a test."""
        return self.function(context)

    def __repr__(self) -> str:
        """The function's name and options."""
        return f"<TrainFunction {self.name}: {self.options}>"

    def source(self) -> SourceFile:
        """The file that is sent to workers. Raises InvalidRequest unless it defines the function at its top level."""
        return source_of(self.function, "function")

    def submit(
        self, client: Client | None = None, *, folder: FolderWish = None, **overrides: Unpack[TrainKeywords]
    ) -> JobHandle:
        """Submit the job to the running platform and return its handle once the job is durable.

        `overrides` replace options of `st.train` for this job; `params` are merged. `folder` is the path of the folder
        that travels with the job (None: the one of its file, or the project's; False: the file alone). Without `client`
        the platform is found as by `st.connect()`. Raises InvalidRequest (its message says what would be accepted),
        Conflict, BackendError.
        """
        refuse_while_importing(self.function.__code__.co_filename, f"{self.name}.submit()")
        options = self.options.override(overrides)
        self._refuse_functions(options)
        return submit_job(self.source(), options, self.name, client, folder=folder)

    def quote(self, client: Client | None = None, **overrides: Unpack[TrainKeywords]) -> Quote:
        """Ask the platform what `submit` with the same keywords would lead to: acceptance, time of the end, cost.

        Nothing is submitted. Raises InvalidRequest, BackendError.
        """
        options = self.options.override(overrides, "quote()")
        self._refuse_functions(options)
        return quote_job(self.source(), options, self.name, client)

    def _refuse_functions(self, options: TrainOptions) -> None:
        if options.values["on"] == "functions":
            raise InvalidRequest(f"{self.name} is a training function, and {ONLY_DECLARED}")

    def local(self, out: str | Path | None = None, **overrides: Unpack[TrainKeywords]) -> LocalResult:
        """Train in this process on one worker, without a platform, and return the LocalResult.

        Takes the keywords of `submit`; deadline, budget and workers have no effect. The result is bit-identical to a
        run on the platform. `ctx.save` writes to the folder `out` (default: springtide-out/<name>). Raises
        InvalidRequest, StorageError, and whatever the function raises.
        """
        refuse_while_importing(self.function.__code__.co_filename, f"{self.name}.local()")
        return train_locally(self, self.options, self.name, out, overrides)


class ServeFunction(Generic[ServedT]):
    """An inference class with its options; `st.serve` makes it. Calling it makes an instance of the class."""

    def __init__(self, cls: type[ServedT], options: ServeOptions, source: SourceFile | None = None) -> None:
        if not isinstance(cls, type):
            raise InvalidRequest(f"st.serve decorates a class with a predict method, not {cls!r:.80}")
        if not callable(getattr(cls, "predict", None)):
            raise InvalidRequest(f"{cls.__name__} has no method predict; define `def predict(self, ...)` on it")
        self.cls = cls
        self._source = source
        self.options = options
        self.name = options.values["name"] or name_from(cls.__name__)
        self._source = source
        self.__doc__ = cls.__doc__
        self.__module__ = cls.__module__
        self.__wrapped__ = cls

    def __call__(self, *args: Any, **kwargs: Any) -> ServedT:
        """Make an instance of the decorated class, without calling `load`."""
        return self.cls(*args, **kwargs)

    def __repr__(self) -> str:
        """The class's name and options."""
        return f"<ServeFunction {self.name}: {self.options}>"

    def source(self) -> SourceFile:
        """The file that is sent to replicas. Raises InvalidRequest unless it defines the class at its top level."""
        return self._source or source_of(self.cls, "class")

    def deploy(
        self, client: Client | None = None, *, folder: FolderWish = None, **overrides: Unpack[ServeKeywords]
    ) -> ServiceHandle:
        """Deploy the service, or a new revision of the one with its name, and return its handle.

        `overrides` replace options of `st.serve`; `folder` is as for TrainFunction.submit. Raises InvalidRequest,
        Conflict, BackendError.
        """
        refuse_while_importing(sys.modules[self.cls.__module__].__file__ or "", f"{self.name}.deploy()")
        return deploy_service(self.source(), self.options.override(overrides), self.name, client, folder=folder)

    def local(self) -> ServedT:
        """Make an instance in this process and call its `load`, as a replica does; for tests and debugging."""
        instance = self.cls()
        if self.options.values["params"] and not hasattr(instance, "params"):
            instance.params = {key: str(value) for key, value in self.options.values["params"].items()}  # type: ignore[attr-defined]
        load = getattr(instance, "load", None)
        loaded = load() if callable(load) else None
        if inspect.iscoroutine(loaded):
            asyncio.run(loaded)
        return instance


@overload
def train(function: TrainingCallable, /) -> TrainFunction: ...
@overload
def train(**options: Unpack[TrainKeywords]) -> Callable[[TrainingCallable], TrainFunction]: ...
def train(
    function: TrainingCallable | None = None, /, **options: Unpack[TrainKeywords]
) -> TrainFunction | Callable[[TrainingCallable], TrainFunction]:
    """Decorate a training function, as `@st.train` or with options:

        @st.train(deadline="10m", global_batch=64, epochs=20, workers=(1, 8))
        def fit(ctx: st.TrainContext) -> None:
            model, _ = ctx.prepare(Net(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
            for batch in ctx.batches((x, y)):
                ctx.step(cross_entropy(model(batch.x), batch.y))

        if __name__ == "__main__":
            job = fit.submit()

    The function is written for one device; the platform runs it on as many workers as it chooses within `workers`, with
    bit-identical results. TrainKeywords lists all options. Raises InvalidRequest for an invalid option.
    """
    checked = _train_options("st.train", options)
    if function is not None:
        return TrainFunction(function, checked)
    return lambda decorated: TrainFunction(decorated, checked)


@overload
def serve(cls: type[ServedT], /) -> ServeFunction[ServedT]: ...
@overload
def serve(**options: Unpack[ServeKeywords]) -> Callable[[type[ServedT]], ServeFunction[ServedT]]: ...
def serve(
    cls: type[ServedT] | None = None, /, **options: Unpack[ServeKeywords]
) -> ServeFunction[ServedT] | Callable[[type[ServedT]], ServeFunction[ServedT]]:
    """Decorate an inference class, as `@st.serve` or with options:

        @st.serve(slo="p99 < 200ms", scale=(0, 4))
        class Classifier:
            def load(self) -> None:
                self.net = load_file(st.model_path("digits"))

            def predict(self, images: list[list[float]]) -> list[int]: ...

    The type hints of `predict` are the schema of requests. If it takes and returns lists, requests that arrive together
    are predicted in one call, and it must return one output for each item. `load` is called once in each replica.
    ServeKeywords lists all options. Raises InvalidRequest for an invalid option, or a class without `predict`.
    """
    checked = ServeOptions(**options)
    if cls is not None:
        return ServeFunction(cls, checked)
    return lambda decorated: ServeFunction(decorated, checked)


class Task:
    """A declared training job, which unlike a training function can also run on cloud functions:

        digits = st.Task(make_model, make_dataset, loss=cross_entropy, optimizer=lambda p: SGD(p, lr=0.1), epochs=20)
        job = digits.submit(on="functions", budget="$0.05")

    `model` and `dataset` are values or factories without arguments, `optimizer` is a factory that is called with the
    parameters, and `loss(output, targets)` returns the mean loss of a batch. A factory with a parameter named `params`
    also gets the job's params. A model with its own gradients and update (`st.Model`, `st.jax_model`), in any
    framework, has no loss and optimizer; such a task runs only on functions or in this process. Options are those of
    `st.train`. Raises InvalidRequest for an invalid option, or for a loss without an optimizer.
    """

    def __init__(
        self,
        model: Any,
        dataset: Any,
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: Callable[[Any], Any] | None = None,
        **options: Unpack[TrainKeywords],
    ) -> None:
        if (loss is None) != (optimizer is None):
            missing = "loss" if loss is None else "optimizer"
            raise InvalidRequest(
                f"this st.Task has no {missing}: a torch module needs a loss and an optimizer, a model with its own "
                "gradients() and apply() neither"
            )
        self.model = model
        self.dataset = dataset
        self.loss = loss
        self.optimizer = optimizer
        self.options = _train_options("st.Task", options)
        self.name = self.options.values["name"]
        # Workers find the task by its name in the file that created it.
        self._namespace = sys._getframe(1).f_globals

    @property
    def brings_update(self) -> bool:
        """Whether the model has its own gradients and update, so that there is no loss and optimizer."""
        return self.loss is None

    def check_place(self, options: TrainOptions) -> None:
        """Raise InvalidRequest if the model cannot be trained where `options` say (`on`)."""
        if self.brings_update and options.values["on"] != "functions":
            raise InvalidRequest(ONLY_ON_FUNCTIONS)

    def function(self, context: TrainContext) -> None:
        """The equivalent training function. Raises InvalidRequest if the model has its own gradients and update."""
        if self.loss is None or self.optimizer is None:
            raise InvalidRequest(ONLY_ON_FUNCTIONS)
        model = self.model
        if not hasattr(model, "forward") or isinstance(model, type):
            model = call_factory(model, params=context.params)
        dataset = self.dataset
        if callable(dataset) and not hasattr(dataset, "__getitem__"):
            dataset = call_factory(dataset, params=context.params)
        module, _ = context.prepare(model, partial(call_factory, self.optimizer, params=context.params))
        for batch in context.batches(dataset):
            context.step(self.loss(module(batch.x), batch.y))

    def source(self) -> SourceFile:
        """The file that is sent to workers. Raises InvalidRequest unless the task is assigned at its top level."""
        path = self._namespace.get("__file__")
        if not path:
            raise InvalidRequest("this st.Task was not created in a file; write it into a .py file")
        return read_source(path, object_name_in(self, self._namespace, "st.Task"))

    def submit(
        self,
        client: Client | None = None,
        *,
        profile: str | Path | None = None,
        folder: FolderWish = None,
        **overrides: Unpack[TrainKeywords],
    ) -> JobHandle:
        """Submit the job to the running platform, as TrainFunction.submit does.

        With on="functions" or on="auto" the layers are profiled first, which takes seconds to minutes, unless
        `profile` is the path of a profile made by `springtide profile FILE --layers`.
        """
        refuse_while_importing(str(self._namespace.get("__file__", "")), "submit()")
        source, options = self.source(), self.options.override(overrides)
        self.check_place(options)
        name = self.name or name_from(source.object_name)
        return submit_job(source, options, name, client, profile=profile, is_declared=True, folder=folder)

    def quote(
        self, client: Client | None = None, *, profile: str | Path | None = None, **overrides: Unpack[TrainKeywords]
    ) -> Quote:
        """Ask the platform what it would do with such a job, as TrainFunction.quote does; nothing is submitted."""
        source, options = self.source(), self.options.override(overrides, "quote()")
        self.check_place(options)
        name, may_choose = self.name or name_from(source.object_name), options.values["on"] == "auto"
        return quote_job(source, options, name, client, profile=profile, compares=may_choose)

    def local(self, out: str | Path | None = None, **overrides: Unpack[TrainKeywords]) -> LocalResult:
        """Train in this process on one worker, without a platform, as TrainFunction.local does.

        A model given as a value is copied, so that the task can run again. The trained model is written to the folder
        `out` (default: springtide-out/<name>).
        """
        refuse_while_importing(str(self._namespace.get("__file__", "")), "local()")
        task = copy.copy(self)
        if hasattr(self.model, "forward") and not isinstance(self.model, type):
            task.model = copy.deepcopy(self.model)
        return train_locally(task, self.options, self.name or "task", out, overrides)

    def runs_as_on_functions(self, options: TrainOptions) -> bool:
        """Whether a local run needs the worker of cloud functions: for its model, batch schedule or stream."""
        is_stream = bool(getattr(self.dataset, "is_stream", False))
        return (
            self.brings_update
            or bool(options.values["batch_schedule"])
            or is_stream
            or hasattr(self.model, "begin_epoch")
        )


def _train_options(where: str, options: TrainKeywords) -> TrainOptions:
    check_names(JOB_OPTIONS, options, where)
    return TrainOptions(**options)


def train_locally(
    function: TrainFunction | Task, options: TrainOptions, name: str, out: str | Path | None, overrides: TrainKeywords
) -> LocalResult:
    """Train in this process and print progress lines. Raises InvalidRequest, also if torch is not installed."""
    changed = options.override(overrides, "local()")
    job = changed.as_local_job(validate_name(changed.values["name"] or name))
    directory = None if out is None else Path(out).expanduser()
    try:
        if isinstance(function, Task) and function.runs_as_on_functions(changed):
            from springtide.runtime.local.function_task import run_local_task

            return run_local_task(function, job, directory)
        from springtide.runtime.local.inprocess import run_local
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"training needs {error.name}, which is not installed here: pip install 'springtide[runtime]'"
        ) from None
    return run_local(function, job, directory)


def submit_job(
    source: SourceFile,
    options: TrainOptions,
    name: str,
    client: Client | None = None,
    *,
    profile: str | Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    is_declared: bool = False,
    folder: FolderWish = None,
) -> JobHandle:
    """Submit a source file as a job, named by `options` or else `name`, with the folder that it is in.

    For a job on functions, `profile` is the path of a profile of its layers; without one they are measured. So it is
    with `on="auto"` for a declared one. Lines about that and about the folder are passed to `on_progress`. Raises as
    TrainFunction.submit does.
    """
    # A function's image, which imports this module, lacks the library that reads ignore files.
    from springtide.client.folders.send import submit_with_folder

    connected = _connect() if client is None else client
    compares = is_declared and options.values["on"] == "auto"
    request = job_request(
        source, options, name, connected, profile=profile, on_progress=on_progress, compares=compares, folder=folder
    )
    return JobHandle(connected, submit_with_folder(connected, request, folder, on_progress).job_id)


def quote_job(
    source: SourceFile,
    options: TrainOptions,
    name: str,
    client: Client | None = None,
    *,
    profile: str | Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    compares: bool = False,
) -> Quote:
    """Ask what submitting a source file as a job would lead to; arguments as for `submit_job`.

    With `compares`, a quote for machines also says how the same job would do on functions, if there is a function
    service.
    """
    connected = _connect() if client is None else client
    request = job_request(source, options, name, connected, profile=profile, on_progress=on_progress, compares=compares)
    return connected.quote(**request)


def job_request(
    source: SourceFile,
    options: TrainOptions,
    name: str,
    client: Client,
    *,
    profile: str | Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    compares: bool = False,
    folder: FolderWish = None,
) -> dict[str, Any]:
    """The keyword arguments for Client.submit_job and Client.quote.

    Raises InvalidRequest, also for a job on functions if the platform has no function service.
    """
    from springtide.client.folders.choice import with_code

    if is_auto(options.values["share"]):
        from springtide.client.share_profiles import job_as_profiled

        options = job_as_profiled(options, source, on_progress, client.sharing())
    status = client.status()
    devices = status.devices
    has_functions = any(device.kind == "function" for device in devices)
    # The upper bound of st.auto; places of a function service are not devices for workers.
    num_machines = sum(device.kind != "function" for device in devices)
    request = options.as_request(num_machines, datetime.now())
    called = validate_name(options.values["name"] or name)
    if options.values["on"] == "functions" and not has_functions:
        raise InvalidRequest(NO_FUNCTIONS)
    if options.values["on"] == "functions" or (compares and has_functions):
        request = with_layers(
            request,
            source,
            called,
            micro_batch=options.micro_batch_size(),
            largest_micro_batch=options.largest_micro_batch_size(),
            state_dir=str(getattr(client, "state_dir", "")),
            profile=profile,
            on_progress=on_progress,
        )
    has_pods = status.cluster is not None
    asked = options.values["requirements"]
    request = with_packages(request, asked, source, has_pods=has_pods, folder=folder, on_progress=on_progress)
    sent = with_code(source, folder, has_pods=has_pods)
    return {"name": called, "source": sent, "options": request}


def deploy_service(
    source: SourceFile,
    options: ServeOptions,
    name: str,
    client: Client | None = None,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
    folder: FolderWish = None,
    release: Mapping[str, Any] | None = None,
) -> ServiceHandle:
    """Deploy a source file as a service, named by `options` or else `name`, with the folder that it is in.

    `release` is that of PUT /v1/services. Lines about the folder, and about a profile that is used, are passed to
    `on_progress`. Raises as ServeFunction.deploy does.
    """
    from springtide.client.folders.choice import with_code
    from springtide.client.folders.send import deploy_with_folder

    connected = _connect() if client is None else client
    if is_auto(options.values["share"]):
        from springtide.client.share_profiles import service_as_profiled

        options = service_as_profiled(options, source, on_progress, connected.sharing())
    has_pods, called = connected.status().cluster is not None, validate_name(options.values["name"] or name)
    request, asked = options.as_request(), options.values["requirements"]
    request = with_packages(request, asked, source, has_pods=has_pods, folder=folder)
    sent = {"name": called, "source": with_code(source, folder, has_pods=has_pods), "options": request}
    if release:
        sent["release"] = dict(release)
    status = deploy_with_folder(connected, sent, folder, on_progress)
    return ServiceHandle(connected, status.name, status.releasing or status.revision)


def _connect() -> Client:
    from springtide.client.api import connect

    return connect()
