"""What `--functions-parameter-store` may say, and the host that it becomes: fixed, processes, or tasks of a cloud."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import msgspec

from springtide.backends.functions.parameter_store.host import FixedHost, HostedParameters, ParameterHost
from springtide.backends.functions.parameter_store.host_ecs import EcsSettings, EcsTasks
from springtide.backends.functions.parameter_store.host_process import RedisProcesses
from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_duration_s, parse_size_bytes

FIXED_SCHEMES = ("redis", "rediss", "shm")
EXAMPLE = "redis://host:6379/0, or let it be started: redis, or ecs://CLUSTER/TASK?region=R&subnets=subnet-1"
# So long a server without functions is kept: a process is started anew in no time, a task takes a minute.
PROCESS_LINGER_S = 5.0
ECS_LINGER_S = 120.0
_OPTIONS = {
    "redis": ("binary", "memory", "linger"),
    "ecs": (
        "region",
        "subnets",
        "security_groups",
        "container",
        "port",
        "memory",
        "linger",
        "public",
        "reachable",
        "endpoint",
    ),
}
_NAME = re.compile(r"[A-Za-z0-9_:/.-]{1,255}", re.ASCII)


class HostedAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A store that is started for its jobs: `kind` is redis or ecs, `path` cluster and task, options as they stand."""

    kind: str
    path: str = ""
    options: dict[str, str] = {}

    def seconds(self, default_s: float) -> float:
        """How long it lingers. Raises InvalidRequest."""
        text = self.options.get("linger")
        if text in ("0", "0s"):
            return 0.0
        return default_s if text is None else parse_duration_s(text, "linger")

    def memory_mb(self, default_mb: int = 1024) -> int:
        """How much it holds. Raises InvalidRequest."""
        text = self.options.get("memory")
        return default_mb if text is None else max(16, parse_size_bytes(text, "memory") >> 20)


def parse_hosted(address: str) -> HostedAddress | None:
    """The store to be started for jobs; None for a permanent one. Raises InvalidRequest."""
    head, _, query = address.partition("?")
    kind = "redis" if head == "redis" else "ecs" if head.startswith("ecs:") else ""
    if not kind:
        return None
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise InvalidRequest(f"{address[:200]!r} cannot be read; write options like ?linger=30s&memory=1GB") from None
    unknown = sorted(set(options) - set(_OPTIONS[kind]))
    if unknown:
        raise InvalidRequest(f"a parameter store by {kind} has no option {unknown[0]}; {', '.join(_OPTIONS[kind])}")
    parts = urlsplit(head)
    hosted = HostedAddress(kind=kind, path=f"{parts.netloc}{parts.path}" if kind == "ecs" else "", options=options)
    hosted.seconds(0.0)
    hosted.memory_mb()
    if kind == "ecs":
        _ecs_settings(hosted)
    return hosted


def is_fixed(address: str) -> bool:
    """Whether it is the address of a permanent store."""
    parts = urlsplit(address)
    return parts.scheme in FIXED_SCHEMES and bool(parts.netloc or parts.path.strip("/"))


def make_parameter_host(address: str, folder: Path) -> ParameterHost | None:
    """The host that an address asks for; None for the empty one. `folder` keeps what runs.

    Raises InvalidRequest where it cannot be had: no such program, no library, no such cluster, an option that cannot
    be; BackendError where the cloud does not answer.
    """
    if not address:
        return None
    hosted = parse_hosted(address)
    if hosted is None:
        return FixedHost(address)
    if hosted.kind == "redis":
        processes = RedisProcesses(
            folder / "servers",
            binary=hosted.options.get("binary") or "redis-server",
            memory_mb=hosted.memory_mb(),
        )
        return HostedParameters(processes, folder, linger_s=hosted.seconds(PROCESS_LINGER_S))
    tasks = EcsTasks(_ecs_settings(hosted))
    tasks.check()
    return HostedParameters(tasks, folder, linger_s=hosted.seconds(ECS_LINGER_S))


def _ecs_settings(hosted: HostedAddress) -> EcsSettings:
    options = hosted.options
    cluster, _, task = hosted.path.partition("/")
    if not cluster or _NAME.fullmatch(task) is None:
        raise InvalidRequest(
            "a parameter store on ECS is named ecs://CLUSTER/TASK-DEFINITION?region=R&subnets=subnet-1,subnet-2"
        )
    for name in ("region", "subnets"):
        if not options.get(name):
            raise InvalidRequest(f"ecs:// needs {name}: add {name}={'us-east-1' if name == 'region' else 'subnet-1'}")
    port = options.get("port", "6379")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise InvalidRequest(f"port={port!r} is no port; choose 1 to 65535")
    return EcsSettings(
        cluster=cluster,
        task_definition=task,
        region=options["region"],
        subnets=_parts(options["subnets"]),
        security_groups=_parts(options.get("security_groups", "")),
        container=options.get("container") or "redis",
        port=int(port),
        memory_mb=hosted.memory_mb(),
        assigns_public_ip=_flag(options, "public", False),
        is_reachable=_flag(options, "reachable", True),
        endpoint_url=options.get("endpoint", ""),
    )


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _flag(options: dict[str, str], name: str, default: bool) -> bool:
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false", "1", "0", "yes", "no"):
        raise InvalidRequest(f"{name}={text!r} must be true or false")
    return text in ("true", "1", "yes")
