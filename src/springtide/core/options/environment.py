"""The options of jobs and services that make the environment in which their code runs."""

from __future__ import annotations

from typing import Final

from springtide.core.options.kinds import Variables
from springtide.core.options.option import FlagText, ObjectField, Option, RestField, Table

_ENV = FlagText(
    "--env NAME[=VALUE]", "A variable of its workers' environment; NAME alone: with its value here. Repeatable."
)

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
)
