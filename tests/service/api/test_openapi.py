"""The description of the API, and that the API keeps it: methods, statuses, numbers, events, what a platform has."""

from __future__ import annotations

import re

import httpx2
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kits.service.api_fixtures import HEADERS, TOKEN, Served, job_body
from springtide.core.status.platform import PlatformStatus
from springtide.core.status.pods import ClusterStatus
from springtide.service.api.application import build_api
from springtide.service.gateway.application import Gateway

METHODS = {"get", "put", "post", "patch", "delete"}


def described(http):
    return http.get("/openapi.json").json()


def test_a_405_lists_every_method_of_the_path(http):
    for path, operations in described(http)["paths"].items():
        offered = {method.upper() for method in operations} & {method.upper() for method in METHODS}
        for method in ("OPTIONS", *({"GET", "PUT", "PATCH"} - offered)):
            answer = http.request(method, path.replace("{", "").replace("}", ""))
            assert answer.status_code == 405, (method, path)
            assert set(answer.headers["allow"].split(", ")) == offered
            assert answer.headers["allow"] in answer.json()["error"]["message"]


def test_every_operation_with_a_body_names_the_statuses_that_bodies_are_refused_with(http):
    for path, operations in described(http)["paths"].items():
        for method, operation in operations.items():
            named = set(operation["responses"])
            if path.startswith("/v1/"):
                assert {"401", "403", "431"} <= named, (method, path)
            if method != "get":
                assert {"400", "408", "413"} <= named, (method, path)
                assert "415" in named or path.endswith("{sha256}"), (method, path)


@pytest.mark.parametrize("body", [{"num_epochs": 3.0}, {"deadline_s": 190.0, "max_workers": 2.0, "seed": 0.0}])
def test_a_whole_number_may_be_written_with_a_point(http, body):
    options = {"max_workers": 2, "min_workers": 1} | body
    answer = http.post("/v1/jobs", json=job_body(options=options))
    assert answer.status_code == 201, answer.text
    assert http.post("/v1/jobs", json=job_body(options={**options, "num_epochs": 3.5})).status_code == 422


def test_a_whole_number_of_a_shard_may_be_written_with_a_point(http):
    arrays = [{"name": "x", "dtype": "F32", "shape": [2.0]}]
    change = {"verb": "put", "part_id": "p", "arrays": arrays, "shards": [["0" * 64, 8.0, float(1 << 53)]]}
    answer = http.post("/v1/data/points", json=change)
    assert (answer.status_code, "was not sent" in answer.text) == (409, True)


@pytest.mark.parametrize("name", ["a", "a.b", "a.", "a_-b", "", "..", "a..b", "-a", "A", "a b"])
def test_the_description_of_names_is_what_is_checked(http, name):
    schemas = described(http)["components"]["schemas"]
    fits = re.search(schemas["JobIn"]["properties"]["name"]["pattern"], name) is not None
    assert (http.post("/v1/jobs", json=job_body(name=name)).status_code == 201) is fits


@pytest.mark.parametrize("filename", ["a.py", "a.b.py", "a-.py", "_.py", ".py", "a..py", "a/b.py", "a.pyc", "a.py\n"])
def test_the_description_of_file_names_is_what_is_checked(http, filename):
    schemas = described(http)["components"]["schemas"]
    pattern = schemas["JobSourceIn"]["properties"]["filename"]["pattern"].replace("$", r"\Z")
    fits = re.search(pattern, filename) is not None
    assert (http.post("/v1/jobs", json=job_body(source__filename=filename)).status_code == 201) is fits


def test_an_event_of_the_stream_fits_its_description(platform):
    app = build_api(platform, token=TOKEN, registry=CollectorRegistry())
    with Served(app) as url, httpx2.Client(base_url=url, headers=HEADERS, trust_env=False) as http:
        content = described(http)["paths"]["/v1/stream"]["get"]["responses"]["200"]["content"]
        event = content["text/event-stream"]["schema"]
        assert event["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/PlatformStatus"}
        told = {}
        with http.stream("GET", "/v1/stream") as answer:
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                told |= {name: value} if name else {}
                if name == "data":
                    break
    assert set(event["required"]) <= set(told) <= set(event["properties"])
    assert told["event"] == event["properties"]["event"]["const"]
    assert msgspec.json.decode(told["data"], type=PlatformStatus).seq == int(told["id"])


def test_what_a_platform_does_not_have_cannot_be_asked_for(http, platform, monkeypatch):
    schemas = described(http)["components"]["schemas"]
    for model in ("JobIn", "ServiceIn"):
        assert schemas[model]["properties"]["container"] == {"type": "null"}
    assert schemas["JobOptionsIn"]["properties"]["on"]["const"] == "cluster"
    assert http.post("/v1/quote", json=job_body(container={})).status_code == 422
    monkeypatch.setattr(platform, "cluster", ClusterStatus)
    schemas = described(http)["components"]["schemas"]
    assert "ContainerIn" in str(schemas["JobIn"]["properties"]["container"])


def test_a_call_of_a_service_names_all_that_it_may_be_answered_with():
    gateway = Gateway(lambda event: None)
    gateway._queues = {"double": type("Queue", (), {"schema": None})()}
    paths = gateway.openapi_paths()["/f/double"]
    assert set(paths) == {"get", "post"}
    assert {"400", "401", "404", "408", "413", "415", "422", "429", "502", "503", "504"} <= set(
        paths["post"]["responses"]
    )
    assert "404" in paths["get"]["responses"]
