"""The part of a worker's environment that its workload's owner has chosen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from springtide.core.containers import SECRETS_VARIABLE
from springtide.core.wire.workers import WorkerSpec
from springtide.core.workload import InferenceService, TrainingJob
from springtide.runtime.process.redaction import Redactor
from springtide.runtime.process.tracker_variables import tracker_variables
from springtide.storage.secrets import read_secrets


def set_user_environment(spec: WorkerSpec) -> Redactor:
    """Set the workload's variables and secrets in this process; call it before the user's code is imported.

    Experiment trackers find the job's id, unless the environment says otherwise.
    Returns what replaces the values of secrets in the process's output. Raises StorageError if they are not there.
    """
    os.environ.update(user_variables(spec.workload, os.environ))
    asked = spec.workload.secrets
    if asked is None:
        return Redactor(container_secrets(os.environ))
    values = read_secrets(Path(spec.work_dir), asked.reference)
    os.environ.update(values)
    return Redactor(values)


def user_variables(workload: TrainingJob | InferenceService, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, but secrets, that its owner and the platform set for a workload, in a process with these."""
    variables: dict[str, str] = {}
    if isinstance(workload, TrainingJob):
        variables = {name: value for name, value in tracker_variables(workload).items() if name not in environment}
        variables |= {"SPRINGTIDE_JOB_ID": workload.job_id, "SPRINGTIDE_JOB_NAME": workload.name}
    return variables | workload.env


def container_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a container that come from a Secret, as far as the container is told which these are."""
    names = environment.get(SECRETS_VARIABLE, "").split(",")
    return {name: environment[name] for name in names if name in environment}
