"""The options of an inference service, as springtide.core.options.jobs has those of a job."""

from __future__ import annotations

from typing import Final

from springtide.core.options.environment import ENVIRONMENT_OPTIONS
from springtide.core.options.kinds import (
    Count,
    CountRange,
    DeviceCount,
    Document,
    Duration,
    Fractions,
    Name,
    Number,
    Objective,
    Params,
    ServiceNames,
    Size,
)
from springtide.core.options.option import FlagText, ObjectField, Option, RestField, Table
from springtide.core.workload import DEFAULT_GRACE_S, DEVICES_EACH, MAX_BODY_MIB, MAX_CONCURRENCY, MAX_VIRTUAL_SHARDS

DEFAULT_MAX_BATCH: Final = 8
_EACH: Final = DeviceCount(1, DEVICES_EACH[-1], 2)

SERVICE_OPTIONS: Final[Table] = (
    # In a request and in an object the name is that of the service itself.
    Option(
        name="name",
        kind=Name("name"),
        default="",
        flags={"deploy": FlagText("--name", "The service's name: its address is /f/NAME.")},
    ),
    Option(
        name="scale",
        kind=CountRange(0, MAX_VIRTUAL_SHARDS),
        default=(0, 1),
        flags={"deploy": FlagText("--scale N|MIN..MAX", "Replicas: guaranteed, and at most. 0 lets it sleep.")},
        parts=(
            RestField(
                "min_replicas",
                "at most max_replicas",
                kind=Count(0, MAX_VIRTUAL_SHARDS, 1),
                default=0,
                copied_to="workload",
            ),
            RestField("max_replicas", kind=Count(1, MAX_VIRTUAL_SHARDS, 4), default=1, copied_to="workload"),
        ),
        object=ObjectField("scale", "Replicas: guaranteed, and at most; 0..4 may sleep. Left out: 0..1."),
    ),
    Option(
        name="slo",
        kind=Objective(),
        flags={"deploy": FlagText("--slo TIME", "The latency to keep: 200ms (the 99th percentile).")},
        rest=RestField("slo_s", copied_to="workload"),
        object=ObjectField("slo", "The latency to keep: p99 < 200ms."),
    ),
    Option(
        name="max_batch",
        kind=Count(1, 4096, 8),
        default=DEFAULT_MAX_BATCH,
        flags={"deploy": FlagText("--max-batch", "Items that may be predicted together.")},
        rest=RestField("max_batch_size", copied_to="workload"),
        object=ObjectField("maxBatch", "Items that may be predicted together.", shows_default=True),
    ),
    Option(
        name="in_flight",
        kind=Count(1, 100_000, 8),
        default=8,
        flags={"deploy": FlagText("--in-flight", "Requests at once that call for one replica more.")},
        rest=RestField("target_in_flight", copied_to="workload"),
        object=ObjectField("inFlight", "Requests at once that call for one replica more.", shows_default=True),
    ),
    Option(
        name="max_queue",
        kind=Count(1, 1_000_000, 256),
        default=256,
        is_keyword=False,
        rest=RestField("max_queue", copied_to="workload"),
        object=ObjectField("maxQueue", "Requests that may wait.", shows_default=True),
    ),
    Option(
        name="max_body",
        kind=Count(1, MAX_BODY_MIB, 4),
        default=1,
        flags={"deploy": FlagText("--max-body MIB", "What the body of one call may have, in MiB.")},
        rest=RestField("max_body_mib", copied_to="workload"),
        object=ObjectField("maxBody", "What the body of one call may have, in MiB.", shows_default=True),
    ),
    Option(
        name="concurrency",
        kind=Count(1, MAX_CONCURRENCY, 4),
        flags={"deploy": FlagText("--concurrency", "Calls that a replica works on at a time.")},
        rest=RestField(
            "concurrency",
            "calls that a replica works on at a time; null: 1, and 64 if predict is async",
            copied_to="workload",
        ),
        object=ObjectField("concurrency", "Calls that a replica works on at a time. Left out: 1; if async, 64."),
    ),
    Option(
        name="calls",
        kind=ServiceNames(),
        default=(),
        flags={"deploy": FlagText("--calls NAME", "A service that its code may call; repeatable. [default: none]")},
        rest=RestField("calls", "names of the services that its code may call", copied_to="workload"),
        object=ObjectField("calls", "Names of the services that its code may call. Left out: none."),
    ),
    # Below 1 it is the short form of `share`; above, on how many devices each replica holds its share.
    Option(
        name="gpu",
        kind=Fractions(),
        default=1.0,
        flags={
            "deploy": FlagText(
                "--gpu N", "With --share: of how many devices of one node each replica holds it: 1, 2, 4 or 8.", _EACH
            )
        },
        parts=(
            RestField(
                "devices_each",
                "with share: of how many devices of one node each replica holds it: 1, 2, 4 or 8",
                kind=_EACH,
                default=1,
                copied_to="workload",
            ),
        ),
    ),
    Option(
        name="share",
        kind=Fractions(),
        flags={
            "deploy": FlagText(
                "--share N|MIN..MAX|auto",
                "What each replica holds of its device: sure of MIN, at most MAX (0.3..0.6, 30%). auto: as profiled.",
            )
        },
        parts=(RestField("share", kind=Document(), help="what each replica holds of its device; null: the whole"),),
        object=ObjectField("share", "What each replica holds of its device; left out: the whole."),
    ),
    Option(
        name="memory",
        kind=Size(),
        flags={"deploy": FlagText("--memory SIZE", "With --share: what it holds of the device's memory: 4GB.")},
        parts=(RestField("share.memory_mb"),),
        object=ObjectField("deviceMemory", "With share: what it holds of the device's memory."),
    ),
    Option(
        name="capacity",
        kind=Number("how many requests a second one replica answers", 120.0),
        flags={
            "deploy": FlagText("--capacity N", "Requests/s that one replica answers: replicas then follow the load.")
        },
        rest=RestField(
            "capacity_per_s",
            "requests a second that one replica answers within the objective, at the limit of its share; then "
            "the number of replicas follows the co-scaler",
            copied_to="workload",
        ),
        object=ObjectField("capacity", "Requests a second that one replica answers within the objective."),
    ),
    Option(
        name="batch_wait",
        kind=Duration(60, may_be_zero=True),
        default="5ms",
        rest=RestField("batch_wait_s", copied_to="workload", default=0.005),
        object=ObjectField("batchWait", "How long an item waits for others."),
    ),
    Option(
        name="idle",
        kind=Duration(),
        default="30s",
        flags={"deploy": FlagText("--idle TIME", "How long without requests until it sleeps.")},
        rest=RestField("idle_s", copied_to="workload", default=30.0),
        object=ObjectField("idle", "How long without requests until it sleeps."),
    ),
    Option(
        name="start_timeout",
        kind=Duration(may_be_zero=True),
        flags={
            "deploy": FlagText(
                "--start-timeout TIME", "What a replica may take to load; then it is ended. none: any time."
            )
        },
        rest=RestField(
            "start_timeout_s",
            "what a replica may take to get ready; then it is ended, and a new version rolled back; 0: any time",
            default=600.0,
            copied_to="workload",
        ),
        object=ObjectField("startTimeout", "What a replica may take to load; then it is ended. Left out: 10m."),
    ),
    Option(
        name="grace",
        kind=Duration(),
        default=DEFAULT_GRACE_S,
        is_keyword=False,
        rest=RestField("grace_s", copied_to="workload"),
        object=ObjectField("grace", "What a replica is given to answer what it has when it has to leave."),
    ),
    Option(
        name="params",
        kind=Params(),
        default={},
        flags={"deploy": FlagText("--param K=V", "For the class: self.params[K]. Repeatable.")},
        rest=RestField("params", copied_to="workload"),
        object=ObjectField("params", ""),
    ),
    *ENVIRONMENT_OPTIONS,
)
