"""Messages of earlier versions decode, and those of this one are understood by earlier versions."""

from __future__ import annotations

import msgspec

from springtide.core.wire.workers import FormGroup, FrameDecoder, Hello, Order, Report, encode_frame
from springtide.core.workload import ReplicaId

MEMBERS = (ReplicaId("a"), ReplicaId("b"))


def frame(**fields):
    body = msgspec.msgpack.encode(fields)
    return len(body).to_bytes(4, "big") + body


def test_an_order_of_a_version_without_keys_has_none():
    old = frame(order="FormGroup", generation=3, members=["a", "b"], rendezvous="tcp://10.0.0.1:29403")
    (order,) = FrameDecoder[Order](Order).feed(old)
    assert order == FormGroup(generation=3, members=MEMBERS, rendezvous="tcp://10.0.0.1:29403")
    assert order.key == ""
    # Nor is it sent where there is none.
    assert b"key" not in encode_frame(order)


def test_a_worker_of_a_version_without_keys_does_not_prove_them():
    (hello,) = FrameDecoder[Report](Report).feed(
        frame(report="Hello", workload_id="job", replica_id="a", token="t", pid=1)
    )
    assert isinstance(hello, Hello)
    assert not hello.proves_keys
