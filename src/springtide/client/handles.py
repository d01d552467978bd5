"""Handles of one job or one service of the running platform, as `submit()` and `deploy()` return them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from springtide.client.artifacts import fetch_artifacts
from springtide.client.changes import ChangeKeywords, as_change
from springtide.client.layer_profiles import read_layers
from springtide.core.errors import BackendError
from springtide.core.quantities import parse_duration_s, parse_money_usd, parse_range
from springtide.core.status.artifacts import ArtifactStatus
from springtide.core.status.platform import Explanation, JobStatus, ServiceStatus
from springtide.core.status.quote import Quote
from springtide.core.status.revisions import RevisionStatus
from springtide.core.workload import JobState

if TYPE_CHECKING:
    from springtide.client.api import Client

_POLL_S = 0.2
# How long `wait` tolerates a platform that does not answer; a restart takes less, and workers train on meanwhile.
_PATIENCE_S = 30.0


class JobHandle:
    """A submitted job of the running platform; `.submit()` returns it.

        job = fit.submit(deadline="10m")
        status = job.wait()
        print(status.state, status.loss, job.artifact_path)

    Every method raises BackendError if the platform does not answer, and NotFound if it does not know the job.
    """

    def __init__(self, client: Client, job_id: str) -> None:
        self._client = client
        self.id = job_id

    def __repr__(self) -> str:
        """The class and the job's id."""
        return f"<JobHandle {self.id}>"

    def status(self) -> JobStatus:
        """The job's present state, progress, workers and reason."""
        return self._client.job(self.id)

    def wait(self, timeout: str | float | None = None) -> JobStatus:
        """Block until the job has ended and return its last status, whose `.state` and `.reason` say how it ended.

        `timeout` is "90s", "10m" or seconds. Tolerates a restart of the platform of up to 30 s. Raises TimeoutError
        (the job goes on), BackendError.
        """
        end = None if timeout is None else time.monotonic() + parse_duration_s(timeout, "timeout")
        answered = time.monotonic()
        while True:
            try:
                status = self.status()
                answered = time.monotonic()
            except BackendError:
                if time.monotonic() - answered > _PATIENCE_S:
                    raise
            else:
                if JobState(status.state).is_terminal:
                    return status
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self.id} has not ended within {timeout}; it goes on without you")
            time.sleep(_POLL_S)

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Yield the newest 200 lines that its workers wrote; with `follow` also new lines until the job ends."""
        return iter(self._client.logs(self.id, follow=follow))

    def scale(self, workers: int | str | tuple[int, int]) -> JobStatus:
        """Set the allowed number of workers, also while the job runs: 4, "1..8" or (1, 8).

        Raises InvalidRequest, and Conflict if the job has ended.
        """
        minimum, maximum = parse_range(workers, "workers")
        self._client.scale(self.id, minimum, maximum)
        return self.status()

    def change(self, **wish: Unpack[ChangeKeywords]) -> JobStatus:
        """Change the job's goal: `change(deadline="90m", budget="$5")`, `change(deadline="none")`.

        Keywords: `deadline` (counted from now), `budget` (for the whole job), `soft`, `wait`, `retries`; "none" removes
        a deadline or budget. Raises InvalidRequest if a new deadline cannot be promised, with one that could be; the
        earlier promise then holds. Raises Conflict if the job has ended.
        """
        return self._client.change(self.id, as_change(datetime.now().astimezone(), **wish))

    def pause(self) -> JobStatus:
        """Commit a checkpoint and release the devices until `resume`. Raises Conflict if the job has ended."""
        return self._client.pause(self.id)

    def resume(self, budget: str | float | None = None) -> JobStatus:
        """Continue a paused job from its checkpoint; `budget` ("$5" or dollars) replaces the earlier one.

        Raises Conflict if the job is not paused, InvalidRequest.
        """
        return self._client.resume(self.id, None if budget is None else parse_money_usd(budget))

    def move(self, profile: str | Path | None = None) -> JobStatus:
        """Have a job on machines go on on functions, from a checkpoint. It does not move back.

        `profile` is the path of a profile of its layers; none is needed of a job submitted with `on="auto"`. Raises
        Conflict if the job has ended or is on functions, InvalidRequest if it cannot run there or would miss its goal.
        """
        return self._client.move(self.id, read_layers(profile))

    def move_quote(self, profile: str | Path | None = None) -> Quote:
        """What the rest of the job would take on functions; nothing is changed. Raises as `move`."""
        return self._client.quote_move(self.id, read_layers(profile))

    def cancel(self) -> JobStatus:
        """End the job; its last checkpoint is kept. Raises Conflict if it has ended already."""
        return self._client.cancel(self.id)

    def why(self) -> Explanation:
        """The reason for the job's present state, and what would change it."""
        return self._client.why(self.id)

    def artifacts(self) -> list[ArtifactStatus]:
        """The files that it left so far, by name: its weights, and what it wrote to the folder SPRINGTIDE_OUT."""
        return self._client.artifacts(self.id)

    def fetch_artifacts(self, to: str | Path, names: Sequence[str] = (), *, overwrites: bool = False) -> list[Path]:
        """Fetch these files, or all of them, into the folder `to`; returns where they are.

        A file that is there already with the same content stays. Raises NotFound for a name that there is not, and
        InvalidRequest for a file that is there with another content, unless `overwrites`.
        """
        return fetch_artifacts(self._client, self.id, Path(to), names, overwrites=overwrites)

    @property
    def artifact_path(self) -> str:
        """The path (or the key in the object store) of the job's saved model; empty while there is none."""
        return self.status().artifact_path


class ServiceHandle:
    """A deployed service of the running platform; `.deploy()` returns it.

        service = Classifier.deploy()
        labels = service.infer(images=[[0.0] * 64])

    `revision` is the number that the deploy gave it; None if it was found by its name. Every method raises
    BackendError if the platform does not answer, and NotFound if it does not know the service.
    """

    def __init__(self, client: Client, name: str, revision: int | None = None) -> None:
        self._client = client
        self.name = name
        self.revision = revision

    def __repr__(self) -> str:
        """The class and the service's name."""
        return f"<ServiceHandle {self.name}>"

    @property
    def url(self) -> str:
        """The URL that takes `predict`'s arguments as a JSON object by POST."""
        return self.status().url

    def status(self) -> ServiceStatus:
        """The service's present state, replicas, load and reason."""
        return self._client.service(self.name)

    def infer(self, **inputs: Any) -> Any:
        """Call `predict` with these keyword arguments and return its outputs; waits while a replica starts.

        Raises InvalidRequest if the arguments do not fit, CapacityError if the service is too busy.
        """
        return self._client.infer(self.name, **inputs)

    def infer_stream(self, **inputs: Any) -> Iterator[Any]:
        """Call a `predict` that yields, and yield its items as they come. Raises as `infer`."""
        return self._client.infer_stream(self.name, **inputs)

    def versions(self) -> tuple[RevisionStatus, ...]:
        """Its revisions, the newest last: which answers, which was replaced or given up, and why."""
        return self.status().revisions

    def roll_back(self, to: int | None = None) -> ServiceStatus:
        """Release an earlier revision again, None: the one that was replaced last. Raises NotFound, Conflict."""
        return self._client.roll_back(self.name, to)

    def why(self) -> Explanation:
        """The reason for the service's present state, and what would change it."""
        return self._client.why(self.name)

    def remove(self) -> None:
        """Delete the service, after answering the requests it has accepted."""
        self._client.remove_service(self.name)
