"""Authentication between parts of a platform that share no file system: keys derived from one secret.

A platform has one master key. Each workload has a key derived from it, which its own replicas know and no other's;
each replica has a token derived from that. A process that runs a workload's code is trusted with that workload alone.
Nothing of it has to be stored: after a restart the same keys come out.
"""

from __future__ import annotations

import hashlib
import hmac

from springtide.core.workload import ReplicaId, WorkloadId


def workload_key(master_key: bytes, workload_id: WorkloadId) -> str:
    """The key that all replicas of a workload know, as hexadecimal digits."""
    return _derive(master_key, "workload", workload_id)


def replica_token(key: str, replica_id: ReplicaId) -> str:
    """What a replica says Hello with, from its workload's key."""
    return _derive(key.encode(), "replica", replica_id)


def gateway_token(key: str) -> str:
    """What the gateway greets the replicas of a workload with, from that workload's key."""
    return _derive(key.encode(), "gateway", "")


def _derive(key: bytes, purpose: str, name: str) -> str:
    return hmac.new(key, f"springtide/{purpose}/{name}".encode(), hashlib.sha256).hexdigest()
