"""How gateway and replica prove to each other, over a network, that they know one secret, without ever sending it.

Each draws a nonce and the other mixes it with the secret: a proof that somebody recorded is worth nothing later.
Whoever has a replica's old address gets neither the secret nor a request. What follows is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from springtide.core.workload import ReplicaId

NONCE_BYTES = 16


def new_nonce() -> bytes:
    """Draw what nobody can have seen before."""
    return secrets.token_bytes(NONCE_BYTES)


def gateway_proof(token: str, replica_id: ReplicaId, challenge: bytes, nonce: bytes) -> bytes:
    """What the gateway answers the replica's challenge with; `nonce` is the gateway's own."""
    return _proof("gateway", token, replica_id, challenge, nonce)


def replica_proof(token: str, replica_id: ReplicaId, challenge: bytes, nonce: bytes) -> bytes:
    """What the replica says in its Welcome, of the same two."""
    return _proof("replica", token, replica_id, challenge, nonce)


def is_proof(told: bytes, expected: bytes) -> bool:
    """Whether they are equal, found out in a time that tells nothing."""
    return hmac.compare_digest(told, expected)


def _proof(who: str, token: str, replica_id: ReplicaId, challenge: bytes, nonce: bytes) -> bytes:
    parts = (who.encode(), replica_id.encode(), challenge, nonce)
    # Each part with its length, so that no two sets of parts make one text.
    text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(token.encode(), text, hashlib.sha256).digest()
