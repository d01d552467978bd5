"""Parameter stores as tasks of AWS ECS: a Redis on Fargate for each job, in the functions' network, through boto3."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from springtide.backends.functions.parameter_store.host import PING_LIMIT_S, ParameterStoreHost
from springtide.backends.functions.parameter_store.redis_ping import answers, user_words
from springtide.backends.functions.provider import one_line
from springtide.backends.functions.providers.aws_errors import INSTALL, sdk_errors
from springtide.core.errors import BackendError, InvalidRequest, SpringtideError

START_LIMIT_S = 300.0
_POLL_S = 2.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MENDS = {
    "ClusterNotFoundException": "there is no such cluster; make it with `aws ecs create-cluster`, or name another one",
    "AccessDeniedException": "these credentials may not do that; they need ecs:RunTask, ecs:DescribeTasks, "
    "ecs:ListTasks, ecs:StopTask and iam:PassRole for the task's roles",
    "UnrecognizedClientException": "the access key is not known there; check the credentials and the region",
    "ExpiredTokenException": "the credentials have expired; get new ones",
}


class EcsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which task is run where. `container` is the one of the task definition that runs redis-server, on `port`.

    `subnets` and `security_groups` are those that the functions reach. `assigns_public_ip` lets a task in a public
    subnet fetch its image; its address for functions is the private one. `is_reachable` says that this platform
    reaches it, too, and asks it for an answer. `endpoint_url` is for tests.
    """

    cluster: str
    task_definition: str
    region: str
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...] = ()
    container: str = "redis"
    port: int = 6379
    memory_mb: int = 1024
    assigns_public_ip: bool = False
    is_reachable: bool = True
    endpoint_url: str = ""


