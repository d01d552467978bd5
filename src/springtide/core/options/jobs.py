"""The options of a training job. To add one, add a row: the command line, the REST API and objects have it then.

A keyword also needs its line in TrainKeywords, a REST field in JobOptionsIn (both for the type checker alone), and a
field of TrainingJob of the same name takes the value where `copied_to` says so. Faces list options in this order.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal, get_args

from springtide.core.options.environment import ENVIRONMENT_OPTIONS
from springtide.core.options.kinds import (
    TEN_YEARS_S,
    Choice,
    Count,
    CountRange,
    DeviceCount,
    Document,
    Duration,
    Fractions,
    Moment,
    Money,
    Name,
    Number,
    Params,
    Phases,
    Rates,
    ShardCount,
    Size,
    Toggle,
)
from springtide.core.options.option import FlagText, ObjectField, Option, RestField, Table
from springtide.core.workload import (
    DEFAULT_GRACE_S,
    DEVICES_EACH,
    LEAST_SHARDS,
    MAX_VIRTUAL_SHARDS,
    LearningRateRule,
    LengthUnit,
    OnNan,
    OnStall,
)

Length = Literal["epochs", "progress"]
Where = Literal["cluster", "functions", "auto"]
# The unit that a job carries, by the value of the option `length`.
LENGTH_UNITS = MappingProxyType[Length, LengthUnit]({"epochs": "samples", "progress": "progress"})
# Of a pipeline on functions whose owner names no size: what FuncPipe was measured with.
DEFAULT_MICRO_BATCH: Final = 4
MAX_FUNCTION_WORKERS: Final = 10_000
_MILLION: Final = 1_000_000
# What is learnt from a thousand outcomes says nothing of probabilities beyond it.
MOST_CONFIDENCE: Final = 0.999

JOB_OPTIONS: Final[Table] = (
    Option(
        name="deadline",
        kind=Moment(),
        is_changeable=True,
        flags={
            "run": FlagText("--deadline TIME", "When it must be done: 10m, 1h30m or 18:00. Then as cheap as can be."),
            "tune": FlagText("--deadline TIME", "Of each job: 10m."),
            "change": FlagText("--deadline WHEN", "90m from now, or the next 18:00; none takes it away."),
        },
        rest=RestField("deadline_s", "seconds from now"),
        object=ObjectField("deadline", "When it must be done."),
    ),
    Option(
        name="confidence",
        kind=Number("a probability above 0 and up to 0.999", 0.99, MOST_CONFIDENCE),
        flags={
            "run": FlagText("--confidence P", "How probable it has to be that the deadline is kept: 0.99, 0.9."),
        },
        rest=RestField("confidence", "the probability with which the deadline has to be kept", copied_to="workload"),
        object=ObjectField("confidence", "How probable it has to be that the deadline is kept."),
    ),
    Option(
        name="budget",
        kind=Money(),
        is_changeable=True,
        flags={
            "run": FlagText("--budget MONEY", "What it may cost: $4. On functions then as fast as can be."),
            "change": FlagText(
                "--budget MONEY", "What all of it may cost, from its submission on; none takes it away."
            ),
        },
        rest=RestField("budget_usd", "of all the job has cost and will", copied_to="goal"),
        object=ObjectField("budget", "What it may cost, in US dollars."),
    ),
    Option(
        name="fastest",
        kind=Toggle(),
        default=False,
        flags={"run": FlagText("--fastest", "On functions: as fast as can be, within --budget where there is one.")},
        rest=RestField(
            "is_fastest",
            "on functions: time is all that counts, within the budget where there is one",
            copied_to="goal",
        ),
        object=ObjectField("functions.fastest", "Time is all that counts, within the budget where there is one."),
    ),
    Option(
        name="workers",
        kind=CountRange(1, MAX_VIRTUAL_SHARDS, may_be_auto=True),
        default="auto",
        flags={
            "run": FlagText("--workers N|MIN..MAX|auto", "How many workers it may have, whenever."),
            "tune": FlagText("--workers N|MIN..MAX", "Functions that each job may have."),
        },
        parts=(
            RestField("min_workers", "at most max_workers", kind=Count(1, MAX_VIRTUAL_SHARDS, 1), default=1),
            RestField("max_workers", kind=Count(1, MAX_VIRTUAL_SHARDS, 8), default=1),
        ),
        object=ObjectField("workers", "How many workers it may have, whenever; auto: up to all there are."),
    ),
    Option(
        name="epochs",
        kind=Count(1, 100_000, 10),
        default=1,
        flags={
            "run": FlagText("--epochs", "Passes over the dataset."),
            "tune": FlagText("--epochs", "Passes over the dataset."),
        },
        rest=RestField("num_epochs", copied_to="workload"),
        object=ObjectField("epochs", "Passes over the dataset.", shows_default=True),
    ),
    Option(
        name="global_batch",
        kind=CountRange(1, _MILLION),
        default=32,
        flags={
            "run": FlagText("--batch N|MIN..MAX", "The global batch size, or bounds to choose it in as it runs."),
            "tune": FlagText("--batch", "The global batch size.", kind=Count(1, _MILLION, 32)),
        },
        parts=(
            RestField("global_batch_size", kind=Count(1, _MILLION, 32), default=32),
            RestField(
                "batch",
                kind=Document(),
                help="lets the platform change the batch; global_batch_size is what it starts with",
            ),
        ),
        object=ObjectField("globalBatch", "Samples of one step over all workers; a range is chosen in."),
    ),
    # In the REST API it is global_batch_size, beside the bounds in `batch`.
    Option(
        name="initial_batch",
        kind=Count(1, _MILLION, 32),
        is_keyword=False,
        object=ObjectField("initialBatch", "What a range of globalBatch starts with; else its lower end."),
    ),
    Option(
        name="max_local_batch",
        kind=Count(1, _MILLION, 64),
        flags={"run": FlagText("--max-local-batch", "Samples that one worker holds at once.")},
        parts=(RestField("batch.max_local_size"),),
        object=ObjectField("maxLocalBatch", "Samples that one worker holds at once."),
    ),
    Option(
        name="min_local_batch",
        kind=Count(1, _MILLION, 8),
        is_keyword=False,
        parts=(RestField("batch.min_local_size"),),
        object=ObjectField("minLocalBatch", "The fewest samples that are worth a worker's pass."),
    ),
    Option(
        name="learning_rate",
        kind=Choice(get_args(LearningRateRule)),
        default="linear",
        flags={"run": FlagText("--learning-rate", "How it follows a batch that changes.")},
        parts=(RestField("batch.learning_rate"),),
        object=ObjectField("learningRate", "How it follows a batch that changes."),
    ),
    Option(
        name="length",
        kind=Choice(get_args(Length)),
        default="epochs",
        flags={"run": FlagText("--length", "What --epochs count if the batch changes.")},
        parts=(
            RestField(
                "length_unit",
                kind=Choice(get_args(LengthUnit)),
                default="samples",
                help="whether the epochs are passes over the data, or the progress so many make with the first batch",
                copied_to="workload",
            ),
        ),
        object=ObjectField("length", "What epochs count where the batch changes."),
    ),
    Option(
        name="exact",
        kind=ShardCount(1, MAX_VIRTUAL_SHARDS, LEAST_SHARDS),
        flags={
            "run": FlagText("--exact N", "The same bits on 1 to N workers (a power of two): somewhat slower."),
        },
        rest=RestField(
            "num_virtual_shards",
            "the result does not depend on the number of workers, bit for bit: a batch is computed in so many parts, "
            "a power of two that is at least max_workers; null: one part for each worker",
        ),
        object=ObjectField(
            "virtualShards",
            "The same bits on any number of workers: into how many parts a batch is cut, a power of two that is at "
            "least the most workers.",
        ),
    ),
    Option(
        name="num_samples",
        kind=Count(1, 10**12, 50_000),
        flags={"run": FlagText("--samples N", "Samples of one epoch, where you know.")},
        rest=RestField("num_samples", "of one epoch, where it is known"),
        object=ObjectField("samples", "Samples of one epoch, where that is known."),
    ),
    # In a request the name stands beside the options, in an object it is that of the object.
    Option(
        name="name",
        kind=Name("name"),
        default="",
        flags={
            "run": FlagText(
                "--name", "The job's name; its id is made from it. Earlier runs count whatever their names."
            )
        },
    ),
    Option(
        name="seed",
        kind=Count(0, 2**63 - 1, 0),
        default=0,
        flags={
            "run": FlagText("--seed", "Where all chance comes from."),
            "tune": FlagText("--seed", "Where all chance comes from."),
        },
        rest=RestField("seed", copied_to="workload"),
        object=ObjectField("seed", "Where all chance comes from.", shows_default=True),
    ),
    Option(
        name="params",
        kind=Params(),
        default={},
        flags={
            "run": FlagText("--param K=V", "For the function: ctx.params[K]. Repeatable."),
            "tune": FlagText("--param K=V", "For every trial. Repeatable."),
        },
        rest=RestField("params", copied_to="workload"),
        object=ObjectField("params", ""),
    ),
    *ENVIRONMENT_OPTIONS,
    # An object with spec.functions is on functions.
    Option(
        name="on",
        kind=Choice(get_args(Where)),
        default="cluster",
        flags={
            "run": FlagText(
                "--on",
                "Where: the platform's machines, a function service, the better of both, or an object of Kubernetes.",
                choices=("k8s",),
            )
        },
        rest=RestField("on", "the platform's machines, its function service, or whichever makes its goal cheapest"),
    ),
    # The layers are profiled with it before the job is sent.
    Option(
        name="micro_batch",
        kind=Count(1, _MILLION, DEFAULT_MICRO_BATCH),
        flags={"run": FlagText("--micro-batch N", "On functions: samples that flow through at a time.")},
    ),
    Option(
        name="batch_schedule",
        kind=Phases(),
        default=(),
        flags={
            "run": FlagText(
                "--batch-schedule EPOCH:N,...", "On functions: another global batch from these epochs on: 0:64,4:256."
            )
        },
        rest=RestField(
            "batch_schedule",
            "on functions: the global batch from each of these epochs on, ascending; before the first it is "
            "global_batch_size",
        ),
        object=ObjectField("functions.batchSchedule", ""),
    ),
    Option(
        name="search",
        kind=Toggle(may_be_open=True),
        flags={
            "run": FlagText(
                "--search/--no-search",
                "On functions: try numbers of workers and memory sizes while it trains. Without the flag: where a "
                "goal asks for it and the model fits one function.",
            )
        },
        rest=RestField(
            "search",
            "on functions: whether workers and their memory are searched for while it runs; null: where a goal "
            "asks for it and the model fits one function",
        ),
        object=ObjectField("functions.search", "Try numbers of workers and memory sizes while it trains."),
    ),
    # The keyword and the flag `workers` fill it for a job on functions.
    Option(
        name="function_workers",
        kind=CountRange(1, MAX_FUNCTION_WORKERS),
        is_keyword=False,
        rest=RestField(
            "function_workers", "on functions: the bounds of a search for the number of workers", examples=([2, 16],)
        ),
        object=ObjectField("functions.workers", "The bounds of that search."),
    ),
    # Both are filled by the client: from a profile, and from the task's dataset.
    Option(
        name="layer_profile",
        kind=Document(),
        is_keyword=False,
        rest=RestField(
            "layer_profile", "what a job on functions is planned from; a quote for the cluster compares with it"
        ),
        object=ObjectField("functions.layerProfile", "The model's layers, as springtide profile --layers writes them."),
    ),
    Option(
        name="stream",
        kind=Name("dataset"),
        default="",
        is_keyword=False,
        rest=RestField("stream", "on functions: the growing dataset that it trains on", copied_to="workload"),
        object=ObjectField("functions.stream", "The growing dataset that it trains on."),
    ),
    Option(
        name="share",
        kind=Fractions(),
        flags={
            "run": FlagText(
                "--share N|MIN..MAX|auto",
                "What each worker holds of its device: sure of MIN, at most MAX (0.3..0.6, 30%). auto: as profiled.",
            )
        },
        parts=(RestField("share", kind=Document(), help="what each worker holds of its device; null: the whole"),),
        object=ObjectField("share", "What each worker holds of its device; left out: the whole."),
    ),
    Option(
        name="memory",
        kind=Size(),
        flags={"run": FlagText("--memory SIZE", "With --share: what it holds of the device's memory: 4GB.")},
        parts=(RestField("share.memory_mb"),),
        object=ObjectField("deviceMemory", "With share: what it holds of the device's memory."),
    ),
    Option(
        name="gpu",
        kind=DeviceCount(1, DEVICES_EACH[-1], 2),
        default=1,
        flags={
            "run": FlagText(
                "--gpu N",
                "Devices of one node that each worker holds, with --share that of each: 1, 2, 4 or 8.",
            )
        },
        rest=RestField(
            "devices_each",
            "devices of one node that each worker holds: 1, 2, 4 or 8; whole ones, or `share` of each",
            copied_to="workload",
        ),
        object=ObjectField("gpu", "Whole devices of one node that each worker holds: 1, 2, 4 or 8."),
    ),
    Option(
        name="study",
        kind=Name("the study's name"),
        default="",
        flags={"run": FlagText("--study NAME", "The search over jobs that this one is a trial of.")},
        rest=RestField("study", "the search over jobs that it is a trial of", copied_to="workload"),
        object=ObjectField("study", "The search over jobs that it is a trial of."),
    ),
    Option(
        name="soft",
        kind=Toggle(),
        default=False,
        is_changeable=True,
        flags={
            "run": FlagText("--soft", "The deadline is an aim: it runs, late if it must."),
            "change": FlagText("--soft/--hard", "Whether the deadline is one to aim at, or a promise."),
        },
        rest=RestField("is_soft", "a deadline to aim at, not a condition: it runs, late if it must", copied_to="goal"),
        object=ObjectField("soft", "The deadline is an aim: it runs, late if it must."),
    ),
    Option(
        name="wait",
        kind=Toggle(),
        default=False,
        is_changeable=True,
        flags={
            "run": FlagText("--wait", "Stay in line while the deadline cannot be promised yet."),
            "change": FlagText("--wait/--no-wait", "Whether it stays in line while its deadline cannot be promised."),
        },
        rest=RestField("waits", "stays in line while its deadline cannot be promised yet", copied_to="goal"),
        object=ObjectField("wait", "Stay in line while the deadline cannot be promised yet."),
    ),
    Option(
        name="retries",
        kind=Count(0, 1000, 3),
        default=3,
        is_changeable=True,
        flags={"change": FlagText("--retries", "How often it may be begun again after faults.")},
        rest=RestField("max_restarts", copied_to="workload"),
        object=ObjectField("retries", "How often it may begin again from a checkpoint after a failure."),
    ),
    Option(
        name="stall_timeout",
        kind=Duration(TEN_YEARS_S, may_be_zero=True),
        flags={"run": FlagText("--stall-timeout TIME", "How long it may go without a step: 20m; none: any time.")},
        rest=RestField(
            "stall_timeout_s",
            "how long it may go without a step; null: 10 minutes, or longer where its steps are long; 0: any time",
            copied_to="workload",
        ),
        object=ObjectField(
            "stallTimeout", "How long it may go without a step; left out: 10m, longer where its steps are long."
        ),
    ),
    Option(
        name="on_stall",
        kind=Choice(get_args(OnStall)),
        default="report",
        flags={
            "run": FlagText(
                "--on-stall", "What happens then: say so, begin again from its checkpoint, or end it as failed."
            )
        },
        rest=RestField(
            "on_stall", "what happens to it when it has gone without a step for too long", copied_to="workload"
        ),
        object=ObjectField(
            "onStall", "When it goes without a step for too long: say so, begin again from its checkpoint, or fail."
        ),
    ),
    Option(
        name="start_timeout",
        kind=Duration(TEN_YEARS_S, may_be_zero=True),
        flags={
            "run": FlagText(
                "--start-timeout TIME", "From its start to its first step; then it is started again. none: any time."
            )
        },
        rest=RestField(
            "start_timeout_s",
            "from its start to its first step; then it is started again, as after a crash; 0: any time",
            default=1800.0,
            copied_to="workload",
        ),
        object=ObjectField(
            "startTimeout", "From its start to its first step; then it is started again. Left out: 30m."
        ),
    ),
    Option(
        name="on_nan",
        kind=Choice(get_args(OnNan)),
        default="report",
        flags={
            "run": FlagText("--on-nan", "What happens when its loss is NaN or infinite: say so, or end it as failed.")
        },
        rest=RestField("on_nan", "what happens to it when its loss is NaN or infinite", copied_to="workload"),
        object=ObjectField("onNan", "When its loss is NaN or infinite: say so, or fail."),
    ),
    Option(
        name="grace",
        kind=Duration(TEN_YEARS_S),
        default=DEFAULT_GRACE_S,
        is_keyword=False,
        rest=RestField("grace_s", copied_to="workload"),
        object=ObjectField("grace", "What it is given to save when it has to leave."),
    ),
    Option(
        name="checkpoint_every",
        kind=Duration(TEN_YEARS_S),
        default=30.0,
        is_keyword=False,
        rest=RestField("checkpoint_interval_s", copied_to="workload"),
        object=ObjectField("checkpointEvery", "How often it saves while it runs."),
    ),
    Option(
        name="speeds",
        kind=Rates(MAX_VIRTUAL_SHARDS),
        default={},
        is_keyword=False,
        rest=RestField(
            "profile_steps_per_s",
            "optimizer steps a second by number of workers, where they are known",
            examples=({"1": 3.2, "2": 5.9},),
        ),
        object=ObjectField("speeds", "Optimizer steps a second by number of workers, where they are known."),
    ),
    Option(
        name="step_profile",
        kind=Document(),
        is_keyword=False,
        rest=RestField("step_profile", "the timeline of a step, where it was taken"),
        object=ObjectField("stepProfile", "The timeline of a step, as springtide profile writes it."),
    ),
)
CHANGEABLE_OPTIONS: Final[Table] = tuple(option for option in JOB_OPTIONS if option.is_changeable)
