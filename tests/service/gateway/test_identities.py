"""A replica over a network, as in a pod: its gateway tells it an identity once both have proved that they know it."""

from __future__ import annotations

import asyncio

import pytest

from kits.service.gateway_replicas import make_service, run
from kits.service.real_replicas import RealReplica
from springtide.core.workload import Entrypoint
from springtide.service.gateway.access_log import AccessLog
from springtide.service.gateway.application import ServiceRoute
from springtide.serving.frames import Identify

SOURCE = """
import springtide as st


class Served:
    async def predict(self, depth: int) -> list:
        double = st.deployed("double")
        return [depth, *(await double.predict_async(depth=depth - 1) if depth else [double.headers()])]
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_pod", [True, False])
def test_a_replica_calls_by_the_address_that_its_gateway_tells_it(tmp_path, is_pod):
    async def scenario(harness):
        file = tmp_path / "served.py"
        file.write_text(SOURCE)
        entrypoint = Entrypoint(source_path=str(file), object_name="Served", kind="class")
        service = make_service(entrypoint=entrypoint, calls=("double",))
        replica = RealReplica(tmp_path / "r1", service, "r1", is_pod=is_pod)
        try:
            await asyncio.to_thread(replica.wait_ready)
            identity = Identify(url=f"http://127.0.0.1:{harness.port}", secret="st_service.s")
            harness.gateway.update([ServiceRoute(service=service, replicas=(replica.route(),), identity=identity)])
            await harness.until(lambda: "double" in harness.gateway._queues)
            headers = {"X-Request-Id": "r-1", "X-Springtide-Timeout": "20s", "X-Springtide-Priority": "high"}
            answer = await harness.client.post("/f/double", json={"depth": 2}, headers=headers)
            assert answer.status_code == 200, answer.text
            *depths, sent = answer.json()["outputs"]
            assert depths == [2, 1, 0]
            assert (sent["Authorization"], sent["X-Request-Id"]) == ("Bearer st_service.s", "r-1")
            assert sent["X-Springtide-Priority"] == "high"
            assert 0 < float(sent["X-Springtide-Timeout"].rstrip("s")) < 20
        finally:
            replica.close()

    run(scenario, access_log=AccessLog(tmp_path / "access.jsonl"))
    assert (tmp_path / "access.jsonl").read_text().count('"request_id":"r-1"') == 3
