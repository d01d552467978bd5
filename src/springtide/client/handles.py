"""What submitting and deploying give back: one job or one service of the running platform."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Unpack

from springtide.client.changes import ChangeKeywords, as_change
from springtide.core.errors import BackendError
from springtide.core.quantities import parse_duration_s, parse_money_usd, parse_range
from springtide.core.status.platform import Explanation, JobStatus, ServiceStatus
from springtide.core.workload import JobState

if TYPE_CHECKING:
    from springtide.client.api import Client

_POLL_S = 0.2
# A platform that is restarted is back well within this time, and its workers train on meanwhile.
_PATIENCE_S = 30.0


class JobHandle:
    """A submitted job: what can be asked of it and done to it while it runs, and after it has ended."""

    def __init__(self, client: Client, job_id: str) -> None:
        self._client = client
        self.id = job_id

    def __repr__(self) -> str:
        """Name the job."""
        return f"<JobHandle {self.id}>"

    def status(self) -> JobStatus:
        """State, progress, workers and reason at this instant. Raises NotFound."""
        return self._client.job(self.id)

    def wait(self, timeout: str | float | None = None) -> JobStatus:
        """Block until the job has ended and return its last status: look at `.state` and `.reason`.

        Waits out a restart of the platform. Raises TimeoutError (the job then goes on), BackendError.
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
        """The lines that its replicas wrote; with `follow` until the job ends."""
        return iter(self._client.logs(self.id, follow=follow))

    def scale(self, workers: int | str | tuple[int, int]) -> JobStatus:
        """Allow another number of workers while it runs: 4, "1..8" or (1, 8)."""
        minimum, maximum = parse_range(workers, "workers")
        self._client.scale(self.id, minimum, maximum)
        return self.status()

    def change(self, **wish: Unpack[ChangeKeywords]) -> JobStatus:
        """Change what it is to keep while it runs: "90m" from now, "$5" in all; "none" takes a deadline or budget away.

        Raises InvalidRequest if a new deadline cannot be promised, with one that could; what was promised then holds.
        """
        return self._client.change(self.id, as_change(datetime.now().astimezone(), **wish))

    def pause(self) -> JobStatus:
        """Commit a checkpoint and give the devices back until `resume`."""
        return self._client.pause(self.id)

    def resume(self, budget: str | float | None = None) -> JobStatus:
        """Let a paused job continue from its checkpoint; `budget` ("$5") replaces the one that it had."""
        return self._client.resume(self.id, None if budget is None else parse_money_usd(budget))

    def cancel(self) -> JobStatus:
        """End the job for good; its last checkpoint stays."""
        return self._client.cancel(self.id)

    def why(self) -> Explanation:
        """Why the job is in the state that it is in, and what could be done."""
        return self._client.why(self.id)

    @property
    def artifact_path(self) -> str:
        """Where the job's saved model lies; empty while there is none."""
        return self.status().artifact_path


class ServiceHandle:
    """A deployed service: its address, what can be asked of it, and calls of its `predict`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        """Name the service."""
        return f"<ServiceHandle {self.name}>"

    @property
    def url(self) -> str:
        """Where to POST a JSON object with the arguments of `predict`."""
        return self.status().url

    def status(self) -> ServiceStatus:
        """State, replicas, load and reason at this instant. Raises NotFound."""
        return self._client.service(self.name)

    def infer(self, **inputs: Any) -> Any:
        """Call `predict` with these arguments and return its outputs; starts a replica if there is none."""
        return self._client.infer(self.name, **inputs)

    def why(self) -> Explanation:
        """Why the service is in the state that it is in, and what could be done."""
        return self._client.why(self.name)

    def remove(self) -> None:
        """Take the service away; requests that are under way are answered first."""
        self._client.remove_service(self.name)
