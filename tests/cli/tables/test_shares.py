"""What shared devices look like to people: `springtide devices`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result
from msgspec.structs import replace

from springtide.cli.jobs.offers import quote_text
from springtide.cli.tables.shares import devices_text, enforced_lines, held_line, share_bar, share_range, start_pairs
from springtide.cli.tables.statuses import job_details, platform_summary, service_details
from springtide.core.shares import Share
from springtide.core.status.platform import DeviceHolder, DeviceStatus, JobStatus, ReplicaStatus, ServiceStatus
from springtide.core.status.quote import Quote
from springtide.core.status.shares import SharingStatus, TenantStatus

Run = Callable[..., Result]
READER = TenantStatus(
    workload_id="reader",
    replica_id="reader-1",
    device_id="local/0",
    request=0.25,
    limit=0.5,
    granted=0.5,
    used=0.125,
    state="EMERGENCY",
    throttled_s=1.25,
    reason="an iteration of 4 has run for 50 ms, 25 ms is usual",
)
DIGITS = TenantStatus(
    workload_id="digits-3f2a",
    replica_id="digits-3f2a-0",
    device_id="local/0",
    request=0.5,
    limit=0.75,
    granted=0.5,
    used=0.5,
    throttled_s=63.0,
    reason="held to its request while reader is in trouble",
)
SHARING = SharingStatus(
    mechanism="cgroup-v1",
    enforced="CPU time of replicas and workers, not their memory",
    device_cpus=0.5,
    tick_s=0.005,
    late_p99_s=0.0004,
    reaction_p99_s=0.0061,
    tenants=(READER, DIGITS),
)


def device(number: int, *holders: DeviceHolder, name: str | None = None) -> DeviceStatus:
    first = holders[0].workload_name if holders else name
    return DeviceStatus(
        device_id=f"local/{number}",
        node_id="local",
        kind="cpu",
        workload_id=first,
        workload_name=first,
        replica_id=None,
        holders=holders,
    )


def holder(tenant: TenantStatus, name: str) -> DeviceHolder:
    share = Share(request=tenant.request, limit=tenant.limit)
    return DeviceHolder(workload_id=tenant.workload_id, workload_name=name, replica_id=tenant.replica_id, share=share)


BOTH = (holder(READER, "reader"), holder(DIGITS, "digits"))
DEVICES = (device(0, *BOTH), device(1, name="gpt"), device(2))


def test_a_bar_is_a_device_with_what_is_used_granted_and_allowed():
    assert share_bar(READER, 8) == "[█▒│▒    ]"
    assert share_bar(replace(READER, used=0.0, granted=0.0), 8) == "[··│·    ]"
    assert share_bar(DIGITS, 8) == "[████│·  ]"
    assert share_bar(replace(DIGITS, used=7.0, granted=float("nan")), 8) == "[████████]", "never beyond the device"


def test_every_device_says_who_holds_it():
    text = devices_text(DEVICES, SHARING)
    lines = text.splitlines()
    assert lines[0] == "local/0 (cpu)  2 sharers, requests 0.75 of 1, limits 1.25, used 0.62"
    assert lines[1].split() == ["WHO", "REQUEST", "LIMIT", "GRANTED", "USED", "STATE", "HELD", "BACK", "REASON"]
    assert lines[2].split()[:5] == ["reader", "0.25", "0.50", "0.50", "0.12"]
    assert "EMERGENCY" in lines[2]
    assert "1m03" in lines[3]
    assert "local/1 (cpu)  gpt, the whole of it" in lines
    assert "local/2 (cpu)  free" in lines
    assert "enforced: CPU time of replicas and workers, not their memory" in lines
    assert lines[-1].startswith("by cgroup-v1; a device is 0.5 of a core; control every 5 ms")


def test_who_has_just_been_placed_is_shown_before_it_is_held_to_its_share():
    text = devices_text(DEVICES, replace(SHARING, tenants=(DIGITS,)))
    assert "local/0 (cpu)  2 sharers, requests 0.75 of 1" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  reader")]
    assert "starting" in row


def test_where_nothing_is_enforced_that_is_said():
    assert enforced_lines(SharingStatus()) == ["enforced: no device is shared"]
    assert "█" not in devices_text((device(0),), SharingStatus())


def test_a_gpu_says_what_is_launched_and_held_there():
    onto = replace(READER, memory_mb=4000, memory_used_mb=900, num_launches=1234, num_open=1, num_denied=2)
    beside = replace(DIGITS, num_launches=0, memory_used_mb=512)
    gpu = replace(device(0, *BOTH), kind="gpu")
    text = devices_text((gpu,), replace(SHARING, tenants=(onto, beside)))
    header, first, second = text.splitlines()[1:4]
    assert header.split()[-3:] == ["LAUNCHES", "MEMORY", "REASON"]
    assert " 1234 " in first
    assert " 900 of 4000 MB " in first
    assert first.endswith("25 ms is usual; 1 launch let through unheld; 2 allocations refused for its memory")
    assert " 512 MB " in second
    coming = devices_text((gpu,), replace(SHARING, tenants=(onto,)))
    assert "starting" in coming.splitlines()[3]
    assert "LAUNCHES" not in devices_text(DEVICES, SHARING), "nobody counts them on a CPU device"


def test_no_line_leaves_a_narrow_terminal():
    assert max(len(line) for line in devices_text(DEVICES, SHARING, 110).splitlines()[:4]) <= 110


def test_the_command_answers_for_people_and_for_scripts(springtide: Run, client: Any):
    client.devices_now, client.shared = DEVICES, SHARING
    told = springtide("devices")
    assert told.exit_code == 0
    assert "EMERGENCY" in told.stdout
    assert springtide("devices", "--watch").stdout == told.stdout, "off a terminal it prints once"
    answer = json.loads(springtide("devices", "--json").stdout)
    assert [tenant["state"] for tenant in answer["sharing"]["tenants"]] == ["EMERGENCY", "NONE"]
    assert len(answer["devices"][0]["holders"]) == 2


def test_a_pause_between_looks_that_is_none_is_refused(springtide: Run):
    assert springtide("devices", "--watch", "--every", "0").exit_code == 2


SHARE = Share(request=0.3, limit=0.6)
ENFORCED = "the kernel holds every share to its grant"
REPLICA = ReplicaStatus(
    replica_id="sentiment.0", device_id="local/0", state="READY", rank=None, started_at_s=1.0, share=SHARE
)
SERVICE = """
import springtide as st

