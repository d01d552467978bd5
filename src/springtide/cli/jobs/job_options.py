"""The arguments of `run` and `quote`: a file and the options of a training job, read into one request."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import click

from springtide.cli.jobs.flags import CommandT, given_keywords, option_flags
from springtide.cli.jobs.variables import ask_secrets
from springtide.cli.loading import declares, find_training, import_file, split_target, uses_springtide
from springtide.cli.session import Session, refuse
from springtide.client.folders.choice import FolderWish, chosen_folder, code_files
from springtide.client.functions import Task
from springtide.client.goals import TrainKeywords, TrainOptions
from springtide.client.sources.library_use import library_of, trains_alone
from springtide.client.sources.source import SourceFile, name_from, read_source
from springtide.core.options.jobs import JOB_OPTIONS
from springtide.core.options.library_versions import untested_package
from springtide.core.options.rules import ONLY_DECLARED
from springtide.core.quantities import parse_range
from springtide.core.workload import Library
from springtide.storage.folders.tree import import_roots

# Options that a plain script sets itself.
_OF_FUNCTIONS = frozenset({"epochs", "global_batch", "max_local_batch", "learning_rate", "length"})


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A requested training job. `is_declared`: it is an st.Task, which can be cut into stages."""

    source: SourceFile
    options: TrainOptions
    name: str
    is_declared: bool = False


def asked_options(command: CommandT) -> CommandT:
    """A decorator that adds the file argument and the options of a training job."""
    command = click.option("--best-effort", is_flag=True, help="Without the deadline and the budget.")(command)
    command = option_flags(JOB_OPTIONS, "run")(command)
    command = click.argument("script_args", nargs=-1, metavar="[-- SCRIPT ARGS]")(command)
    return click.argument("target", metavar="FILE[:FUNCTION]")(command)


def folder_options(command: CommandT) -> CommandT:
    """A decorator that adds the options of the folder that travels with a job or a service."""
    command = click.option(
        "--no-folder", is_flag=True, help="Send the file alone; neighbours are read where they are."
    )(command)
    text = "The folder that travels along. [default: the file's, or its project's if its imports need that]"
    return click.option("--folder", metavar="PATH", help=text)(command)


def folder_wish(given: dict[str, Any]) -> FolderWish:
    """Which folder is to travel. Raises InvalidRequest."""
    if given["no_folder"] and given["folder"] is not None:
        refuse("--folder and --no-folder contradict each other; give one of them")
    return False if given["no_folder"] else given["folder"]


def read_asked(target: str, script_args: tuple[str, ...], given: dict[str, Any]) -> JobRequest:
    """Load the file and apply the flags to what it declares. Raises InvalidRequest."""
    path, object_name = split_target(target)
    wish = folder_wish({"folder": None, "no_folder": False, **given})
    if given["on"] == "k8s":
        # A job like any other; only the way to the platform is another one.
        given = {**given, "on": None}
    overrides = _overrides(given)
    # Importing a script would run it, whatever it also takes from springtide.
    adopts = library_of(_text_of(path)) == "springtide"
    # Importing such a script would run it, so only for what it declares.
    imports = uses_springtide(path) and (not adopts or declares(path, object_name))
    found = find_training(imported(path, wish), path, object_name) if imports else None
    if found is not None:
        if script_args:
            refuse(f"{path.name} has a training function, which takes no script arguments; use --param name=value")
        changed = found.options.override(overrides)
        source, name = found.source(), found.name or name_from(found.source().object_name)
    else:
        if object_name:
            what = (
                "it is a script that calls springtide.adopt(), and runs as a whole"
                if adopts
                else "it does not import springtide; write `import springtide as st` and put @st.train above "
                f"{object_name}(ctx), or run the whole file"
            )
            refuse(f"{path.name} has no training function {object_name!r}: {what}: springtide run {path.name}")
        library = _check_script(path, overrides, _library_of(path, wish))
        base = TrainOptions() if library == "springtide" else TrainOptions(workers=1)
        changed = base.override(overrides)
        source, name = read_source(path, "", "script", script_args, library), name_from(path.stem)
    if given["best_effort"]:
        changed = changed.override({"deadline": None, "budget": None})
    if isinstance(found, Task):
        found.check_place(changed)
    return JobRequest(source, changed, name, is_declared=isinstance(found, Task))


