"""API keys: what they open, how often, and what is kept of them; over the real API and a real store of files."""

from __future__ import annotations

import msgspec
import pytest

from springtide.core.errors import Conflict, InvalidRequest, NotFound, Unauthorized
from springtide.service.api.api_keys import MAX_KEYS, ApiKeys, service_of_path
from springtide.service.submission.schemas import ApiKeyIn
from springtide.storage.stores.open import open_store


class Clock:
    """Both clocks, as the test sets them."""

    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path, clock):
    return lambda: ApiKeys(lambda: open_store(f"file://{tmp_path}/store"), unix_s=clock, now_s=clock)


def test_a_key_outlives_the_process_and_its_secret_is_nowhere(opened, tmp_path):
    made = opened().create(ApiKeyIn(name="shop", services=("digits",)))
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert [path.name for path in files] == [made.key.key_id]
    assert made.secret[-43:] not in files[0].read_text()
    again = opened()
    with pytest.raises(Unauthorized):
        again.admit(made.secret, "/f/digits")
    again.load()
    assert again.admit(made.secret, "/f/digits") == ("shop", None)
    assert again.revoke("shop").name == "shop"
    for keys in (again, opened()):
        keys.load()
        with pytest.raises(Unauthorized, match="wrong, or was revoked"):
            keys.admit(made.secret, "/f/digits")
    with pytest.raises(NotFound):
        again.revoke("shop")


@pytest.mark.parametrize(
    ("path", "is_open"),
    [
        ("/f/digits", True),
        ("/f/digits@7", True),
        ("/f/digits/v1/chat/completions", True),
        ("/v2/models/digits/infer", True),
        ("/v2/models/digits/versions/2/infer", True),
        ("/f/digits2", False),
        ("/f/other/digits", False),
        ("/f/", False),
        ("/v2/models/other/infer", False),
        ("/v2/repository/models/digits/load", False),
        ("/v1/services/digits", False),
        ("/v1/keys", False),
        ("/", False),
        ("/docs", False),
    ],
)
def test_a_key_opens_its_services_and_nothing_else(opened, path, is_open):
    keys = opened()
    one = keys.create(ApiKeyIn(name="one", services=("digits",)))
    every = keys.create(ApiKeyIn(name="every"))
    assert (service_of_path(path) == "digits") is is_open
    if is_open:
        assert keys.admit(one.secret, path) == ("one", None)
    else:
        name, refusal = keys.admit(one.secret, path)
        assert (name, refusal.status_code) == ("one", 403)
        assert b"may call digits, and nothing else" in refusal.body
    if service_of_path(path) is None:
        assert b"may call all services, and nothing else" in keys.admit(every.secret, path)[1].body
    else:
        assert keys.admit(every.secret, path) == ("every", None)


def test_wrong_secrets_open_nothing(opened):
    keys = opened()
    secret = keys.create(ApiKeyIn(name="one")).secret
    other = "A" if secret[-1] != "A" else "B"
    for wrong in (secret[:-1], secret + "x", secret[:-1] + other, f"st_{'a' * 8}_{secret[-43:]}", "st_", "st_\udce4"):
        with pytest.raises(Unauthorized):
            keys.admit(wrong, "/f/digits")
    assert keys.listed()[0].num_requests == 0


def test_a_rate_lets_a_second_s_worth_in_at_once_and_then_so_many_a_second(opened, clock):
    keys = opened()
    secret = keys.create(ApiKeyIn(name="slow", rate_per_s=4.0)).secret
    answers = [keys.admit(secret, "/f/digits")[1] for _ in range(6)]
    assert [answer is None for answer in answers] == [True] * 4 + [False] * 2
    assert (answers[4].status_code, answers[4].headers["retry-after"]) == (429, "1")
    assert b"4 requests a second" in answers[4].body
    num = 0
    for _ in range(1000):
        clock.now_s += 0.1
        num += keys.admit(secret, "/f/digits")[1] is None
    assert 399 <= num <= 404
    status = keys.listed()[0]
    assert (status.num_requests, status.num_refused) == (4 + num, 2 + 1000 - num)
    seldom = keys.create(ApiKeyIn(name="seldom", rate_per_s=0.05)).secret
    assert keys.admit(seldom, "/f/digits")[1] is None
    refusal = keys.admit(seldom, "/f/digits")[1]
    assert (refusal.status_code, refusal.headers["retry-after"]) == (429, "20")


def test_an_expired_key_opens_nothing_and_is_forgotten(opened, clock, tmp_path):
    keys = opened()
    secret = keys.create(ApiKeyIn(name="short", expires_in_s=60.0)).secret
    clock.now_s += 59.0
    assert keys.admit(secret, "/f/digits") == ("short", None)
    clock.now_s += 1.0
    with pytest.raises(Unauthorized, match="'short' has expired"):
        keys.admit(secret, "/f/digits")
    assert keys.listed() == []
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_names_are_taken_once_and_keys_are_bounded(opened):
    keys = opened()
    for index in range(MAX_KEYS):
        keys.create(ApiKeyIn(name=f"k{index}"))
    with pytest.raises(Conflict, match="there is a key 'k0'"):
        keys.create(ApiKeyIn(name="k0"))
    with pytest.raises(Conflict, match="revoke one first"):
        keys.create(ApiKeyIn(name="more"))


def test_an_object_that_is_no_key_is_named(opened, tmp_path):
    opened().create(ApiKeyIn(name="shop"))
    path = next(path for path in (tmp_path / "store").rglob("*") if path.is_file())
    path.write_bytes(b"{")
    with pytest.raises(InvalidRequest, match=f"{path.name} in the platform's store is no key"):
        opened().load()


def test_the_api_makes_lists_and_revokes_them(http, stranger):
    made = http.post("/v1/keys", json={"name": "shop", "services": ["digits"], "rate_per_s": 2.0})
    assert made.status_code == 201
    assert made.headers["cache-control"] == "no-store"
    secret, own = made.json()["secret"], {"Authorization": f"Bearer {made.json()['secret']}"}
    listed = http.get("/v1/keys")
    assert [key["name"] for key in listed.json()] == ["shop"]
    assert secret not in listed.text
    for path in ("/v1/status", "/v1/keys", "/", "/metrics2", "/f/other", "/v2/models/other/infer"):
        refused = stranger.get(path, headers=own)
        assert refused.status_code == 403, path
        assert "the key 'shop' may call digits, and nothing else" in refused.text
    assert isinstance(stranger.get("/v2/models/other/infer", headers=own).json()["error"], str)
    assert stranger.get("/healthz", headers=own).status_code == 200
    # Clients of the inference protocol ask this with the headers of their calls; there is no gateway in this test.
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert stranger.get(path, headers=own).status_code == stranger.get(path).status_code == 404
    # It is let in; the platform of this test has no gateway.
    assert stranger.get("/f/digits", headers=own).status_code == 404
    assert stranger.get("/f/digits", headers=own).status_code == 404
    assert stranger.get("/f/digits", headers=own).status_code == 429
    assert http.delete("/v1/keys/shop").json()["num_requests"] == 2
    assert stranger.get("/f/digits", headers=own).status_code == 401
    assert http.delete("/v1/keys/shop").status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "No"},
        {"name": "a", "services": []},
        {"name": "a", "services": ["../b"]},
        {"name": "a", "rate_per_s": 0},
        {"name": "a", "expires_in_s": -1},
        {"name": "a", "scope": "all"},
    ],
)
def test_a_body_that_does_not_fit_is_refused(http, body):
    answer = http.post("/v1/keys", content=msgspec.json.encode(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
