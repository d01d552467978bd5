"""What `run` and `quote` are asked: a file, the options of a training job, and the two read into one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import click

from springtide.cli.loading import find_training, import_file, split_target, uses_springtide
from springtide.cli.session import refuse
from springtide.client.functions import Task
from springtide.client.goals import Length, TrainKeywords, TrainOptions, Where
from springtide.client.layer_profiles import ONLY_DECLARED
from springtide.client.source import SourceFile, name_from, read_source
from springtide.core.quantities import parse_range
from springtide.core.workload import LearningRateRule

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_KEYWORDS = {
    "deadline": "deadline",
    "budget": "budget",
    "workers": "workers",
    "epochs": "epochs",
    "batch": "global_batch",
    "max_local_batch": "max_local_batch",
    "learning_rate": "learning_rate",
    "length": "length",
    "name": "name",
    "seed": "seed",
    "samples": "num_samples",
    "place": "on",
    "micro_batch": "micro_batch",
    "fastest": "fastest",
    "search": "search",
    "batch_schedule": "batch_schedule",
    "study": "study",
    "share": "share",
    "memory": "memory",
}
_OPTIONS = (
    click.argument("target", metavar="FILE[:FUNCTION]"),
    click.argument("script_args", nargs=-1, metavar="[-- SCRIPT ARGS]"),
    click.option(
        "--deadline", metavar="TIME", help="When it must be done: 10m, 1h30m or 18:00. Then as cheap as can be."
    ),
    click.option("--budget", metavar="MONEY", help="What it may cost: $4. On functions then as fast as can be."),
    click.option(
        "--fastest",
        is_flag=True,
        default=None,
        help="On functions: as fast as can be, within --budget where there is one.",
    ),
    click.option("--workers", metavar="N|MIN..MAX|auto", help="How many workers it may have, whenever."),
    click.option("--epochs", type=click.IntRange(min=1), help="Passes over the dataset."),
    click.option("--batch", metavar="N|MIN..MAX", help="The global batch size, or bounds to choose it in as it runs."),
    click.option("--max-local-batch", type=click.IntRange(min=1), help="Samples that one worker holds at once."),
    click.option(
        "--learning-rate", type=click.Choice(get_args(LearningRateRule)), help="How it follows a batch that changes."
    ),
    click.option("--length", type=click.Choice(get_args(Length)), help="What --epochs count if the batch changes."),
    click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Samples of one epoch, where you know."),
    click.option("--name", help="The job's name; its id is made from it."),
    click.option("--seed", type=click.IntRange(min=0), help="Where all chance comes from."),
    click.option(
        "--param", "params", multiple=True, metavar="K=V", help="For the function: ctx.params[K]. Repeatable."
    ),
    click.option(
        "--on",
        "place",
        type=click.Choice([*get_args(Where), "k8s"]),
        help="Where: the platform's machines, a function service, or as an object of a Kubernetes cluster.",
    ),
    click.option(
        "--micro-batch",
        type=click.IntRange(min=1),
        metavar="N",
        help="On functions: samples that flow through at a time.",
    ),
    click.option(
        "--batch-schedule",
        metavar="EPOCH:N,...",
        help="On functions: another global batch from these epochs on: 0:64,4:256.",
    ),
    click.option(
        "--search/--no-search",
        default=None,
        help="On functions: try numbers of workers and memory sizes while it trains. Without the flag: where a goal "
        "asks for it and the model fits one function.",
    ),
    click.option(
        "--share",
        metavar="N|MIN..MAX|auto",
        help="What each worker holds of its device: sure of MIN, at most MAX (0.3..0.6, 30%). auto: as profiled.",
    ),
    click.option("--memory", metavar="SIZE", help="With --share: what it holds of the device's memory: 4GB."),
    click.option("--study", metavar="NAME", help="The search over jobs that this one is a trial of."),
    click.option("--soft", is_flag=True, help="The deadline is an aim: it runs, late if it must."),
    click.option("--wait", is_flag=True, help="Stay in line while the deadline cannot be promised yet."),
    click.option("--best-effort", is_flag=True, help="Without the deadline and the budget."),
)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A training job as it was asked for. `is_declared` says that it is an st.Task, which can be cut into stages."""

    source: SourceFile
    options: TrainOptions
    name: str
    is_declared: bool = False


def asked_options(command: CommandT) -> CommandT:
    """Add the file and the options of a training job."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_asked(target: str, script_args: tuple[str, ...], given: dict[str, Any]) -> JobRequest:
    """Read the file, and what it declares with what the flags change. Raises InvalidRequest."""
    path, object_name = split_target(target)
    if given["place"] == "k8s":
        # A job like any other; only the way to the platform is another one.
        given = {**given, "place": None}
    overrides = _overrides(given)
    found = find_training(import_file(path), path, object_name) if uses_springtide(path) else None
    if found is not None:
        if script_args:
            refuse(f"{path.name} has a training function, which takes no script arguments; use --param name=value")
        changed = found.options.override(overrides)
        source, name = found.source(), found.name or name_from(found.source().object_name)
    else:
        if object_name:
            refuse(f"{path.name} has no training function {object_name!r}: it does not import springtide")
        _check_script(path, overrides)
        changed = TrainOptions(workers=1).override(overrides)
        source, name = read_source(path, "", "script", script_args), name_from(path.stem)
    if given["best_effort"]:
        changed = changed.override({"deadline": None, "budget": None})
    if isinstance(found, Task):
        found.check_place(changed)
    return JobRequest(source, changed, name, is_declared=isinstance(found, Task))


def check_place(asked: JobRequest) -> None:
    """Raise InvalidRequest for a job on functions that cannot be cut into stages."""
    if asked.options.on == "functions" and not asked.is_declared:
        kind = "a plain script" if asked.source.kind == "script" else "a training function"
        refuse(f"{asked.source.object_name or asked.source.filename} is {kind}, and {ONLY_DECLARED}")


def parse_params(given: tuple[str, ...]) -> dict[str, str]:
    """`("lr=0.1",)` as a mapping. Raises InvalidRequest."""
    params = {}
    for item in given:
        key, separator, value = item.partition("=")
        if not separator or not key:
            refuse(f"--param {item!r} is not a parameter; write it like --param lr=0.1")
        params[key] = value
    return params


def _overrides(given: dict[str, Any]) -> TrainKeywords:
    overrides: dict[str, Any] = {_KEYWORDS[key]: given[key] for key in _KEYWORDS if given[key] is not None}
    for flag in ("soft", "wait"):
        if given[flag]:
            overrides[flag] = True
    if given["fastest"] and given["deadline"] is None:
        # Another goal than the file's: it takes the place of a deadline that stands there.
        overrides["deadline"] = None
    if given["params"]:
        overrides["params"] = parse_params(given["params"])
    return cast(TrainKeywords, overrides)


def _check_script(path: Path, overrides: TrainKeywords) -> None:
    """A plain script runs under torchrun's variables with a fixed number of workers, and counts its own epochs."""
    for keyword, flag in (
        ("epochs", "--epochs"),
        ("global_batch", "--batch"),
        ("max_local_batch", "--max-local-batch"),
        ("learning_rate", "--learning-rate"),
        ("length", "--length"),
    ):
        if keyword in overrides:
            refuse(f"{path.name} is a plain script, which {flag} cannot steer; pass it on: -- {flag} N")
    workers = overrides.get("workers")
    if workers is None:
        return
    if workers == "auto" or len(set(parse_range(str(workers), "workers"))) > 1:
        refuse(f"{path.name} is a plain script and cannot be resized; give one number: --workers 2")
