"""The options of jobs and services that make the environment in which their code runs."""

from __future__ import annotations

from typing import Final

from springtide.core.options.kinds import Interpreter, Requirements, SecretNames, Variables
from springtide.core.options.option import FlagText, ObjectField, Option, RestField, Table

_ENV = FlagText(
    "--env NAME[=VALUE]", "A variable of its workers' environment; NAME alone: with its value here. Repeatable."
)
_SECRET = FlagText(
    "--secret NAME[=@FILE]",
    "A variable whose value is kept apart, shown nowhere: its value here, asked for, or FILE's text. Repeatable.",
)
_REQUIREMENTS = FlagText(
    "--requirements FILE",
    "Python packages for it, in an environment of its own. [default: its header's, pyproject.toml's]",
)
_PYTHON = FlagText("--python PATH", "The interpreter of that environment, with the packages that it has.")

ENVIRONMENT_OPTIONS: Final[Table] = (
    Option(
        name="env",
        kind=Variables(),
        default={},
        flags={"run": _ENV, "deploy": _ENV},
        rest=RestField(
            "env", "variables that its workers' environment gets before its code is imported", copied_to="workload"
        ),
        object=ObjectField("env", "Variables of its workers' environment, set before its code is imported."),
    ),
    # Objects name Secrets of their cluster (spec.container.secrets).
    Option(
        name="secrets",
        kind=SecretNames(),
        default=(),
        flags={"run": _SECRET, "deploy": _SECRET},
        rest=RestField(
            "secrets", "such variables whose values are kept apart from the journal and told nowhere", default={}
        ),
    ),
    Option(
        name="requirements",
        kind=Requirements(),
        default=(),
        flags={"run": _REQUIREMENTS, "deploy": _REQUIREMENTS},
        rest=RestField(
            "requirements",
            "Python packages of an environment of its own, which is made once: lines of a requirements file",
            examples=(["einops==0.8.1"],),
        ),
        object=ObjectField(
            "requirements",
            "Python packages beside those of the image: lines of a requirements file, which each pod installs.",
        ),
    ),
    # In a cluster the interpreter is that of the image.
    Option(
        name="python",
        kind=Interpreter(),
        default="",
        flags={"run": _PYTHON, "deploy": _PYTHON},
        rest=RestField("python", "the interpreter of that environment, on the platform's machine; empty: its own"),
    ),
)
