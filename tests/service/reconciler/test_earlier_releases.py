"""Objects that an earlier release took in, with their statuses and its journal, are read without a loss."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import jsonschema
import msgspec
import pytest

from kits.releases.record_objects import NUM_DEVICES, STATE_DIR, house_of, spec_defaults, write_statuses
from kits.service.platform_double import PlatformDouble
from springtide.backends.kubernetes.client.kinds import key_of, uid_of
from springtide.backends.kubernetes.resources.definitions import custom_resource_definitions
from springtide.control.journal.codec import decode_step, upgraded
from springtide.control.records import JobRecord

RELEASES = sorted((Path(__file__).parents[2] / "fixtures" / "releases").glob("*.objects.json"))


@pytest.fixture(params=RELEASES, ids=lambda path: path.name.partition(".")[0])
def recorded(request, tmp_path):
    return json.loads(request.param.read_text().replace(STATE_DIR, str(tmp_path)))


@pytest.fixture
def house(recorded, tmp_path):
    """The reconciler on a platform that has restored the release's journal, and on its objects."""
    platform = PlatformDouble(tmp_path, num_devices=NUM_DEVICES)
    platform.controller = type(platform.controller)(platform.make_policy())
    for step in recorded["steps"]:
        platform.controller.restore(decode_step(upgraded(recorded["schema"], msgspec.json.encode(step))))
    platform.play()
    house, house.writer = house_of(platform)
    for obj in recorded["objects"]:
        spec = spec_defaults(obj["kind"]) | obj["spec"]
        house.cluster.server[obj["kind"], key_of(obj)] = copy.deepcopy({**obj, "spec": spec})
        house.cluster.see(obj)
    return house


def objects(recorded, kind):
    return {obj["metadata"]["name"]: obj for obj in recorded["objects"] if obj["kind"] == kind}


def conditions(status):
    return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}


def facts(status):
    """All but the conditions, and the number that "1 of 4 replicas ready" counts: that was the most that it may have,
    and is what it is to have now."""
    found = {name: value for name, value in status.items() if name != "conditions"}
    found = json.loads(re.sub(r" of \d+ replicas ready", " replicas ready", json.dumps(found)))
    return found


def test_every_object_keeps_its_workload_and_all_of_its_spec_is_in_force(recorded, house):
    jobs, services = dict(house.platform.view().jobs), dict(house.platform.view().services)
    for obj in objects(recorded, "TrainingFunction").values():
        found, refusal = house.jobs.submit(house.cluster.see(obj))
        if obj["status"]["state"] == "REFUSED":
            accepted = next(each for each in obj["status"]["conditions"] if each["type"] == "Accepted")
            assert (refusal.reason, refusal.message) == (accepted["reason"], accepted["message"])
            continue
        assert isinstance(found, JobRecord)
        assert (found.workload_id, found.state) == (obj["status"]["workloadId"], obj["status"]["state"])
        told = house.compare(obj)
        assert (told.is_true, told.reason) == (True, "InForce"), told.message
    for obj in objects(recorded, "InferenceFunction").values():
        service, told = house.services.compare(house.cluster.see(obj))
        before = services[service.workload_id]
        assert (service.service.revision, service.replicas) == (before.service.revision, before.replicas)
        assert [(each.is_true, each.reason) for each in told] == [(True, "InForce")]
    assert house.platform.view().jobs == jobs, "nothing was asked of them"


@pytest.mark.parametrize("recorded", [path for path in RELEASES if path.name.startswith("97ccb44")], indirect=True)
def test_limits_that_97ccb44_did_not_know_bind_its_services_and_not_the_jobs_that_began_without_them(house):
    for record in house.platform.view().jobs.values():
        assert (record.job.start_timeout_s, record.job.stall_timeout_s, record.job.on_nan) == (0.0, 0.0, "report")
    (obj,) = house.cluster.all("InferenceFunction")
    service, _ = house.services.compare(obj)
    assert service.service.start_timeout_s == 600.0


def test_what_a_status_told_is_told_on(recorded, house):
    for kind in ("TrainingFunction", "InferenceFunction"):
        for obj in objects(recorded, kind).values():
            if obj["status"]["state"] == "REFUSED":
                house.writer.write_refused(house.cluster.see(obj), [house.jobs.submit(obj)[1]])
    write_statuses(house, house.writer)
    told = dict(house.cluster.told)
    for obj in recorded["objects"]:
        old, new = obj["status"], told.get(uid_of(obj), obj["status"])
        assert conditions(new) == conditions(old)
        assert facts({name: new.get(name) for name in old}) == facts(old)
        since = [{each["type"]: each["lastTransitionTime"] for each in status["conditions"]} for status in (old, new)]
        assert since[0] == since[1]


def test_no_server_prunes_or_refuses_what_is_in_the_objects(recorded):
    schemas = {
        found["spec"]["names"]["kind"]: found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for found in custom_resource_definitions()
    }
    for obj in recorded["objects"]:
        jsonschema.Draft4Validator(_strict(schemas[obj["kind"]])).validate({"metadata": {}, **obj})


def _strict(schema):
    """The schema with every unknown field an error: a server would drop it without a word."""
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if name not in ("default", "pattern")}
    for word in ("items", "additionalProperties"):
        if word in kept:
            kept[word] = _strict(kept[word])
    if "properties" in kept:
        kept["properties"] = {name: _strict(inner) for name, inner in kept["properties"].items()}
        if set(kept["properties"]) != {"name"} and not kept.get("x-kubernetes-preserve-unknown-fields"):
            kept["additionalProperties"] = False
    return kept
