"""Variables by which experiment trackers know a job: a restart of it goes on in the same run."""

from __future__ import annotations

import json

from springtide.core.workload import TrainingJob


def tracker_variables(job: TrainingJob) -> dict[str, str]:
    """The variables that Weights & Biases and MLflow read."""
    tags = json.dumps({"springtide_job_id": job.job_id, "springtide_job_name": job.name})
    return {
        "WANDB_RUN_ID": job.job_id,
        "WANDB_RESUME": "allow",
        "WANDB_RUN_GROUP": job.name,
        "WANDB_TAGS": "springtide",
        "MLFLOW_RUN_CONTEXT": tags,
        # Read by the callback of transformers.
        "MLFLOW_TAGS": tags,
    }
