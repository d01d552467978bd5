"""Keys of workloads and replicas: derived, distinct, and none of them tells another."""

from __future__ import annotations

from springtide.core.tokens import gateway_token, group_key, proof_of, replica_token, workload_key
from springtide.core.workload import ReplicaId, WorkloadId

MASTER = b"0123456789abcdef0123456789abcdef"
FIT = workload_key(MASTER, WorkloadId("fit"))


def test_the_same_secret_gives_the_same_keys_after_a_restart() -> None:
    assert workload_key(bytes(MASTER), WorkloadId("fit")) == FIT
    assert replica_token(FIT, ReplicaId("fit.0")) == replica_token(FIT, ReplicaId("fit.0"))


def test_no_two_names_or_purposes_share_a_key() -> None:
    keys = {
        FIT,
        workload_key(MASTER, WorkloadId("fit2")),
        workload_key(MASTER[::-1], WorkloadId("fit")),
        replica_token(FIT, ReplicaId("fit.0")),
        replica_token(FIT, ReplicaId("fit.1")),
        replica_token(FIT, ReplicaId("")),
        gateway_token(FIT),
        group_key(FIT, 1),
        group_key(FIT, 2),
        group_key(workload_key(MASTER, WorkloadId("fit2")), 1),
    }
    assert len(keys) == 10
    assert all(len(key) == 64 for key in keys)


def test_a_proof_tells_secrets_and_parts_apart_and_where_each_part_ends() -> None:
    proofs = {
        proof_of("secret", b"ab", b"c"),
        proof_of("secret", b"a", b"bc"),
        proof_of("secret", b"abc"),
        proof_of("other", b"ab", b"c"),
    }
    assert len(proofs) == 4
    assert proof_of("secret", b"ab", b"c") in proofs
