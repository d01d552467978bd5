"""What a workload says about the containers that its replicas run in, where they run in containers at all."""

from __future__ import annotations

import msgspec


class ContainerSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where and as what the replicas of one workload run on Kubernetes. Empty values are the platform's own.

    `namespace` is where its pods live. `owner_kind`, `owner_name` and `owner_uid` name the object that stands for the
    workload: pods belong to it, so that they go when it goes. `accepted` are digests of the parts of that object as the
    platform took it in: by them the journal remembers what a changed object asks for anew. `cpu` and `memory` are
    quantities as Kubernetes writes them. `secrets` are names of Secrets whose values become environment variables.
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
