"""The entry point: it imports only the module of the command that is run, and prints errors as one sentence."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Any

import click

import springtide
from springtide.cli.session import Session, complain, state_option
from springtide.core.errors import InvalidRequest, SpringtideError

# command -> (module, one line of help). The help is here so that listing commands imports nothing.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "hello": (
            "springtide.cli.commands.hello",
            "Prove that it works: resize a real training run, scale a service from zero.",
        ),
        "doctor": (
            "springtide.cli.doctor.machine",
            "Check this machine, line by line, with the mend for what is wrong.",
        ),
        "up": ("springtide.cli.platform.lifecycle", "Start the platform on this machine."),
        "down": ("springtide.cli.platform.lifecycle", "Stop the platform."),
        "dashboard": ("springtide.cli.platform.lifecycle", "Print the address that logs your browser in."),
        "quote": (
            "springtide.cli.commands.quote",
            "Ask: when would FILE be done, for how much, and if not, what would work?",
        ),
        "profile": (
            "springtide.cli.profiles.command",
            "Measure a step of FILE's function: operators, gradient buckets, speed; or what exchanges cost.",
        ),
        "run": ("springtide.cli.commands.run", "Train: run FILE's function with a goal and watch it."),
        "tune": ("springtide.cli.commands.tune", "Search over jobs: many trials of FILE's task under one budget."),
        "data": ("springtide.cli.commands.data", "Put datasets under a name, append to them, list and remove them."),
        "deploy": (
            "springtide.cli.commands.deploy",
            "Serve: deploy FILE's class, or a command, and print how to call it.",
        ),
        "apply": ("springtide.cli.commands.apply", "Hand functions over to a cluster as objects: apply -f FILE."),
        "ps": ("springtide.cli.commands.look", "List jobs and services."),
        "status": ("springtide.cli.commands.look", "Show one job or service."),
        "why": ("springtide.cli.commands.look", "Explain the state of a job or service, and what could be done."),
        "logs": ("springtide.cli.commands.look", "Print what the workers wrote."),
        "artifacts": ("springtide.cli.jobs.artifacts", "List and fetch what a job left: weights and other files."),
        "top": ("springtide.cli.commands.look", "Watch the whole platform."),
        "pools": (
            "springtide.cli.commands.pools",
            "Show servers by pool, loans and reclaims, the tide and its forecast.",
        ),
        "devices": ("springtide.cli.commands.devices", "Show each device's shares: request, limit, granted, used."),
        "versions": ("springtide.cli.jobs.revisions", "The revisions of a service, and what became of each."),
        "rollback": ("springtide.cli.jobs.revisions", "Bring an earlier revision of a service back."),
        "keys": (
            "springtide.cli.platform.api_keys",
            "API keys for calling services, and nothing else.",
        ),
        "scale": ("springtide.cli.commands.act", "Change how many workers or replicas there may be, while it runs."),
        "change": ("springtide.cli.commands.act", "Change a job's deadline, budget or retries while it runs."),
        "move": ("springtide.cli.commands.act", "Have a job on machines go on on functions, from a checkpoint."),
        "pause": ("springtide.cli.commands.act", "Checkpoint a job and give its devices back."),
        "resume": ("springtide.cli.commands.act", "Let a paused job continue."),
        "cancel": ("springtide.cli.commands.act", "End a job, or take a service away."),
        "config": ("springtide.cli.commands.config", "Show the settings that hold here, and where they come from."),
        "journal": ("springtide.cli.platform.journal", "Check, repair and export what the platform has recorded."),
        "policies": ("springtide.cli.commands.policies", "List the scheduling policies."),
        "plan-pipeline": (
            "springtide.cli.commands.plan_pipeline",
            "Cut a profiled model over functions: stages, memory and replicas, proved best.",
        ),
        "simulate": ("springtide.cli.commands.simulate", "Ask what policies would do with a trace of jobs."),
        "package": (
            "springtide.cli.commands.package",
            "Write the recipe of a function's container image; say how large it gets.",
        ),
        "k8s": (
            "springtide.cli.platform.k8s",
            "Run on Kubernetes: manifests, checks, definitions, the control plane itself.",
        ),
        "chaos": ("springtide.cli.commands.chaos", "Injure a platform of its own and check that nothing was lost."),
        "bench": ("springtide.cli.commands.bench", "Measure against a named baseline, side by side."),
    }
)


class LazyGroup(click.Group):
    """Imports a command's module when it is called; prints errors as one red sentence and exits with a code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; its function has the command's name."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; the error for an unknown one names the nearest."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            mend = f"did you mean `springtide {near[0]}`?" if near else "`springtide --help` lists them."
            raise click.UsageError(f"there is no command {name!r}; {mend}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. Springtide's own errors are printed as one sentence; exit code 2 for wrong use, 1 else."""
        try:
            return super().invoke(ctx)
        except SpringtideError as error:
            if os.environ.get("SPRINGTIDE_DEBUG"):
                raise
            complain(str(error))
            ctx.exit(2 if isinstance(error, InvalidRequest) else 1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@state_option
@click.version_option(springtide.__version__, prog_name="springtide")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Elastic training and serving, on one machine or on a cluster. Start with `springtide hello`."""
    ctx.ensure_object(Session)


def _one_sentence(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Python's `sys.excepthook` for an unexpected error."""
    complain(
        f"this should not happen: {kind.__name__}: {error}. "
        "SPRINGTIDE_DEBUG=1 shows where; `springtide doctor` may say why"
    )


def main() -> None:
    """Run the command line; never returns."""
    if not os.environ.get("SPRINGTIDE_DEBUG"):
        sys.excepthook = _one_sentence
    try:
        cli(prog_name="springtide")
    except BrokenPipeError:
        # The reader of the pipe (`head`, say) has exited; flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
