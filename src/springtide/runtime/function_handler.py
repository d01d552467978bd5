"""The entry point of cloud functions: `handler` gets an order as JSON and returns its result as JSON.

`handler(event, context)` has the signature that AWS Lambda calls (docs.aws.amazon.com/lambda/latest/dg/
python-handler.html). A warm process serves several invocations, and none leaves anything behind for the next.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import (
    BackendError,
    CheckpointError,
    CollectiveError,
    InvalidRequest,
    SpringtideError,
    StorageError,
)
from springtide.core.functions import ModelProfile
from springtide.core.ports import Store
from springtide.core.wire.functions import (
    MAX_ORDER_BYTES,
    ErrorCode,
    FunctionOrder,
    FunctionResult,
    Keys,
    Order,
    ProfileOrder,
)
from springtide.runtime.functions.reporting import FunctionReporter
from springtide.storage.stores.linked import DuplexLink, Lanes, LinkedStore
from springtide.storage.stores.open import open_store

_MAX_ERROR_CHARS = 2000


class HandlerInvocation(Protocol):
    """The provider's context object, as in AWS's Python runtime."""

    def get_remaining_time_in_millis(self) -> int:
        """The rest of the invocation's lifetime, in milliseconds."""
        ...


class ProfileResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a ProfileOrder: the profile and the dataset's length, or an error."""

    profile: ModelProfile | None = None
    num_samples: int = 0
    error: str = ""


def handler(event: Any, context: HandlerInvocation) -> dict[str, Any]:
    """Carry out one order and return its FunctionResult or ProfileResult as JSON values.

    Failures of the order are part of the result. Raises InvalidRequest if the event is not an order.
    """
    order = read_order(event)
    stores = open_stores(order.store_url, getattr(order, "parameter_url", ""), os.environ)
    try:
        if isinstance(order, ProfileOrder):
            return _as_json(_profile(order, stores[0], context))
        return _as_json(_train(order, stores, context))
    finally:
        for store in stores:
            store.close()


def read_order(event: Any) -> Order:
    """Decode the order in an invocation's payload. Raises InvalidRequest if it is malformed or too large."""
    try:
        data = msgspec.json.encode(event)
        if len(data) > MAX_ORDER_BYTES:
            raise InvalidRequest(f"an order has at most {MAX_ORDER_BYTES:,} bytes, this one {len(data):,}")
        # Encoded and decoded again, so that the types' bounds are checked: the payload came through other hands.
        order: Order = decode_json(data, Order)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"the payload is no order for a function: {error}") from None
    counts = (order.micro_batch_size - 1, order.num_rounds - 1) if isinstance(order, ProfileOrder) else _counts(order)
    if min(counts) < 0:
        raise InvalidRequest("the payload is no order for a function: its numbers must not be negative")
    return order


def _counts(order: FunctionOrder) -> tuple[int, ...]:
    return (order.generation, order.attempt, order.stage, order.replica, order.incarnation, order.restore_step)


def open_stores(store_url: str, parameter_url: str, environment: Mapping[str, str]) -> list[Store]:
    """Open the object store and, if there is one, the parameter store.

    If the environment gives this function a rate-limited link, both are limited to it. Raises InvalidRequest,
    StorageError.
    """
    link = DuplexLink.from_environment(environment)
    lanes = Lanes(link) if link is not None else None
    stores: list[Store] = []
    for url in (store_url, parameter_url):
        if url:
            store = open_store(url)
            stores.append(LinkedStore(store, lanes) if lanes is not None else store)
    return stores


def _train(order: FunctionOrder, stores: list[Store], context: HandlerInvocation) -> FunctionResult:
    reporter = FunctionReporter(order, stores[0], stores, time.monotonic)
    path = ""
    try:
        # Imported after the first report, because the import takes seconds on a small function.
        from springtide.runtime.functions.source import user_source
        from springtide.runtime.functions.worker import FunctionWorker

        with user_source(stores[0], Keys(order.prefix)) as source:
            path = source.path
            worker = FunctionWorker(
                order,
                stores[0],
                stores[-1],
                source,
                reporter,
                lambda: context.get_remaining_time_in_millis() / 1000.0,
                open_wire=partial(_another, stores),
            )
            return worker.run()
    except (Exception, SystemExit) as error:
        code = code_of(error)
        sentence = _sentence(error, path, names_type=code != "data")
        reporter.update("failed", error=sentence, error_code=code)
        return FunctionResult(
            stage=order.stage,
            replica=order.replica,
            incarnation=order.incarnation,
            outcome="failed",
            step=reporter.report.step,
            error=sentence,
            error_code=code,
            usage=reporter.usage(),
        )
    finally:
        reporter.close()
        sys.stdout.flush()


def _another(stores: list[Store], url: str) -> Store:
    """Open another store on the same link and add it to `stores`, which are closed and counted together."""
    store: Store = open_store(url)
    if isinstance(stores[0], LinkedStore):
        store = stores[0].beside(store)
    stores.append(store)
    return store


def _profile(order: ProfileOrder, store: Store, context: HandlerInvocation) -> ProfileResult:
    from springtide.runtime.functions.source import user_source
    from springtide.runtime.profiling.place import BYTES_PER_S, loopback_transfer
    from springtide.runtime.profiling.task_profiler import profile_task

    link = DuplexLink.from_environment(os.environ)
    # Without a limit the link's rate is unknown; assume the profiler's default.
    bytes_per_s = min(link.up_bytes_per_s, link.down_bytes_per_s) if link is not None else BYTES_PER_S
    bytes_per_s = bytes_per_s if math.isfinite(bytes_per_s) else BYTES_PER_S

    path = ""
    try:
        with user_source(store, Keys(order.prefix)) as source:
            path = source.path
            taken = profile_task(
                source.load(),
                name=source.job.name,
                micro_batch_size=order.micro_batch_size,
                num_rounds=order.num_rounds,
                memory_mb=int(getattr(context, "memory_limit_in_mb", 0) or 0),
                bytes_per_s=bytes_per_s,
                transfer=partial(loopback_transfer, bytes_per_s),
                seed=source.job.seed,
                params=source.job.params,
                store=store,
                on_progress=_log,
            )
        return ProfileResult(profile=taken.profile, num_samples=taken.num_samples or 0)
    except (Exception, SystemExit) as error:
        return ProfileResult(error=_sentence(error, path))


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")


def _sentence(error: BaseException, path: str, *, names_type: bool = True) -> str:
    """The error as one sentence, with its type first if `names_type`; the traceback goes to the log."""
    from springtide.runtime.process.entry import describe_error

    traceback.print_exception(error, file=sys.stderr)
    if not names_type:
        return str(error)[:_MAX_ERROR_CHARS]
    if isinstance(error, SpringtideError):
        return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
    return describe_error(error, path)[:_MAX_ERROR_CHARS]


def code_of(error: BaseException) -> ErrorCode:
    """The kind of failure, from which the coordinator decides whether another function may succeed."""
    from springtide.storage.datasets.manifest import DatasetLost
    from springtide.storage.workloads.artifacts import ArtifactDamaged

    if isinstance(error, DatasetLost):
        return "data"
    is_outside = isinstance(error, StorageError | CheckpointError | CollectiveError | BackendError)
    return "store" if is_outside and not isinstance(error, ArtifactDamaged) else "user_code"


def _as_json(result: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(result)
    return found
