"""Whatever is sent, the answer is a 4xx with a sentence, and nothing of the platform has changed."""

from __future__ import annotations

import re

import msgspec
import pytest
from starlette.routing import Route

from kits.service.api_fixtures import TOKEN, job_body, service_body

JSON = {"Content-Type": "application/json"}
NOT_JSON = {
    "empty": b"",
    "cut": b'{"name": "digits"',
    "trailing": b"{} {}",
    "nan": b'{"options": {"deadline_s": NaN}}',
    "infinity": b'{"options": {"deadline_s": -Infinity}}',
    "too large a float": b'{"options": {"deadline_s": 1e999}}',
    "bad utf-8": b'{"name": "\xff\xfe"}',
    "half surrogate": b'{"name": "\\ud800"}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "binary": bytes(range(256)),
}
WRONG_SHAPES = {"a list": b"[]", "null": b"null", "a number": b"5", "unknown field": b'{"surprise": 1}'}
BAD_NAMES = [
    "",
    "..",
    "../x",
    "a/b",
    "UPPER",
    "-x",
    "a b",
    "a\u0000b",
    "\u00e9t\u00e9",
    "x" * 57,
    "x" * 5000,
    "a..b",
    ".hidden",
]
BAD_FILENAMES = [
    "",
    "..",
    "../x.py",
    "/etc/x.py",
    "a/b.py",
    "a\\b.py",
    "x",
    "x.py\u0000",
    ".x.py",
    "x..py",
    "x" * 101 + ".py",
    "a.pyc",
]
BAD_TEXTS = {
    "empty": "",
    "blank": " \n",
    "not python": "def fit(:\n",
    "NUL": "x = 1\u0000",
    "tabs and spaces": "if 1:\n\tx\n        y\n",
    "deep": "(" * 5000 + ")" * 5000,
    "long chain": "x = " + "-" * 200_000 + "1",
    "stray return": "return 1\n",
}
BAD_OPTIONS = [
    ("deadline_s", -1), ("deadline_s", 0), ("deadline_s", 1e300), ("deadline_s", "10m"), ("deadline_s", True),
    ("budget_usd", -0.5), ("budget_usd", 0), ("global_batch_size", 0), ("global_batch_size", 1_000_001),
    ("global_batch_size", 1.5), ("global_batch_size", 10**30), ("global_batch_size", None), ("num_epochs", 0),
    ("num_epochs", 100_001), ("num_epochs", "3"), ("min_workers", 0), ("min_workers", 3), ("max_workers", 257),
    ("max_workers", -1), ("seed", -1), ("seed", 2**63), ("max_restarts", -1), ("max_restarts", 10**9),
    ("grace_s", 0), ("checkpoint_interval_s", -3), ("num_virtual_shards", 3), ("num_virtual_shards", 1),
    ("num_virtual_shards", 512), ("profile_steps_per_s", {"1": 5e-324}),
    ("params", {"a": 1}), ("params", {"": "x"}), ("params", []),
    ("params", {str(i): "" for i in range(65)}), ("params", {"a": "x" * 4097}), ("params", {"a": None}),
    ("workers", 2), ("__class__", "x"), ("length_unit", "hours"), ("length_unit", "progress"), ("batch", 32),
    ("batch", {}), ("batch", {"min_size": 64}), ("batch", {"min_size": 128, "max_size": 64}),
    ("batch", {"min_size": 128, "max_size": 256}), ("batch", {"min_size": 0, "max_size": 256}),
    ("batch", {"min_size": 32, "max_size": 10**7}), ("batch", {"min_size": 32, "max_size": 64, "learning_rate": "x"}),
    ("batch", {"min_size": 32, "max_size": 512, "max_local_size": 1}),
    ("batch", {"min_size": 32, "max_size": 64, "max_local_size": 8, "min_local_size": 9}),
    ("batch", {"min_size": 32, "max_size": 64, "min_local_size": 65}),
    ("batch", {"min_size": 32, "max_size": 64, "extra": 1}), ("step_profile", {"local_batch_size": 0}),
    ("step_profile", {"local_batch_size": 8, "forward_s": -1.0, "backward_s": 0.1}), ("step_profile", []),
    ("step_profile", {"local_batch_size": 8, "forward_s": 0.1, "backward_s": 0.1, "buckets": [{"ready_s": 0.1}]}),
]  # fmt: skip
BAD_SERVICE_OPTIONS = [
    ("slo_s", 0), ("slo_s", -1), ("min_replicas", -1), ("min_replicas", 3), ("max_replicas", 0),
    ("max_replicas", 257), ("max_batch_size", 0), ("batch_wait_s", -0.1), ("batch_wait_s", 1e9), ("max_queue", 0),
    ("target_in_flight", 0), ("idle_s", 0), ("grace_s", -1), ("deadline_s", 5), ("params", {"a": []}),
]  # fmt: skip
BAD_KEYS = ["", "x" * 256, "tab\tkey"]


