"""What a replica's code knows of itself and of the request that it works on."""

from __future__ import annotations

import time

from springtide.runtime.serving.identity import CallScope, ReplicaIdentity
from springtide.serving.frames import Identify


def test_what_is_kept_belongs_to_one_identity():
    identity = ReplicaIdentity()
    made = []

    def make(told: Identify) -> str:
        made.append(told.url)
        return told.secret

    with identity.of_replica("shop", ("embed",)):
        assert (identity.service, identity.calls, identity.kept(make)) == ("shop", ("embed",), None)
        first = Identify(url="http://a", secret="1")
        identity.tell(first)
        identity.tell(first)
        assert [identity.kept(make), identity.kept(make)] == ["1", "1"]
        identity.tell(Identify(url="http://b", secret="2"))
        assert identity.kept(make) == "2"
    assert made == ["http://a", "http://b"]
    assert (identity.service, identity.calls, identity.kept(make)) == ("", (), None)


def test_what_is_left_of_a_request_s_time_begins_again_with_each_part():
    assert CallScope(None, 0.0).left_s() is None
    scope = CallScope(None, 0.2)
    time.sleep(0.05)
    assert scope.left_s() < 0.16
    scope.renew()
    assert 0.16 < scope.left_s() <= 0.2