@st.serve(gpu=0.5)
class Reader:
    def predict(self, texts: list[str]) -> list[str]:
        return texts
"""
JOB = """
import springtide as st

@st.train(share=(0.2, 0.4))
def fit(ctx):
    pass
"""


@pytest.fixture
def asked(client: Any, make_job: Callable[..., JobStatus], make_service: Callable[..., ServiceStatus]) -> Any:
    """The options that the platform was sent last."""
    client.add(make_job(share=SHARE, enforced=ENFORCED), make_service(name="reader", share=SHARE, enforced=ENFORCED))
    return lambda: client.calls[-1][1]


def options_of(asked: Any) -> dict[str, Any]:
    options = asked()["options"]
    return dict(options)


def test_deploy_takes_another_share_than_the_file(springtide: Run, asked: Any, tmp_path: Path) -> None:
    file = tmp_path / "serve.py"
    file.write_text(SERVICE)
    answer = springtide("deploy", str(file))
    assert options_of(asked)["share"] == {"request": 0.5, "limit": 1.0, "memory_mb": 0}
    assert f"  enforced: {ENFORCED}" in answer.output
    springtide("deploy", str(file), "--share", "30%..0.4", "--memory", "2GB", "--capacity", "50")
    assert options_of(asked)["share"] == {"request": 0.3, "limit": 0.4, "memory_mb": 2000}
    assert options_of(asked)["capacity_per_s"] == 50.0


def test_auto_without_a_profile_is_refused(springtide: Run, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text(SERVICE)
    answer = springtide("deploy", str(tmp_path / "serve.py"), "--share", "auto")
    assert answer.exit_code == 2
    assert "springtide profile serve.py --shares" in answer.output


def test_run_takes_a_share(springtide: Run, asked: Any, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(JOB)
    answer = springtide("run", str(file), "--detach")
    assert options_of(asked)["share"] == {"request": 0.2, "limit": 0.4, "memory_mb": 0}
    assert "  holds 0.3 of a device each, up to 0.6 where it is free" in answer.output
    springtide("run", str(file), "--detach", "--share", "0.1")
    assert options_of(asked)["share"] == {"request": 0.1, "limit": 0.2, "memory_mb": 0}


def test_what_is_held_and_what_enforces_it() -> None:
    assert held_line(None, ENFORCED) == ""
    assert held_line(SHARE, ENFORCED).splitlines() == [
        "  holds 0.3 of a device each, up to 0.6 where it is free",
        f"  enforced: {ENFORCED}",
    ]
    firm = Share(request=0.5, limit=0.5, memory_mb=4000)
    assert held_line(firm, "") == "  holds 0.5 of a device each, with 4000 MB of its memory\n"
    assert (share_range(firm), share_range(None)) == ("0.5..0.5", "whole")


def test_the_details_of_those_who_share(
    make_job: Callable[..., JobStatus], make_service: Callable[..., ServiceStatus]
) -> None:
    job = make_job(share=SHARE, enforced=ENFORCED, replicas=(replace(REPLICA, replica_id="fit.0", rank=0),))
    text = job_details(job, 10.0)
    assert "  share         0.3 of a device each, up to 0.6 where it is free" in text
    assert f"  enforced      {ENFORCED}" in text
    assert text.splitlines()[-2].split() == ["REPLICA", "STATE", "DEVICE", "RANK", "SHARE"]
    assert text.splitlines()[-1].split()[-1] == "0.3..0.6"
    service = make_service(
        share=SHARE,
        enforced=ENFORCED,
        replicas=(REPLICA, replace(REPLICA, replica_id="sentiment.1", share=None)),
        capacity_per_s=120.0,
        wanted_replicas=2,
        cold_start_s={"schedule": 0.01, "import": 0.5, "load": 1.25, "first_answer": 0.04},
    )
    text = service_details(service)
    assert "capacity    120 requests/s of one replica; the load asks for 2" in text
    assert "last start  1.8 s: schedule 10 ms, import 500 ms, load 1.2 s, first answer 40 ms" in text
    assert [line.split()[-1] for line in text.splitlines()[-3:]] == ["SHARE", "0.3..0.6", "whole"]


def test_whole_devices_are_shown_as_ever(make_service: Callable[..., ServiceStatus]) -> None:
    text = service_details(make_service(replicas=(replace(REPLICA, share=None),)))
    assert not any(word in text for word in ("share", "SHARE", "enforced", "capacity", "last start"))
    assert start_pairs({}) == []


def test_the_summary_counts_shared_devices(client: Any) -> None:
    status = client.status()
    assert "in shares" not in platform_summary(status)
    first, *rest = status.devices
    holder = DeviceHolder(workload_id="fit-3f2a", workload_name="fit", replica_id="fit.0", share=SHARE)
    shared = replace(first, workload_id="fit-3f2a", holders=(holder,))
    assert ", 1 in shares" in platform_summary(replace(status, devices=(shared, *rest)))


def test_a_quote_says_what_would_be_held() -> None:
    text = quote_text(Quote(verdict="accepted", reason="it fits", share=SHARE, enforced=ENFORCED))
    assert "  holds 0.3 of a device each" in text
    assert f"  enforced: {ENFORCED}" in text


def test_the_answers_have_the_keys_that_scripts_read(make_service: Callable[..., ServiceStatus]) -> None:
    told = json.loads(msgspec.json.encode(make_service(share=SHARE, enforced=ENFORCED)))
    assert told["share"] == {"request": 0.3, "limit": 0.6, "memory_mb": 0}
    assert told["enforced"] == ENFORCED
