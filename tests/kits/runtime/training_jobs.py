"""Training jobs for parts of the trainer."""

from __future__ import annotations

import msgspec

from springtide.core.workload import AdaptiveBatch, Entrypoint, TrainingJob, WorkloadId


def make_script(**fields):
    """The job of a script that calls `springtide.adopt`."""
    entrypoint = Entrypoint(source_path="ddp.py", kind="script", library="springtide")
    return msgspec.structs.replace(make_job(**fields), entrypoint=entrypoint)


def make_job(**fields):
    defaults = {"global_batch_size": 16, "num_epochs": 2, "num_virtual_shards": 4, "max_workers": 4, "seed": 7}
    return TrainingJob(
        job_id=WorkloadId("job"), name="job", entrypoint=Entrypoint(source_path=""), **{**defaults, **fields}
    )


ADAPTIVE = AdaptiveBatch(min_size=4, max_size=64)
