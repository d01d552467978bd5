"""A job's Redis as an ECS task, through the real boto3 against moto's server: begun, looked at, lost, stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

import boto3
import msgspec
import pytest

from springtide.backends.functions.parameter_store import host_ecs as parameter_host_ecs
from springtide.backends.functions.parameter_store.address import make_parameter_host
from springtide.backends.functions.parameter_store.host import HostedParameters, ParameterStoreHost
from springtide.backends.functions.parameter_store.host_ecs import EcsSettings, EcsTasks
from springtide.core.errors import BackendError, InvalidRequest

pytestmark = pytest.mark.slow
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Cloud:
    """moto's ECS and EC2 with a cluster, a subnet and a task definition; tasks go on when they are told to."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.ecs = boto3.client("ecs", endpoint_url=endpoint, region_name="us-east-1")
        ec2 = boto3.client("ec2", endpoint_url=endpoint, region_name="us-east-1")
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        ec2.modify_vpc_attribute(VpcId=vpc, EnableDnsHostnames={"Value": True})
        self.subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]
        self.ecs.create_cluster(clusterName="springtide")
        self.ecs.register_task_definition(
            family="redis",
            networkMode="awsvpc",
            requiresCompatibilities=["FARGATE"],
            cpu="256",
            memory="512",
            containerDefinitions=[{"name": "redis", "image": "redis:7", "cpu": 256, "memory": 512}],
        )
        self.let_tasks_stand()

    def let_tasks_stand(self, looks: int = 100_000) -> None:
        """A task's state changes after so many looks at it."""
        change = {"model_name": "ecs::task", "transition": {"progression": "manual", "times": looks}}
        request = urllib.request.Request(
            f"{self.endpoint}/moto-api/state-manager/set-transition",
            json.dumps(change).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).close()

    def settings(self, **changes) -> EcsSettings:
        given = {"cluster": "springtide", "task_definition": "redis:1", "region": "us-east-1"}
        given |= {"subnets": (self.subnet,), "endpoint_url": self.endpoint}
        return EcsSettings(**{**given, **changes})

    def tasks(self, state="RUNNING"):
        return self.ecs.list_tasks(cluster="springtide", desiredStatus=state)["taskArns"]


@pytest.fixture(scope="module")
def server():
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "NO_PROXY": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in keys.items():
            patch.setenv(name, value)
        patch.delenv("AWS_PROFILE", raising=False)
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ},
        )
        try:
            port = process.stdout.readline().strip()
            assert port.isdigit(), "moto's server does not start: pip install 'moto[ec2,ecs,server]'"
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()
            process.wait()
            process.stdout.close()


@pytest.fixture
def cloud(server, monkeypatch):
    # A task of moto has an address, but no Redis behind it.
    monkeypatch.setattr(parameter_host_ecs, "answers", lambda url, limit_s: True)
    cloud = Cloud(server)
    yield cloud
    for task in cloud.tasks():
        cloud.ecs.stop_task(cluster="springtide", task=task)


def kind_of(cloud, **changes) -> EcsTasks:
    return EcsTasks(cloud.settings(**changes), sleep=lambda seconds: None)


def test_a_task_is_begun_looked_at_and_stopped(cloud, tmp_path):
    host = HostedParameters(kind_of(cloud), tmp_path, linger_s=60.0, check_s=0.0)
    url = host.acquire("job-1")
    assert url.startswith("redis://:")
    assert "@10." in url
    assert url.endswith(":6379/0")
    (task,) = cloud.tasks()
    told = cloud.ecs.describe_tasks(cluster="springtide", tasks=[task])["tasks"][0]
    command = told["overrides"]["containerOverrides"][0]["command"]
    assert command[:6] == ["redis-server", "--port", "6379", "--user", "default", "on"]
    assert url.split("@")[0].rpartition(":")[2] not in json.dumps(told, default=str), "AWS keeps no password"
    assert host.is_alive("job-1")
    host.release("job-1", lingers=False)
    assert cloud.tasks() == []
    host.close(ends=True)


def test_one_that_stopped_is_replaced_at_another_address(cloud, tmp_path):
    host = HostedParameters(kind_of(cloud), tmp_path, linger_s=60.0, check_s=0.0)
    url = host.acquire("job-1")
    (task,) = cloud.tasks()
    cloud.ecs.stop_task(cluster="springtide", task=task)
    cloud.let_tasks_stand(1)
    assert not host.is_alive("job-1")
    cloud.let_tasks_stand()
    assert host.renew("job-1") != url
    assert len(cloud.tasks()) == 1
    host.close(ends=True)
    assert cloud.tasks() == []


def test_a_task_that_an_earlier_platform_lost_sight_of_is_stopped(cloud):
    kind = kind_of(cloud)
    lost = kind.start("job-1", None)
    other = kind.start("job-2", None)
    again = kind.start("job-1", None)
    assert set(cloud.tasks()) == {again.identity, other.identity}
    assert lost.identity not in cloud.tasks()


def test_the_address_of_a_setting_becomes_tasks(cloud, tmp_path):
    address = f"ecs://springtide/redis:1?region=us-east-1&subnets={cloud.subnet}&endpoint={cloud.endpoint}&linger=0s"
    host = make_parameter_host(address, tmp_path)
    assert host.acquire("job-1")
    host.release("job-1")
    assert cloud.tasks() == []
    host.close(ends=True)


def test_a_cluster_that_is_not_there_is_known_before_the_first_job(cloud, tmp_path):
    address = f"ecs://nowhere/redis:1?region=us-east-1&subnets={cloud.subnet}&endpoint={cloud.endpoint}"
    with pytest.raises(InvalidRequest, match="no such cluster"):
        make_parameter_host(address, tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cluster": "nowhere"}, "no such cluster"),
        ({"task_definition": "nothing:1"}, "task definition nothing:1"),
    ],
)
def test_what_can_be_mended_is_said(cloud, changes, said):
    with pytest.raises(InvalidRequest, match=said) as found:
        kind_of(cloud, **changes).start("job-1", None)
    assert "\n" not in str(found.value)


def test_nobody_answers_behind_a_task(cloud, monkeypatch):
    monkeypatch.setattr(parameter_host_ecs, "answers", lambda url, limit_s: False)
    ticks = iter(range(10_000))
    kind = EcsTasks(cloud.settings(), sleep=lambda seconds: None, now_s=lambda: next(ticks), start_limit_s=5.0)
    with pytest.raises(BackendError, match="did not answer within 5 s"):
        kind.start("job-1", None)
    assert cloud.tasks() == [], "what nobody can use is not left behind"
    # Where the platform is in another network only AWS is asked.
    assert kind_of(cloud, is_reachable=False).start("job-1", None).url


def test_a_task_that_stops_before_it_answers_is_said(cloud):
    cloud.let_tasks_stand(1)
    with pytest.raises(BackendError, match="has stopped"):
        kind_of(cloud).start("job-1", None)


def test_aws_out_of_reach_kills_no_store(cloud):
    kind = kind_of(cloud, endpoint_url="http://127.0.0.1:9")
    server = ParameterStoreHost(url="redis://h:1/0", identity="arn:aws:ecs:x", began_at_s=0.0)
    assert kind.is_alive(server)
    with pytest.raises(BackendError, match="cannot be looked at"):
        kind.end(server)


def test_no_keys_are_one_sentence(cloud, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match="aws configure"):
        kind_of(cloud).start("job-1", None)


def test_settings_are_values(cloud):
    settings = cloud.settings()
    assert msgspec.json.decode(msgspec.json.encode(settings), type=EcsSettings) == settings