def assert_refused(answer, *statuses):
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:500])
    if statuses:
        assert answer.status_code in statuses, (answer.status_code, answer.text[:500])
    error = msgspec.json.decode(answer.content)["error"]
    assert set(error) == {"code", "message"}
    assert len(error["message"].split()) >= 4
    assert len(error["message"]) < 4000
    assert "Traceback" not in error["message"]


def fingerprint(platform):
    files = sorted(str(path) for path in platform.state_dir.rglob("*"))
    return platform.view().seq, msgspec.json.encode(platform.controller.state), files, list(platform.shutdowns)


@pytest.fixture
def unchanged(platform):
    """Whatever the test sends, the platform must be the same afterwards."""
    before = fingerprint(platform)
    yield
    assert fingerprint(platform) == before


def api_routes(app):
    """Every (method, path) of the control API, from the route table itself."""
    found = []
    for route in walk(app.router.routes):
        if route.path.startswith("/v1/"):
            found += [(method, route.path) for method in sorted(route.methods - {"HEAD", "OPTIONS"})]
    return found


def walk(routes):
    for route in routes:
        if isinstance(route, Route) or hasattr(route, "methods"):
            yield route
        elif hasattr(route, "effective_candidates"):
            yield from route.effective_candidates()
        else:
            yield from walk(getattr(route, "routes", None) or [])


def filled(path, name):
    return re.sub(r"\{\w+\}", name, path)


def test_the_route_table_is_walked(app):
    assert len(api_routes(app)) >= 17


@pytest.mark.slow
def test_no_route_opens_without_the_token(app, stranger, unchanged):
    attempts = [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer \xe9".encode("latin-1")},
        {"Cookie": "springtide_8787=wrong"},
        {"Cookie": f"springtide_8787={TOKEN}"},
        {"Cookie": f"springtide_default={TOKEN}", "Authorization": "Bearer wrong"},
    ]
    for method, path in [*api_routes(app), ("GET", "/docs"), ("GET", "/openapi.json"), ("POST", "/f/x"), ("GET", "/x")]:
        for headers in attempts:
            answer = stranger.request(method, filled(path, "digits"), headers=headers)
            assert_refused(answer, 401)
            assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.slow
def test_no_route_answers_to_a_foreign_host_or_origin(app, http, unchanged):
    for method, path in api_routes(app):
        address = filled(path, "digits")
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.", "127.0.0.2", "", "127.0.0.1:80:80"):
            assert_refused(http.request(method, address, headers={"Host": host}), 403)
        if method == "GET":
            continue
        for origin in (
            "http://evil.example",
            "null",
            "http://localhost:8787",
            "https://127.0.0.1:8787",
            "http://127.0.0.1:1",
        ):
            assert_refused(http.request(method, address, headers={"Origin": origin}), 403)


@pytest.mark.parametrize("case", NOT_JSON)
def test_no_route_that_takes_a_body_takes_what_is_not_json(app, http, case, unchanged):
    taking = [(m, p) for m, p in api_routes(app) if (m, p) in BODY_ROUTES]
    assert len(taking) == len(BODY_ROUTES)
    for method, path in taking:
        assert_refused(http.request(method, filled(path, "digits"), content=NOT_JSON[case], headers=JSON), 400)


