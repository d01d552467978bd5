"""The process of a share profile: it runs the user's class or function as its orders say, and times it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import InvalidRequest
from springtide.core.workload import TrainingJob
from springtide.runtime.process.child_member import run_member
from springtide.runtime.process.child_processes import MemberFiles
from springtide.runtime.process.entry import as_function, load_object
from springtide.runtime.process.exits import WorkerExit
from springtide.runtime.profiling.place import status_bytes
from springtide.runtime.profiling.share_profiler import MAX_DURATIONS, JsonLines, RunAnswer, RunOrder, ShareSpec, send
from springtide.runtime.serving.replica import ServedUserModel, load_served_class
from springtide.serving.schema import Parameter, ServiceSchema, check_call, parse_json

_MIB = 1 << 20
# Large enough that a measured batch is never split.
_MAX_BATCH = 1 << 16
_MADE_UP = {"FP64": 0.5, "INT64": 1, "BOOL": True, "BYTES": "example"}
# More epochs than any profile runs.
_MANY_EPOCHS = 1_000_000


class ProfilerOrders:
    """The child's end of the pipes: reads orders, times iterations, and answers."""

    def __init__(self, spec: ShareSpec, clock: Callable[[], float] = time.perf_counter) -> None:
        self._lines = JsonLines(spec.orders_fd)
        self._answers_fd = spec.answers_fd
        self._clock = clock
        self._is_too_large = False

    def give_up(self) -> None:
        """End the current order after this iteration, because its batch does not fit into memory."""
        self._is_too_large = True

    def answer(self, answer: RunAnswer) -> None:
        send(self._answers_fd, msgspec.structs.replace(answer, peak_mb=status_bytes("VmHWM") // _MIB))

    def iterations(self, num_samples: int, is_batchable: bool) -> Iterator[RunOrder]:
        """Yield the current order before every iteration, until no more orders come.

        The caller runs one iteration between two yields. `num_samples` is the size of an iteration (0: the order's
        batch size). Sends the first answer, that all is loaded, at once.
        """
        self.answer(RunAnswer(is_batchable=is_batchable))
        while (order := self._lines.read(RunOrder)) is not None:
            self._is_too_large = False
            began_s = self._clock()
            yield order
            while not self._is_too_large and self._clock() - began_s < order.warm_s:
                yield order
            durations_s: list[float] = []
            began_s = at_s = self._clock()
            while not self._is_too_large and len(durations_s) < MAX_DURATIONS:
                yield order
                now_s = self._clock()
                durations_s.append(now_s - at_s)
                at_s = now_s
                if now_s - began_s >= order.measure_s:
                    break
            self.answer(
                RunAnswer(
                    durations_s=durations_s,
                    num_samples=num_samples or order.batch_size,
                    is_batchable=is_batchable,
                    is_too_large=self._is_too_large,
                )
            )


def main(spec_path: str) -> NoReturn:
    """Run until no more orders come, and end the process."""
    spec = decode_json(Path(spec_path).read_bytes(), ShareSpec)
    work = _serve if spec.kind == "inference" else _train
    run_member(
        MemberFiles(Path(spec.directory), spec.name),
        lambda: work(spec, ProfilerOrders(spec)),
        source_path=spec.entrypoint.source_path,
    )


def _serve(spec: ShareSpec, orders: ProfilerOrders) -> None:
    model = ServedUserModel(load_served_class(spec.entrypoint), _MAX_BATCH, spec.params)
    call = msgspec.json.decode(one_call(model.schema, spec.call))
    lists = [parameter.name for parameter in model.schema.parameters if parameter.is_list and parameter.name in call]
    bodies: dict[int, bytes] = {}
    for order in orders.iterations(0, model.schema.is_batchable):
        size = order.batch_size if model.schema.is_batchable else 1
        if size not in bodies:
            # One call with all items, because a batch of several calls that fails is retried call by call.
            bodies[size] = msgspec.json.encode({**call, **{name: call[name] * size for name in lists}})
        (outcome,) = model.answer([bodies[size]])
        if outcome.status == "ok":
            continue
        if order.batch_size > 1 and outcome.is_out_of_memory:
            orders.give_up()
            continue
        message = outcome.body.decode(errors="replace")
        raise InvalidRequest(
            f"{spec.entrypoint.object_name}.predict does not answer what it is profiled with, a batch of "
            f"{order.batch_size}: {message[:300]}; give a request that it answers with --input"
        )


def one_call(schema: ServiceSchema, given: str) -> bytes:
    """A request with one item, as JSON: the given one, or one made up from the types. Raises InvalidRequest."""
    if given:
        body = given.encode()
        call = check_call(schema, body, parse_json(body))
        if call.num_items != 1:
            raise InvalidRequest(
                f"--input holds {call.num_items} items; give a request with one, batches are made of it"
            )
        return call.body
    made_up: dict[str, Any] = {}
    for parameter in schema.parameters:
        if not parameter.is_required:
            continue
        if parameter.datatype not in _MADE_UP or len(parameter.shape) > 1:
            raise InvalidRequest(
                f"what {parameter.name!r} holds cannot be guessed; say what one request is, as it is sent: "
                f"""--input '{{"{parameter.name}": [...]}}' (or --input @FILE.json)"""
            )
        made_up[parameter.name] = _value(parameter)
    return msgspec.json.encode(made_up)


def _value(parameter: Parameter) -> Any:
    value = _MADE_UP[parameter.datatype]
    return [value] if parameter.is_list else value


def _train(spec: ShareSpec, orders: ProfilerOrders) -> None:
    # Imported here, because it imports torch, which services may not need.
    from springtide.runtime.local.inprocess import run_local

    assert spec.job is not None, "a training function comes with its job"
    job = msgspec.structs.replace(spec.job, num_epochs=_MANY_EPOCHS, params=spec.params)
    function = as_function(load_object(spec.entrypoint, "springtide_user_shares"))
    steps = _Steps(orders, job)
    try:
        run_local(lambda ctx: function(_Measured(ctx, steps)), job, Path(spec.directory) / "out", lambda _: None)
    except WorkerExit:
        return
    raise InvalidRequest(
        f"{spec.entrypoint.object_name} returned before it was measured; loop over all of ctx.batches(dataset)"
    )


class _Steps:
    """Turns steps of a training function into iterations; blocks between two steps while there is no order."""

    def __init__(self, orders: ProfilerOrders, job: TrainingJob) -> None:
        self._orders = orders
        self._job = job
        self._iterations: Iterator[RunOrder] | None = None

    def after_step(self) -> None:
        """Call after each step; waits for an order. Raises WorkerExit when no more orders come."""
        if self._iterations is None:
            # After the first step, which compiles and allocates, everything is loaded.
            self._iterations = self._orders.iterations(self._job.global_batch_size, is_batchable=True)
        if next(self._iterations, None) is None:
            raise WorkerExit(0)


class _Measured:
    """A TrainContext that reports every completed step to `steps` and saves nothing."""

    def __init__(self, context: Any, steps: _Steps) -> None:
        self._context = context
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def step(self, loss: Any, **options: Any) -> bool:
        """Call the context's `step`, and wait for an order after each completed optimizer step."""
        return self._counted(self._context.step(loss, **options))

    def update(self, *arguments: Any) -> bool:
        """The same with the context's `update`."""
        return self._counted(self._context.update(*arguments))

    def _counted(self, is_step: bool) -> bool:
        if is_step:
            self._steps.after_step()
        return is_step

    def save(self, name: str = "model") -> str:
        """Save nothing: the model of a profile is discarded."""
        return f"{name}.safetensors"


if __name__ == "__main__":
    main(sys.argv[1])
