"""The Python surface: `st.train`, `st.serve`, `st.Task`, `st.model_path` and the objects they give."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from springtide.client.goals import Auto, TrainKeywords, TrainOptions, auto
from springtide.client.handles import JobHandle, ServiceHandle
from springtide.client.layer_profiles import ONLY_DECLARED, with_layers
from springtide.client.serving_goals import ServeKeywords, ServeOptions
from springtide.client.shares import is_auto
from springtide.client.source import (
    SourceFile,
    default_state_directory,
    for_pods,
    name_from,
    object_name_in,
    read_source,
    refuse_while_importing,
    source_of,
    state_directory_around,
)
from springtide.core.context import TrainContext
from springtide.core.errors import InvalidRequest, SpringtideError
from springtide.core.model import ONLY_ON_FUNCTIONS, call_factory
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.option import check_names
from springtide.core.quantities import validate_name
from springtide.core.status.quote import Quote

if TYPE_CHECKING:
    from springtide.client.api import Client
    from springtide.runtime.local.function_task import LocalResult

__all__ = ["Auto", "ServeFunction", "Task", "TrainFunction", "auto", "model_path", "serve", "train"]

NO_FUNCTIONS = (
    "this platform is connected to no function service; start it with one: `springtide down`, then "
    "`springtide up --functions emulator` (on this machine, to try it) or aws, alibaba; on Kubernetes set "
    "functions.provider"
)
TrainingCallable = Callable[[TrainContext], Any]
ServedT = TypeVar("ServedT")


class TrainFunction:
    """A training function with its goal. Calling it runs the function; `.submit()` hands it to the platform."""

    def __init__(self, function: TrainingCallable, options: TrainOptions) -> None:
        if not callable(function) or isinstance(function, type):
            raise InvalidRequest(f"st.train decorates a function that takes a TrainContext, not {function!r:.80}")
        self.function = function
        self.options = options
        self.name = options.values["name"] or name_from(function.__name__)
        functools.update_wrapper(self, function)

    def __call__(self, context: TrainContext) -> Any:
        """Run the function with a context of your own."""
        return self.function(context)

    def __repr__(self) -> str:
        """Name the function and what was asked of it."""
        return f"<TrainFunction {self.name}: {self.options}>"

    def source(self) -> SourceFile:
        """The file that workers get. Raises InvalidRequest if the function is not at the top level of a file."""
        return source_of(self.function, "function")

    def submit(self, client: Client | None = None, **overrides: Unpack[TrainKeywords]) -> JobHandle:
        """Hand the job to the running platform. Raises InvalidRequest with what would do."""
        refuse_while_importing(self.function.__code__.co_filename, f"{self.name}.submit()")
        options = self.options.override(overrides)
        self._refuse_functions(options)
        return submit_job(self.source(), options, self.name, client)

    def quote(self, client: Client | None = None, **overrides: Unpack[TrainKeywords]) -> Quote:
        """Ask the running platform what `submit` with the same keywords would meet; nothing is changed."""
        options = self.options.override(overrides, "quote()")
        self._refuse_functions(options)
        return quote_job(self.source(), options, self.name, client)

    def _refuse_functions(self, options: TrainOptions) -> None:
        if options.values["on"] == "functions":
            raise InvalidRequest(f"{self.name} is a training function, and {ONLY_DECLARED}")

    def local(self, out: str | Path | None = None, **overrides: Unpack[TrainKeywords]) -> LocalResult:
        """Train here and now, in this process on one worker, without a platform; takes the keywords of `submit`.

        Gives the bits that a run on the platform gives. What `ctx.save` writes lands in `out` (springtide-out/<name>).
        Raises InvalidRequest, and whatever the function raises.
        """
        refuse_while_importing(self.function.__code__.co_filename, f"{self.name}.local()")
        return train_locally(self, self.options, self.name, out, overrides)


class ServeFunction(Generic[ServedT]):
    """An inference class with its objective. Calling it makes an instance; `.deploy()` hands it to the platform."""

    def __init__(self, cls: type[ServedT], options: ServeOptions) -> None:
        if not isinstance(cls, type):
            raise InvalidRequest(f"st.serve decorates a class with a predict method, not {cls!r:.80}")
        if not callable(getattr(cls, "predict", None)):
            raise InvalidRequest(f"{cls.__name__} has no method predict; define `def predict(self, ...)` on it")
        self.cls = cls
        self.options = options
        self.name = options.values["name"] or name_from(cls.__name__)
        self.__doc__ = cls.__doc__
        self.__module__ = cls.__module__
        self.__wrapped__ = cls

    def __call__(self, *args: Any, **kwargs: Any) -> ServedT:
        """Make an instance, as calling the class does; nothing is loaded."""
        return self.cls(*args, **kwargs)

    def __repr__(self) -> str:
        """Name the class and what was asked of it."""
        return f"<ServeFunction {self.name}: {self.options}>"

    def source(self) -> SourceFile:
        """The file that replicas get. Raises InvalidRequest if the class is not at the top level of a file."""
        return source_of(self.cls, "class")

    def deploy(self, client: Client | None = None, **overrides: Unpack[ServeKeywords]) -> ServiceHandle:
        """Hand the service to the running platform, or replace the one of that name."""
        refuse_while_importing(sys.modules[self.cls.__module__].__file__ or "", f"{self.name}.deploy()")
        return deploy_service(self.source(), self.options.override(overrides), self.name, client)

    def local(self) -> ServedT:
        """An instance in this process, loaded: what a replica would answer with."""
        instance = self.cls()
        if self.options.values["params"] and not hasattr(instance, "params"):
            instance.params = {key: str(value) for key, value in self.options.values["params"].items()}  # type: ignore[attr-defined]
        load = getattr(instance, "load", None)
        if callable(load):
            load()
        return instance


@overload
def train(function: TrainingCallable, /) -> TrainFunction: ...
@overload
def train(**options: Unpack[TrainKeywords]) -> Callable[[TrainingCallable], TrainFunction]: ...
def train(
    function: TrainingCallable | None = None, /, **options: Unpack[TrainKeywords]
) -> TrainFunction | Callable[[TrainingCallable], TrainFunction]:
    """Make a training function: `@st.train` or `@st.train(deadline="10m", workers=(1, 8))`.

    Raises InvalidRequest for options that cannot be.
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
    """Make an inference class: `@st.serve` or `@st.serve(slo="p99 < 200ms", scale=(0, 4))`.

    Raises InvalidRequest for options that cannot be.
    """
    checked = ServeOptions(**options)
    if cls is not None:
        return ServeFunction(cls, checked)
    return lambda decorated: ServeFunction(decorated, checked)


