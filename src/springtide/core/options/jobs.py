"""The options of a training job. To add one, add a row: the command line, the REST API and objects have it then.

A keyword also needs its line in TrainKeywords, a REST field in JobOptionsIn (both for the type checker alone), and a
field of TrainingJob of the same name takes the value where `copied_to` says so. Faces list options in this order.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal, get_args

from springtide.core.options.kinds import (
    TEN_YEARS_S,
    Choice,
    Count,
    CountRange,
    Document,
    Duration,
    Fractions,
    Moment,
    Money,
    Name,
    Params,
    Phases,
    Rates,
    Size,
    Toggle,
)
from springtide.core.options.option import FlagText, ObjectField, Option, RestField, Table
from springtide.core.workload import DEFAULT_GRACE_S, MAX_VIRTUAL_SHARDS, LearningRateRule, LengthUnit

Length = Literal["epochs", "progress"]
Where = Literal["cluster", "functions"]
# What an option of `length` is called where a job carries it.
LENGTH_UNITS = MappingProxyType[Length, LengthUnit]({"epochs": "samples", "progress": "progress"})
# Of a pipeline on functions, unless the owner says otherwise: what FuncPipe was measured with.
DEFAULT_MICRO_BATCH: Final = 4
MAX_FUNCTION_WORKERS: Final = 10_000
_MILLION: Final = 1_000_000

JOB_OPTIONS: Final[Table] = (
    Option(
        name="deadline",
        kind=Moment(),
        is_changeable=True,
        flags={
            "run": FlagText(
                flag="--deadline",
                metavar="TIME",
                help="When it must be done: 10m, 1h30m or 18:00. Then as cheap as can be.",
            ),
            "tune": FlagText(flag="--deadline", metavar="TIME", help="Of each job: 10m."),
            "change": FlagText(
                flag="--deadline", metavar="WHEN", help="90m from now, or the next 18:00; none takes it away."
            ),
        },
        rest=RestField(path="deadline_s", help="seconds from now"),
        object=ObjectField(path="deadline", help="When it must be done."),
    ),
    Option(
        name="budget",
        kind=Money(),
        is_changeable=True,
        flags={
            "run": FlagText(
                flag="--budget", metavar="MONEY", help="What it may cost: $4. On functions then as fast as can be."
            ),
            "change": FlagText(
                flag="--budget",
                metavar="MONEY",
                help="What all of it may cost, from its submission on; none takes it away.",
            ),
        },
        rest=RestField(path="budget_usd", help="of all the job has cost and will", copied_to="goal"),
        object=ObjectField(path="budget", help="What it may cost, in US dollars."),
    ),
    Option(
        name="fastest",
        kind=Toggle(),
        default=False,
        flags={
            "run": FlagText(
                flag="--fastest", help="On functions: as fast as can be, within --budget where there is one."
            )
        },
        rest=RestField(
            path="is_fastest",
            help="on functions: time is all that counts, within the budget where there is one",
            copied_to="goal",
        ),
        object=ObjectField(
            path="functions.fastest", help="Time is all that counts, within the budget where there is one."
        ),
    ),
    Option(
        name="workers",
        kind=CountRange(1, MAX_VIRTUAL_SHARDS, may_be_auto=True),
        default="auto",
        flags={
            "run": FlagText(
                flag="--workers", metavar="N|MIN..MAX|auto", help="How many workers it may have, whenever."
            ),
            "tune": FlagText(flag="--workers", metavar="N|MIN..MAX", help="Functions that each job may have."),
        },
        parts=(
            RestField(path="min_workers", kind=Count(1, MAX_VIRTUAL_SHARDS, 1), default=1),
            RestField(path="max_workers", kind=Count(1, MAX_VIRTUAL_SHARDS, 8), default=1),
        ),
        object=ObjectField(path="workers", help="How many workers it may have, whenever; auto: up to all there are."),
    ),
    Option(
        name="epochs",
        kind=Count(1, 100_000, 10),
        default=1,
        flags={
            "run": FlagText(flag="--epochs", help="Passes over the dataset."),
            "tune": FlagText(flag="--epochs", help="Passes over the dataset."),
        },
        rest=RestField(path="num_epochs", copied_to="workload"),
        object=ObjectField(path="epochs", help="Passes over the dataset.", shows_default=True),
    ),
    Option(
        name="global_batch",
        kind=CountRange(1, _MILLION),
        default=32,
        flags={
            "run": FlagText(
                flag="--batch",
                metavar="N|MIN..MAX",
                help="The global batch size, or bounds to choose it in as it runs.",
            ),
            "tune": FlagText(flag="--batch", kind=Count(1, _MILLION, 32), help="The global batch size."),
        },
        parts=(
            RestField(path="global_batch_size", kind=Count(1, _MILLION, 32), default=32),
            RestField(
                path="batch",
                kind=Document(),
                help="lets the platform change the batch; global_batch_size is what it starts with",
            ),
        ),
        object=ObjectField(path="globalBatch", help="Samples of one step over all workers; a range is chosen in."),
    ),
    # The REST API says the same by global_batch_size, beside bounds in `batch`.
    Option(
        name="initial_batch",
        kind=Count(1, _MILLION, 32),
        is_keyword=False,
        object=ObjectField(path="initialBatch", help="What a range of globalBatch starts with; else its lower end."),
    ),
    Option(
        name="max_local_batch",
        kind=Count(1, _MILLION, 64),
        flags={"run": FlagText(flag="--max-local-batch", help="Samples that one worker holds at once.")},
        parts=(RestField(path="batch.max_local_size"),),
        object=ObjectField(path="maxLocalBatch", help="Samples that one worker holds at once."),
    ),
    Option(
        name="min_local_batch",
        kind=Count(1, _MILLION, 8),
        is_keyword=False,
        parts=(RestField(path="batch.min_local_size"),),
        object=ObjectField(path="minLocalBatch", help="The fewest samples that are worth a worker's pass."),
    ),
    Option(
        name="learning_rate",
        kind=Choice(get_args(LearningRateRule)),
        default="linear",
        flags={"run": FlagText(flag="--learning-rate", help="How it follows a batch that changes.")},
        parts=(RestField(path="batch.learning_rate"),),
        object=ObjectField(path="learningRate", help="How it follows a batch that changes."),
    ),
    Option(
        name="length",
        kind=Choice(get_args(Length)),
        default="epochs",
        flags={"run": FlagText(flag="--length", help="What --epochs count if the batch changes.")},
        parts=(
            RestField(
                path="length_unit",
                kind=Choice(get_args(LengthUnit)),
                default="samples",
                help="whether the epochs are passes over the data, or the progress so many make with the first batch",
                copied_to="workload",
            ),
        ),
        object=ObjectField(path="length", help="What epochs count where the batch changes."),
    ),
    Option(
        name="virtual_shards",
        kind=Count(1, MAX_VIRTUAL_SHARDS, 16),
        is_keyword=False,
        rest=RestField(
            path="num_virtual_shards",
            help="a power of two, at least max_workers; fixes the order in which gradients are reduced",
        ),
        object=ObjectField(
            path="virtualShards",
            help="Into how many parts a batch is cut: a power of two, at least the most workers.",
        ),
    ),
    Option(
        name="num_samples",
        kind=Count(1, 10**12, 50_000),
        flags={"run": FlagText(flag="--samples", metavar="N", help="Samples of one epoch, where you know.")},
        rest=RestField(path="num_samples", help="of one epoch, where it is known"),
        object=ObjectField(path="samples", help="Samples of one epoch, where that is known."),
    ),
    # In a request the name stands beside the options, in an object it is that of the object.
    Option(
        name="name",
        kind=Name("name"),
        default="",
        flags={"run": FlagText(flag="--name", help="The job's name; its id is made from it.")},
    ),
    Option(
        name="seed",
        kind=Count(0, 2**63 - 1, 0),
        default=0,
        flags={
            "run": FlagText(flag="--seed", help="Where all chance comes from."),
            "tune": FlagText(flag="--seed", help="Where all chance comes from."),
        },
        rest=RestField(path="seed", copied_to="workload"),
        object=ObjectField(path="seed", help="Where all chance comes from.", shows_default=True),
    ),
    Option(
        name="params",
        kind=Params(),
        default={},
        flags={
            "run": FlagText(flag="--param", metavar="K=V", help="For the function: ctx.params[K]. Repeatable."),
            "tune": FlagText(flag="--param", metavar="K=V", help="For every trial. Repeatable."),
        },
        rest=RestField(path="params", copied_to="workload"),
        object=ObjectField(path="params", help=""),
    ),
    # An object with spec.functions is on functions.
    Option(
        name="on",
        kind=Choice(get_args(Where)),
        default="cluster",
        flags={
            "run": FlagText(
                flag="--on",
                choices=("k8s",),
                help="Where: the platform's machines, a function service, or as an object of a Kubernetes cluster.",
            )
        },
        rest=RestField(path="on", help="the platform's machines, or its function service"),
    ),
    # The layers are profiled with it before the job is sent.
    Option(
        name="micro_batch",
        kind=Count(1, _MILLION, DEFAULT_MICRO_BATCH),
        flags={
            "run": FlagText(
                flag="--micro-batch", metavar="N", help="On functions: samples that flow through at a time."
            )
        },
    ),
    Option(
        name="batch_schedule",
        kind=Phases(),
        default=(),
        flags={
            "run": FlagText(
                flag="--batch-schedule",
                metavar="EPOCH:N,...",
                help="On functions: another global batch from these epochs on: 0:64,4:256.",
            )
        },
        rest=RestField(
            path="batch_schedule",
            help="on functions: the global batch from each of these epochs on, ascending; before the first it is "
            "global_batch_size",
        ),
        object=ObjectField(path="functions.batchSchedule", help=""),
    ),
    Option(
        name="search",
        kind=Toggle(may_be_open=True),
        flags={
            "run": FlagText(
                flag="--search/--no-search",
                help="On functions: try numbers of workers and memory sizes while it trains. Without the flag: where a "
                "goal asks for it and the model fits one function.",
            )
        },
        rest=RestField(
            path="search",
            help="on functions: whether workers and their memory are searched for while it runs; null: where a goal "
            "asks for it and the model fits one function",
        ),
        object=ObjectField(path="functions.search", help="Try numbers of workers and memory sizes while it trains."),
    ),
    # The keyword and the flag `workers` fill it for a job on functions.
    Option(
        name="function_workers",
        kind=CountRange(1, MAX_FUNCTION_WORKERS),
        is_keyword=False,
        rest=RestField(
            path="function_workers",
            help="on functions: the bounds of a search for the number of workers",
            examples=([2, 16],),
        ),
        object=ObjectField(path="functions.workers", help="The bounds of that search."),
    ),
    # Both are filled by the client: from a profile, and from the task's dataset.
    Option(
        name="layer_profile",
        kind=Document(),
        is_keyword=False,
        rest=RestField(
            path="layer_profile",
            help="what a job on functions is planned from; a quote for the cluster compares with it",
        ),
        object=ObjectField(
            path="functions.layerProfile", help="The model's layers, as springtide profile --layers writes them."
        ),
    ),
    Option(
        name="stream",
        kind=Name("dataset"),
        default="",
        is_keyword=False,
        rest=RestField(path="stream", help="on functions: the growing dataset that it trains on", copied_to="workload"),
        object=ObjectField(path="functions.stream", help="The growing dataset that it trains on."),
    ),
    Option(
        name="share",
        kind=Fractions(),
        flags={
            "run": FlagText(
                flag="--share",
                metavar="N|MIN..MAX|auto",
                help="What each worker holds of its device: sure of MIN, at most MAX (0.3..0.6, 30%). auto: as "
                "profiled.",
            )
        },
        parts=(RestField(path="share", kind=Document(), help="what each worker holds of its device; null: the whole"),),
        object=ObjectField(path="share", help="What each worker holds of its device; left out: the whole."),
    ),
    Option(
        name="memory",
        kind=Size(),
        flags={
            "run": FlagText(
                flag="--memory", metavar="SIZE", help="With --share: what it holds of the device's memory: 4GB."
            )
        },
        parts=(RestField(path="share.memory_mb"),),
        object=ObjectField(path="deviceMemory", help="With share: what it holds of the device's memory."),
    ),
    Option(
        name="study",
        kind=Name("the study's name"),
        default="",
        flags={
            "run": FlagText(flag="--study", metavar="NAME", help="The search over jobs that this one is a trial of.")
        },
        rest=RestField(path="study", help="the search over jobs that it is a trial of", copied_to="workload"),
        object=ObjectField(path="study", help="The search over jobs that it is a trial of."),
    ),
    Option(
        name="soft",
        kind=Toggle(),
        default=False,
        is_changeable=True,
        flags={
            "run": FlagText(flag="--soft", help="The deadline is an aim: it runs, late if it must."),
            "change": FlagText(flag="--soft/--hard", help="Whether the deadline is one to aim at, or a promise."),
        },
        rest=RestField(
            path="is_soft",
            help="a deadline to aim at, not a condition: it runs, late if it must",
            copied_to="goal",
        ),
        object=ObjectField(path="soft", help="The deadline is an aim: it runs, late if it must."),
    ),
    Option(
        name="wait",
        kind=Toggle(),
        default=False,
        is_changeable=True,
        flags={
            "run": FlagText(flag="--wait", help="Stay in line while the deadline cannot be promised yet."),
            "change": FlagText(
                flag="--wait/--no-wait",
                help="Whether it stays in line while its deadline cannot be promised.",
            ),
        },
        rest=RestField(path="waits", help="stays in line while its deadline cannot be promised yet", copied_to="goal"),
        object=ObjectField(path="wait", help="Stay in line while the deadline cannot be promised yet."),
    ),
    Option(
        name="retries",
        kind=Count(0, 1000, 3),
        default=3,
        is_changeable=True,
        flags={"change": FlagText(flag="--retries", help="How often it may be begun again after faults.")},
        rest=RestField(path="max_restarts", copied_to="workload"),
        object=ObjectField(path="retries", help="How often it may begin again from a checkpoint after a failure."),
    ),
    Option(
        name="grace",
        kind=Duration(TEN_YEARS_S),
        default=DEFAULT_GRACE_S,
        is_keyword=False,
        rest=RestField(path="grace_s", copied_to="workload"),
        object=ObjectField(path="grace", help="What it is given to save when it has to leave."),
    ),
    Option(
        name="checkpoint_every",
        kind=Duration(TEN_YEARS_S),
        default=30.0,
        is_keyword=False,
        rest=RestField(path="checkpoint_interval_s", copied_to="workload"),
        object=ObjectField(path="checkpointEvery", help="How often it saves while it runs."),
    ),
    Option(
        name="speeds",
        kind=Rates(MAX_VIRTUAL_SHARDS),
        default={},
        is_keyword=False,
        rest=RestField(
            path="profile_steps_per_s",
            help="optimizer steps a second by number of workers, where they are known",
            examples=({"1": 3.2, "2": 5.9},),
        ),
        object=ObjectField(path="speeds", help="Optimizer steps a second by number of workers, where they are known."),
    ),
    Option(
        name="step_profile",
        kind=Document(),
        is_keyword=False,
        rest=RestField(path="step_profile", help="the timeline of a step, where it was taken"),
        object=ObjectField(path="stepProfile", help="The timeline of a step, as springtide profile writes it."),
    ),
)
CHANGEABLE_OPTIONS: Final[Table] = tuple(option for option in JOB_OPTIONS if option.is_changeable)