BODY_ROUTES = {
    ("POST", "/v1/jobs"),
    ("POST", "/v1/data/{name}"),
    ("PUT", "/v1/services/{name}"),
    ("POST", "/v1/workloads/{id}/scale"),
    ("POST", "/v1/shutdown"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG_SHAPES)
def test_no_route_takes_json_of_another_shape(app, http, case, unchanged):
    for method, path in api_routes(app):
        if method == "GET":
            continue
        answer = http.request(method, filled(path, "digits"), content=WRONG_SHAPES[case], headers=JSON)
        # The contents of files are no JSON.
        assert_refused(answer, 415 if (method, path) == ("POST", "/v1/contents") else 422)


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_json_must_be_declared(http, media_type, unchanged):
    for method, path in sorted(BODY_ROUTES):
        answer = http.request(method, filled(path, "digits"), content=b"{}", headers={"Content-Type": media_type})
        assert_refused(answer, 415)


def test_a_body_above_the_limit_is_not_read(app, http, unchanged):
    body = b'{"name": "' + b"x" * (2 * 1024 * 1024) + b'"}'

    for method, path in api_routes(app):
        # A shard of a dataset is no JSON and has a limit of its own (test_data_routes.py).
        if method == "GET" or path.endswith("/shards/{sha256}") or path.startswith("/v1/contents"):
            continue
        assert_refused(http.request(method, filled(path, "digits"), content=body, headers=JSON), 413)
    assert_refused(
        http.post("/v1/jobs", content=b"{}", headers={**JSON, "Content-Length": "99999999999999999999"}), 413
    )
    assert_refused(http.post("/v1/jobs", content=b"{}", headers={**JSON, "Content-Length": "-1"}), 400)


def test_headers_and_addresses_have_limits(http, unchanged):
    assert_refused(http.get("/v1/status", headers={"X-Big": "x" * 20_000}), 431)
    assert_refused(http.get("/v1/jobs/" + "x" * 9000), 431)
    assert_refused(http.get("/v1/timeline?since_s=" + "1" * 9000), 431)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(http, name, unchanged):
    assert_refused(http.post("/v1/jobs", json=job_body(name=name)), 422)


@pytest.mark.parametrize("name", ["UPPER", "a%20b", "%2e%2e", "..%2fx", "a%00b", "%C3%A9", "x" * 64, "-x", "a..b"])
def test_bad_service_names_and_unknown_workloads(app, http, name, unchanged):
    assert_refused(http.put(f"/v1/services/{name}", json=service_body()), 404, 405, 422)
    for method, path in api_routes(app):
        if "{" in path and method in ("GET", "DELETE"):
            assert_refused(http.request(method, filled(path, name)), 404)


def test_unknown_workloads_are_404_on_every_route(app, http, unchanged):
    for method, path in api_routes(app):
        # Datasets and keys are no workloads: test_data_routes.py, test_api_keys.py.
        if "{" not in path or method == "PUT" or path.startswith(("/v1/data", "/v1/keys")):
            continue
        move = {"to": "functions"}
        wishes = {"scale": {"minimum": 1, "maximum": 2}, "PATCH": {"max_restarts": 1}, "move": move, "quote": move}
        wishes["rollback"] = {"revision": None}
        body = wishes.get(method) or wishes.get(path.rpartition("/")[2])
        answer = http.request(method, filled(path, "nobody"), json=body)
        assert_refused(answer, 404)
        assert "springtide ps" in answer.json()["error"]["message"]


@pytest.mark.parametrize("filename", BAD_FILENAMES)
def test_bad_filenames(http, filename, unchanged):
    assert_refused(http.post("/v1/jobs", json=job_body(source__filename=filename)), 422)


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_bad_source_texts(http, case, unchanged):
    assert_refused(http.post("/v1/jobs", json=job_body(source__text=BAD_TEXTS[case])), 422)


def test_a_source_above_a_mebibyte_is_refused(http, unchanged):
    text = "#" * (1024 * 1024) + "\n"
    assert_refused(http.post("/v1/jobs", json=job_body(source__text=text)), 413)


@pytest.mark.slow
@pytest.mark.parametrize("object_name", ["", "a.b", "1x", "fit()", "x" * 129, "a b", None, 5])
def test_bad_object_names(http, object_name, unchanged):
    assert_refused(http.post("/v1/jobs", json=job_body(source__object_name=object_name)), 422)


@pytest.mark.parametrize("kind", ["class", "module", "", None, 1])
def test_bad_kinds(http, kind, unchanged):
    assert_refused(http.post("/v1/jobs", json=job_body(source__kind=kind)), 422)


@pytest.mark.parametrize("root", ["relative", "/no/such/directory", "/etc/passwd", "a\u0000b", "x" * 5000, 7])
def test_bad_import_roots(http, root, unchanged):
    assert_refused(http.post("/v1/jobs", json=job_body(source__import_root=root)), 422)


@pytest.mark.parametrize("args", [["x\u0000"], ["x" * 4097], ["x"] * 257, "x", [1]])
def test_bad_args(http, args, unchanged):
    assert_refused(http.post("/v1/jobs", json=job_body(source__args=args)), 422)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS, ids=lambda value: str(value)[:20])
