"""The description of the API, and that the API keeps it: methods, statuses, numbers, events, what a platform has."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import httpx2
import jsonschema
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kits.service.api_fixtures import HEADERS, TOKEN, Served, job_body
from springtide.core.errors import InvalidRequest
from springtide.core.status.platform import PlatformStatus
from springtide.core.status.pods import ClusterStatus
from springtide.service.api.application import build_api
from springtide.service.api.dashboard import dashboard_routes
from springtide.service.gateway.application import Gateway
from springtide.serving.inference_protocol import arguments_of, parse_infer
from springtide.serving.schema import Parameter, ServiceSchema, check_call

METHODS = {"get", "put", "post", "patch", "delete"}


def walk(routes):
    for route in routes:
        if hasattr(route, "effective_candidates"):
            yield from route.effective_candidates()
        elif getattr(route, "methods", None):
            yield route


def described(http):
    return http.get("/openapi.json").json()


def of_schema(schema):
    """A double of a service in the gateway, of which no more is asked than its schema."""
    return SimpleNamespace(answering=lambda: SimpleNamespace(schema=schema))


def test_a_405_lists_every_method_of_the_path(http):
    for path, operations in described(http)["paths"].items():
        offered = {method.upper() for method in operations} & {method.upper() for method in METHODS}
        for method in ("OPTIONS", *({"GET", "PUT", "PATCH"} - offered)):
            answer = http.request(method, path.replace("{", "").replace("}", ""))
            assert answer.status_code == 405, (method, path)
            # HEAD goes with GET and is not described.
            assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == offered
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
    assert schemas["JobOptionsIn"]["properties"]["on"]["enum"] == ["cluster", "auto"]
    assert http.post("/v1/quote", json=job_body(container={})).status_code == 422
    monkeypatch.setattr(platform, "cluster", ClusterStatus)
    schemas = described(http)["components"]["schemas"]
    assert "ContainerIn" in str(schemas["JobIn"]["properties"]["container"])


def test_everything_that_is_served_is_described(platform):
    gateway = gateway_of(COUNT)
    app = build_api(
        platform,
        token=TOKEN,
        registry=CollectorRegistry(),
        extra_routes=[*gateway.routes(), *dashboard_routes()],
        function_paths=gateway.openapi_paths,
    )
    with Served(app) as url, httpx2.Client(base_url=url, headers=HEADERS, trust_env=False) as http:
        paths = {path: set(operations) for path, operations in described(http)["paths"].items()}
    served = {route.path: route.methods for route in walk(app.router.routes)}
    # The routes of the gateway are one endpoint for all methods.
    served |= {route.path: set(route.app.handlers) for route in gateway.routes()}
    assert {"/", "/docs", "/openapi.json", "/readyz", "/v2/models/{name}/infer"} <= set(served)
    for path, methods in served.items():
        if path == "/f/{name}/{path:path}":
            # Only an application answers there, and what it does is its own description's affair.
            continue
        # The description has no converters.
        path = path.replace(":path}", "}")
        offered = paths.get(path) or paths[path.replace("{name}", "count")]
        assert {method.lower() for method in methods - {"HEAD"}} <= offered, path
    assert paths["/login"] == {"get"}


COUNT = ServiceSchema(
    parameters=(
        Parameter(
            name="numbers", json_schema={"type": "array", "items": {"type": "number"}}, is_list=True, datatype="FP64"
        ),
    ),
    returns=Parameter(name="outputs", json_schema={"type": "integer"}, datatype="INT64"),
)


def gateway_of(schema):
    gateway = Gateway(lambda event: None)
    gateway._services = {"count": of_schema(schema)}
    return gateway


def infer_schema(schema):
    return gateway_of(schema).openapi_paths()["/v2/models/count/infer"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        ({}, True),
        ({"datatype": "FP16", "data": [0.5, 1]}, True),
        ({"datatype": "INT8", "data": [-128, 127.0]}, True),
        ({"datatype": "INT8", "data": [128, 1]}, False),
        ({"datatype": "UINT64", "data": [-1, 1]}, False),
        ({"datatype": "INT8", "data": [0.5, 1]}, False),
        ({"datatype": "BYTES", "data": ["a", "b"]}, False),
        ({"datatype": "BOOL", "data": [True, False]}, False),
        ({"name": "others"}, False),
        ({"shape": [-2]}, False),
        ({"shape": []}, False),
        ({"data": [None, 1]}, False),
    ],
)
def test_the_tensors_that_are_described_are_those_that_are_taken(tensor, fits):
    body = {"inputs": [{"name": "numbers", "shape": [2], "datatype": "INT32", "data": [1, 2], **tensor}]}
    assert jsonschema.Draft202012Validator(infer_schema(COUNT)).is_valid(body) is fits
    try:
        arguments = arguments_of(parse_infer(json.dumps(body).encode()), COUNT)
        check_call(COUNT, json.dumps(arguments).encode(), arguments)
        # The replica checks the types of the values.
        msgspec.convert(arguments["numbers"], list[float])
        is_taken = True
    except (InvalidRequest, msgspec.ValidationError):
        is_taken = False
    assert is_taken is fits


def test_a_service_whose_replicas_have_sent_no_schema_is_described_too():
    paths = gateway_of(None).openapi_paths()
    assert set(paths["/v2/models/count/infer"]) == {"post"}
    assert infer_schema(None)["required"] == ["inputs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "options", "status"),
    [
        ({}, {"num_virtual_shards": 4}, 201),
        ({}, {"num_virtual_shards": 3}, 422),
        ({"object_name": ""}, {}, 422),
        ({"kind": "script", "object_name": ""}, {}, 201),
        ({"kind": "script", "object_name": "fit"}, {}, 422),
        ({"kind": "script", "object_name": ""}, {"batch": {"min_size": 16, "max_size": 64}}, 422),
        # The sums of a library's program are those of its workers; a script that was adopted can be exact.
        ({"kind": "script", "object_name": "", "library": "lightning"}, {"num_virtual_shards": 4}, 422),
        ({"kind": "script", "object_name": "", "library": "springtide"}, {"num_virtual_shards": 4}, 201),
        ({"library": "springtide"}, {}, 422),
        ({"files": {"a/../b.txt": ""}}, {}, 422),
        ({"files": {"a.txt": ""}}, {}, 201),
        ({"args": ["a\0"]}, {}, 422),
    ],
)
def test_what_one_field_says_about_another_is_described(http, source, options, status):
    body = job_body()
    body["source"] |= source
    body["options"] = {"min_workers": 1, "max_workers": 2, **options}
    found = described(http)
    schema = {"$ref": "#/components/schemas/JobIn", "components": found["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is (status == 201)
    assert http.post("/v1/jobs", json=body).status_code == status


def test_a_call_of_a_service_names_all_that_it_may_be_answered_with():
    gateway = Gateway(lambda event: None)
    gateway._services = {"double": of_schema(None)}
    paths = gateway.openapi_paths()["/f/double"]
    assert set(paths) == {"get", "post"}
    assert {"400", "401", "404", "408", "413", "415", "422", "429", "502", "503", "504"} <= set(
        paths["post"]["responses"]
    )
    assert "404" in paths["get"]["responses"]