def with_secrets(session: Session, asked: JobRequest) -> JobRequest:
    """The request with values for all its secrets, as far as the terminal can be asked for them."""
    secrets = ask_secrets(asked.options.values["secrets"], os.environ, may_ask=session.may_ask)
    return replace(asked, options=asked.options.override({"secrets": secrets})) if secrets else asked


def library_warning(asked: JobRequest) -> str:
    """That the job will have one worker if its library is installed there as it is here; empty if nothing is known.

    What an environment of its own will have is known only there. Or that each of several workers trains the same.
    """
    values = asked.options.values
    source, workers = asked.source, values["workers"]
    if (
        source.kind == "script"
        and not source.library
        and str(workers) not in ("1", "1..1")
        and trains_alone(source.text)
    ):
        return (
            f"warning: {source.filename} asks for no other processes, so that each of its workers trains the same by "
            "itself; give it --workers 1, or three lines with springtide.adopt()"
        )
    if values["requirements"] or values["python"]:
        return ""
    told = untested_package(asked.source.library)
    return f"warning: {told}; where it is installed so, the job runs as a plain script with one worker" if told else ""


def imported(path: Path, wish: FolderWish) -> ModuleType:
    """The file, imported as a worker does that has the folder."""
    folder = chosen_folder(path, path.read_text(encoding="utf-8", errors="replace"), wish)
    return import_file(path, () if folder is None else import_roots(path, folder))


def check_place(asked: JobRequest) -> None:
    """Raise InvalidRequest for a job on functions that cannot be cut into stages."""
    if asked.options.values["on"] == "functions" and not asked.is_declared:
        kind = "a plain script" if asked.source.kind == "script" else "a training function"
        refuse(f"{asked.source.object_name or asked.source.filename} is {kind}, and {ONLY_DECLARED}")


def takes_layers(asked: JobRequest) -> bool:
    """Whether the job may run on functions, for which its layers are profiled, and not its steps."""
    on = asked.options.values["on"]
    return on == "functions" or (on == "auto" and asked.is_declared)


def _overrides(given: dict[str, Any]) -> TrainKeywords:
    overrides = given_keywords(JOB_OPTIONS, "run", given)
    if given["fastest"] and given["deadline"] is None:
        # This goal replaces a deadline in the file.
        overrides["deadline"] = None
    return cast(TrainKeywords, overrides)


def _check_script(path: Path, overrides: TrainKeywords, library: Library) -> Library:
    """`library`, which runs the script's loop, if it is to be resized; empty: it runs as under torchrun.

    Raises InvalidRequest for options that a script cannot have.
    """
    for option in JOB_OPTIONS:
        if option.name in _OF_FUNCTIONS and option.name in overrides:
            flag = option.flags["run"].flag
            refuse(f"{path.name} is a script, which {flag} cannot steer; pass it on: -- {flag} N")
    if library == "springtide":
        return library
    workers = overrides.get("workers")
    if workers is None or (workers != "auto" and len(set(parse_range(str(workers), "workers"))) == 1):
        return ""
    if not library:
        refuse(
            f"{path.name} is a plain script and cannot be resized; give one number: --workers 2 (a script that calls "
            "springtide.adopt(), fit() of Lightning's Trainer, train() of a Trainer of transformers, or prepare() and "
            "backward() of an Accelerator may have a range)"
        )
    return library


def _library_of(path: Path, wish: FolderWish) -> Library:
    """The library that runs the loop of the script at `path`, as its text tells, or else that of what it imports."""
    text = _text_of(path)
    folder = chosen_folder(path, text, wish) or path.parent
    return library_of(text) or library_of(text, *code_files(path, text, folder).values())


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