def test_bad_job_options(http, option, value, unchanged):
    answer = http.post("/v1/jobs", json=job_body(options={"max_workers": 2, option: value}))
    assert_refused(answer, 422)
    assert option in answer.json()["error"]["message"]


@pytest.mark.parametrize(("option", "value"), BAD_SERVICE_OPTIONS, ids=lambda value: str(value)[:20])
def test_bad_service_options(http, option, value, unchanged):
    answer = http.put("/v1/services/good", json=service_body(options={"max_replicas": 2, option: value}))
    assert_refused(answer, 422)
    assert option in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_idempotency_keys(http, key, unchanged):
    assert_refused(http.post("/v1/jobs", json=job_body(), headers={"Idempotency-Key": key}), 422)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"minimum": 3, "maximum": 2}, 422),
        # What a service may have, and a job of more virtual shards: it is this job that does not allow it.
        ({"minimum": 0, "maximum": 1}, 409),
        ({"minimum": 1, "maximum": 8}, 409),
    ],
)
def test_bad_bounds_for_a_job(http, platform, body, status):
    job_id = http.post("/v1/jobs", json=job_body()).json()["job_id"]
    before = fingerprint(platform)
    assert_refused(http.post(f"/v1/workloads/{job_id}/scale", json=body), status)
    assert fingerprint(platform) == before


@pytest.mark.parametrize(
    "query",
    ["tail=-1", "tail=x", "tail=1e9", "tail=99999999999999999999", "follow=maybe", "replica=../../x", "replica=A"],
)
def test_bad_log_queries(http, platform, query):
    job_id = http.post("/v1/jobs", json=job_body()).json()["job_id"]
    assert_refused(http.get(f"/v1/workloads/{job_id}/logs?{query}"), 422)


@pytest.mark.parametrize("query", ["since_s=nan", "since_s=-1", "since_s=inf", "since_s=x"])
def test_bad_timeline_queries(http, query, unchanged):
    assert_refused(http.get(f"/v1/timeline?{query}"), 422)


@pytest.mark.parametrize("query", ["after_seq=x", "after_seq=-2", "after_seq=99999999999999999999999"])
def test_bad_stream_queries(http, query, unchanged):
    assert_refused(http.get(f"/v1/stream?{query}"), 422)


def test_unknown_paths_and_methods_say_what_would_do(app, http, unchanged):
    assert_refused(http.get("/v1/nothing"), 404)
    routes = set(api_routes(app))
    for path in {path for _, path in routes if ("PATCH", path) not in routes}:
        assert_refused(http.patch(filled(path, "digits"), json={}), 405)


def test_a_symbolic_link_in_the_way_of_the_source_is_not_followed(http, platform, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = platform.workload_dir("sentiment")
    folder.mkdir(parents=True)
    (folder / "source").symlink_to(outside)
    answer = http.put("/v1/services/sentiment", json=service_body())
    assert answer.status_code == 503
    assert list(outside.iterdir()) == []
    assert "sentiment" not in platform.view().services


def test_the_limit_holds_for_a_body_of_unknown_length(http, unchanged):
    def chunks():
        for _ in range(64):
            yield b" " * 65536

    assert_refused(http.post("/v1/jobs", content=chunks(), headers=JSON), 413)
