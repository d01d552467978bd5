"""Authentication between parts of a platform that share no file system: keys derived from one secret.

A platform has one master key. Each workload has a key derived from it, which only its own replicas know; each replica
has a token derived from the workload's key. So a process that runs a workload's code can act for that workload only.
Derived keys are not stored: after a restart the same keys are derived again.
"""

from __future__ import annotations

import hashlib
import hmac

from springtide.core.workload import ReplicaId, WorkloadId


def workload_key(master_key: bytes, workload_id: WorkloadId) -> str:
    """The key that all replicas of a workload know, as hexadecimal digits."""
    return _derive(master_key, "workload", workload_id)


def replica_token(key: str, replica_id: ReplicaId) -> str:
    """The token in a replica's Hello, derived from its workload's key."""
    return _derive(key.encode(), "replica", replica_id)


def gateway_token(key: str) -> str:
    """The token with which the gateway greets a workload's replicas, derived from that workload's key."""
    return _derive(key.encode(), "gateway", "")


def service_secret(key: bytes, service_id: WorkloadId, revision: int) -> str:
    """What the replicas of one revision of a service call other services with, derived from the platform's token."""
    return _derive(key, "caller", f"{revision}/{service_id}")


def group_key(key: str, generation: int) -> str:
    """The key of the members of one group, derived from their workload's key. It comes with the order to form it."""
    return _derive(key.encode(), "group", str(generation))


def proof_of(secret: str, *parts: bytes) -> bytes:
    """What only those who know the secret can compute of the parts."""
    # Each part is preceded by its length, so that different parts never give the same text.
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret.encode(), text, hashlib.sha256).digest()


def _derive(key: bytes, purpose: str, name: str) -> str:
    return hmac.new(key, f"springtide/{purpose}/{name}".encode(), hashlib.sha256).hexdigest()