class Task:
    """A declared training job: a model, a dataset, a loss and an optimizer (values, or factories of them).

    `model` and `dataset` may be factories, `optimizer` is a factory that takes the parameters, and `loss` is called
    with the model's output and the targets. A factory with a parameter called `params` gets the job's. A model that
    has its own gradients and update (`st.Model`, `st.jax_model`) comes without loss and optimizer, in any framework;
    such a task runs on functions, or here.
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
        # The object has no name of its own, so the file that creates it is remembered: workers look it up there.
        self._namespace = sys._getframe(1).f_globals

    @property
    def brings_update(self) -> bool:
        """Whether the model has its own gradients and update; then there are no loss and optimizer."""
        return self.loss is None

    def check_place(self, options: TrainOptions) -> None:
        """Raise InvalidRequest where the model cannot be trained in the place that the options name."""
        if self.brings_update and options.values["on"] != "functions":
            raise InvalidRequest(ONLY_ON_FUNCTIONS)

    def function(self, context: TrainContext) -> None:
        """The training loop that the declaration stands for. Raises InvalidRequest where the model brings its own."""
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
        """The file that workers get. Raises InvalidRequest if the task is not at the top level of a file."""
        path = self._namespace.get("__file__")
        if not path:
            raise InvalidRequest("this st.Task was not created in a file; write it into a .py file")
        return read_source(path, object_name_in(self, self._namespace, "st.Task"))

    def submit(
        self, client: Client | None = None, *, profile: str | Path | None = None, **overrides: Unpack[TrainKeywords]
    ) -> JobHandle:
        """Hand the job to the running platform. Raises InvalidRequest with what would do.

        With on="functions" its layers are profiled first, unless `profile` names a profile of them.
        """
        refuse_while_importing(str(self._namespace.get("__file__", "")), "submit()")
        source, options = self.source(), self.options.override(overrides)
        self.check_place(options)
        name = self.name or name_from(source.object_name)
        return submit_job(source, options, name, client, profile=profile)

    def quote(
        self, client: Client | None = None, *, profile: str | Path | None = None, **overrides: Unpack[TrainKeywords]
    ) -> Quote:
        """Ask the running platform what `submit` with the same keywords would meet; nothing is changed."""
        source, options = self.source(), self.options.override(overrides, "quote()")
        self.check_place(options)
        return quote_job(source, options, self.name or name_from(source.object_name), client, profile=profile)

    def local(self, out: str | Path | None = None, **overrides: Unpack[TrainKeywords]) -> LocalResult:
        """Train here and now, in this process on one worker, without a platform; takes the keywords of `submit`.

        A model that was handed over as a value is copied, so the task can be run again. What is learned lands in `out`
        (springtide-out/<name>). Raises InvalidRequest.
        """
        refuse_while_importing(str(self._namespace.get("__file__", "")), "local()")
        task = copy.copy(self)
        if hasattr(self.model, "forward") and not isinstance(self.model, type):
            task.model = copy.deepcopy(self.model)
        return train_locally(task, self.options, self.name or "task", out, overrides)

    def runs_as_on_functions(self, options: TrainOptions) -> bool:
        """Whether a run here takes the way of functions: no other has its model, its batches or its data."""
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
    """Train in this process, printing progress as plain lines. Raises InvalidRequest; also where torch is missing."""
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
) -> JobHandle:
    """Submit any source file as a job; the name in the options wins over `name`.

    For one on functions `profile` is a profile of its layers; without one they are measured. `on_progress` gets
    progress.
    """
    connected = _connect() if client is None else client
    asked = job_request(source, options, name, connected, profile=profile, on_progress=on_progress)
    return JobHandle(connected, connected.submit_job(**asked).job_id)


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
    """Ask what submitting any source file as a job would meet; the name in the options wins over `name`.

    With `compares` a quote for the cluster says what the same job would meet on functions, where there are any.
    """
    connected = _connect() if client is None else client
    asked = job_request(source, options, name, connected, profile=profile, on_progress=on_progress, compares=compares)
    return connected.quote(**asked)


def job_request(
    source: SourceFile,
    options: TrainOptions,
    name: str,
    client: Client,
    *,
    profile: str | Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    compares: bool = False,
) -> dict[str, Any]:
    """The keywords of Client.submit_job and Client.quote. Raises InvalidRequest, also where there are no functions."""
    if is_auto(options.values["share"]):
        from springtide.client.share_profiles import job_as_profiled

        options = job_as_profiled(options, source, on_progress, client.sharing())
    status = client.status()
    devices = status.devices
    has_functions = any(device.kind == "function" for device in devices)
    # What `auto` may grow to: a place at a function service is no device for a worker.
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
    sent = source if status.cluster is None else for_pods(source)
    return {"name": called, "source": sent, "options": request}


def deploy_service(
    source: SourceFile,
    options: ServeOptions,
    name: str,
    client: Client | None = None,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ServiceHandle:
    """Deploy any source file as a service; the name in the options wins over `name`.

    `on_progress` gets what is to be known of it.
    """
    connected = _connect() if client is None else client
    if is_auto(options.values["share"]):
        from springtide.client.share_profiles import service_as_profiled

        options = service_as_profiled(options, source, on_progress, connected.sharing())
    if connected.status().cluster is not None:
        source = for_pods(source)
    status = connected.deploy_service(
        name=validate_name(options.values["name"] or name), source=source, options=options.as_request()
    )
    return ServiceHandle(connected, status.name)


def _connect() -> Client:
    from springtide.client.api import connect

    return connect()


def model_path(name: str) -> str:
    """The path of the model that the newest successful job of that name saved (safetensors).

    Raises InvalidRequest if there is none yet.
    """
    validate_name(name, "job name")
    state_directory = _state_directory(str(sys._getframe(1).f_globals.get("__file__", "")))
    found = _newest_by_platform(name) if state_directory is None else None
    if found is None:
        found = _newest_on_disk(state_directory or default_state_directory(), name)
    if found is None:
        raise InvalidRequest(
            f"no job named {name!r} has saved a model yet; run one whose function calls ctx.save(), then try again"
        )
    return found


def _state_directory(calling_file: str) -> Path | None:
    """The state directory that this process is part of: that of the replica which imports the calling file."""
    return state_directory_around(calling_file) if calling_file else None


def _newest_by_platform(name: str) -> str | None:
    try:
        with _connect() as client:
            jobs = client.jobs()
    except SpringtideError:
        return None
    saved = [job for job in jobs if job.name == name and job.state == "SUCCEEDED" and job.artifact_path]
    newest = max(saved, key=lambda job: job.ended_at_s or 0.0, default=None)
    return newest.artifact_path if newest is not None and Path(newest.artifact_path).is_file() else None


def _newest_on_disk(state_directory: Path, name: str) -> str | None:
    models = list((state_directory / "workloads").glob(f"{name}-*/artifacts/model.safetensors"))
    # A name that continues this one with a dash would match too: ids are the name, a dash and a part without dashes.
    mine = [model for model in models if model.parent.parent.name.rpartition("-")[0] == name]
    newest = max(mine, key=lambda model: model.stat().st_mtime, default=None)
    return None if newest is None else str(newest)
