"""`springtide keys`: what is asked for, and what is told; against a platform made of values."""

from __future__ import annotations

import json

from msgspec.structs import replace

from springtide.core.status.api_keys import ApiKeyStatus, NewApiKey

KEY = ApiKeyStatus(
    name="shop",
    key_id="abcd1234",
    services=("digits", "faces"),
    rate_per_s=50.0,
    created_unix_s=1.79e9,
    expires_unix_s=None,
    num_requests=1200,
)


def test_a_key_is_made_for_services_and_its_secret_printed_once(springtide, client):
    asked = []
    client.create_key = lambda *given, **more: asked.append((given, more)) or NewApiKey(secret="st_x", key=KEY)
    args = ("keys", "create", "shop", "--service", "digits", "--service", "faces", "--rate", "50", "--expires", "30m")
    told = springtide(*args)
    assert asked == [(("shop", ("digits", "faces")), {"rate_per_s": 50.0, "expires_in_s": 1800.0})]
    lines = told.output.splitlines()
    assert lines[:2] == ["st_x", "  shop may call digits, faces, 50 times a second; it is shown only now"]
    assert json.loads(springtide(*args, "--json").output)["secret"] == "st_x"
    springtide("keys", "create", "shop", "--all-services")
    assert asked[-1] == (("shop", None), {"rate_per_s": None, "expires_in_s": None})


def test_which_services_has_to_be_said(springtide, client):
    for args in ((), ("--service", "digits", "--all-services")):
        told = springtide("keys", "create", "shop", *args)
        assert told.exit_code == 2
        assert "--service NAME, or --all-services" in told.output


def test_keys_are_listed_and_revoked(springtide, client):
    client.keys = list
    assert "no keys: services are called with the platform's token" in springtide("keys", "ls").output
    client.keys = lambda: [KEY, replace(KEY, name="every", services=None, rate_per_s=None, expires_unix_s=1.8e9)]
    told = springtide("keys", "ls").output.splitlines()
    assert told[1].split() == ["shop", "digits,", "faces", "50/s", "-", "1,200", "0", "-"]
    assert told[2].split()[:2] == ["every", "all"]
    client.revoke_key = lambda name: KEY
    assert "shop opens nothing any more" in springtide("keys", "revoke", "shop").output
