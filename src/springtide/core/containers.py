"""A workload's settings for the containers that its replicas run in, on platforms that use containers."""

from __future__ import annotations

import functools
import math
from typing import Final

import msgspec

from springtide.core.errors import InvalidRequest
from springtide.core.quantities import parse_quantity

# Of a container: the names of the variables that come from a Secret, separated by commas. Its log has no value of them.
SECRETS_VARIABLE: Final = "SPRINGTIDE_SECRETS"


class ContainerSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the pods of one workload are made on Kubernetes. Empty values mean the platform's defaults.

    `owner_kind`, `owner_name` and `owner_uid` name the Kubernetes object that stands for the workload: its pods are
    owned by it, so that they are deleted with it. `accepted` holds digests of the parts of that object as the platform
    accepted them: compared with these, a changed object shows what it asks for anew. `cpu` and `memory` are quantities
    as Kubernetes writes them. `secrets` are names of Secrets whose values become environment variables.
    """

    namespace: str = ""
    image: str = ""
    cpu: str = ""
    memory: str = ""
    service_account: str = ""
    environment: dict[str, str] = {}
    secrets: tuple[str, ...] = ()
    owner_kind: str = ""
    owner_name: str = ""
    owner_uid: str = ""
    accepted: dict[str, str] = {}

    @property
    def cpu_m(self) -> int | None:
        """The processors in thousandths; None if it does not say, or nothing that can be read."""
        return _amount(self.cpu, 1000)

    @property
    def memory_bytes(self) -> int | None:
        """The memory; None if it does not say, or nothing that can be read."""
        return _amount(self.memory, 1)


@functools.lru_cache(maxsize=1024)
def _amount(text: str, factor: int) -> int | None:
    try:
        return math.ceil(parse_quantity(text) * factor) if text else None
    except InvalidRequest:
        return None