class EcsTasks:
    """Starts and ends them. Raises InvalidRequest without boto3, and for a region that cannot be."""

    def __init__(
        self,
        settings: EcsSettings,
        *,
        now_s: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self._settings = settings
        self._now_s = now_s
        self._sleep = sleep
        self._start_limit_s = start_limit_s
        self._errors = sdk_errors()
        self._client = self._connected()

    def check(self) -> None:
        """Whether the cluster is there and these credentials may look at it: better known now than by a job.

        Raises InvalidRequest or BackendError.
        """
        self._asked("the parameter stores' cluster cannot be used", "list_tasks", cluster=self._settings.cluster)

    def start(self, job_id: str, before: ParameterStoreHost | None) -> ParameterStoreHost:
        """A new task, at a new address: one of the job's that an earlier platform has lost sight of is ended first.

        It is billed from its beginning. Raises InvalidRequest or BackendError with what AWS says.
        """
        what = "the parameter store's task cannot be started"
        mark = f"springtide-{hashlib.sha256(job_id.encode()).hexdigest()[:20]}"
        for lost in self._asked(what, "list_tasks", cluster=self._settings.cluster, startedBy=mark)["taskArns"]:
            self._stop(lost)
        password = secrets.token_hex(24)
        answer = self._asked(what, "run_task", **self._order(mark, password))
        if answer["failures"] or not answer["tasks"]:
            reasons = ", ".join(str(failure.get("reason")) for failure in answer["failures"]) or "no reason is given"
            raise BackendError(f"{what}: {reasons}; the cluster {self._settings.cluster} has no room for it")
        began_at_s = self._now_s()
        task = str(answer["tasks"][0]["taskArn"])
        try:
            url = self._await(task, began_at_s, password)
        except BaseException:
            self._stop(task)
            raise
        return ParameterStoreHost(url=url, identity=task, began_at_s=began_at_s)

    def is_alive(self, server: ParameterStoreHost) -> bool:
        """Whether the task runs, and its Redis answers where it can be asked."""
        try:
            task = self._task(server.identity)
        except SpringtideError:
            # Unknown: a task that cannot be looked up does not count as dead.
            return True
        if task is None or task["lastStatus"] != "RUNNING":
            return False
        return not self._settings.is_reachable or answers(server.url, PING_LIMIT_S)

    def end(self, server: ParameterStoreHost) -> None:
        """Stop the task. Raises BackendError."""
        self._stop(server.identity)

    def _order(self, mark: str, password: str) -> dict[str, Any]:
        settings = self._settings
        user, *rule = user_words(password)
        command = ["redis-server", "--port", str(settings.port), f"--{user}", *rule, "--save", "", "--appendonly", "no"]
        command += ["--maxmemory", f"{settings.memory_mb}mb", "--maxmemory-policy", "noeviction"]
        return {
            "cluster": settings.cluster,
            "taskDefinition": settings.task_definition,
            "launchType": "FARGATE",
            "count": 1,
            "startedBy": mark,
            "networkConfiguration": {
                "awsvpcConfiguration": {
                    "subnets": list(settings.subnets),
                    "securityGroups": list(settings.security_groups),
                    "assignPublicIp": "ENABLED" if settings.assigns_public_ip else "DISABLED",
                }
            },
            "overrides": {"containerOverrides": [{"name": settings.container, "command": command}]},
        }

    def _await(self, task_arn: str, began_at_s: float, password: str) -> str:
        """The store's address in the functions' network, once the task runs.

        Raises BackendError where it stops or takes too long.
        """
        while self._now_s() - began_at_s < self._start_limit_s:
            task = self._task(task_arn)
            if task is not None and task["lastStatus"] in ("STOPPED", "DEPROVISIONING", "STOPPING"):
                raise BackendError(f"the parameter store's task has stopped: {_why_stopped(task)}")
            host = _address(task) if task is not None and task["lastStatus"] == "RUNNING" else ""
            url = f"redis://:{password}@{host}:{self._settings.port}/0"
            if host and (not self._settings.is_reachable or answers(url, _POLL_S)):
                return url
            self._sleep(_POLL_S)
        raise BackendError(
            f"the parameter store's task did not answer within {self._start_limit_s:.0f} s; look at its log, and "
            f"whether this machine reaches port {self._settings.port} in its subnet (reachable=false: it need not)"
        )

    def _task(self, task_arn: str) -> dict[str, Any] | None:
        found = self._asked(
            "the parameter store's task cannot be looked at",
            "describe_tasks",
            cluster=self._settings.cluster,
            tasks=[task_arn],
        )["tasks"]
        return dict(found[0]) if found else None

    def _stop(self, task_arn: str) -> None:
        task = self._task(task_arn)
        if task is None or task["lastStatus"] == "STOPPED":
            return
        self._asked(
            "the parameter store's task cannot be stopped",
            "stop_task",
            cluster=self._settings.cluster,
            task=task_arn,
            reason="no function synchronises any more",
        )

    def _connected(self) -> Any:
        try:
            import boto3
            from botocore.config import Config
        except ImportError:
            raise InvalidRequest(f"ecs:// needs boto3; {INSTALL}") from None
        is_here = urlsplit(self._settings.endpoint_url).hostname in _LOOPBACK
        config = Config(
            retries={"total_max_attempts": 4, "mode": "standard"},
            connect_timeout=10.0,
            read_timeout=60.0,
            proxies={} if is_here else None,
        )
        unusable: tuple[type[Exception], ...] = (*self._errors.any, ValueError)
        try:
            session = boto3.session.Session(region_name=self._settings.region)
            return session.client("ecs", endpoint_url=self._settings.endpoint_url or None, config=config)
        except unusable as error:
            raise InvalidRequest(f"ecs:// cannot be used as set: {one_line(error)}") from error

    def _asked(self, what: str, method: str, **arguments: Any) -> dict[str, Any]:
        """What AWS answers. Raises InvalidRequest for what can be mended from here, BackendError otherwise."""
        try:
            return dict(getattr(self._client, method)(**arguments))
        except self._errors.no_credentials as error:
            raise InvalidRequest(
                f"{what}: no AWS credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run "
                "`aws configure`"
            ) from error
        except self._errors.client as error:
            said: dict[str, Any] = getattr(error, "response", {}).get("Error", {})
            code, message = str(said.get("Code", "")), str(said.get("Message", ""))
            if code in _MENDS:
                raise InvalidRequest(f"{what}: {_MENDS[code]} ({code}: {message})") from error
            if code in ("ClientException", "InvalidParameterException"):
                raise InvalidRequest(
                    f"{what}: {message} (task definition {self._settings.task_definition}, container "
                    f"{self._settings.container}, subnets {', '.join(self._settings.subnets)})"
                ) from error
            raise BackendError(f"{what}: {code}: {message}") from error
        except self._errors.any as error:
            raise BackendError(f"{what}: {one_line(error)}") from error


def _address(task: dict[str, Any]) -> str:
    for attachment in task.get("attachments", ()):
        for detail in attachment.get("details", ()):
            if detail.get("name") == "privateIPv4Address":
                return str(detail.get("value", ""))
    return ""


def _why_stopped(task: dict[str, Any]) -> str:
    reasons = [str(task.get("stoppedReason") or "")]
    reasons += [str(container.get("reason") or "") for container in task.get("containers", ())]
    return "; ".join(reason for reason in reasons if reason) or "no reason is given"
