"""Training jobs for parts of the trainer."""

from __future__ import annotations

from springtide.core.workload import AdaptiveBatch, Entrypoint, TrainingJob, WorkloadId


def make_job(**fields):
    defaults = {"global_batch_size": 16, "num_epochs": 2, "num_virtual_shards": 4, "max_workers": 4, "seed": 7}
    return TrainingJob(
        job_id=WorkloadId("job"), name="job", entrypoint=Entrypoint(source_path=""), **{**defaults, **fields}
    )


ADAPTIVE = AdaptiveBatch(min_size=4, max_size=64)
