"""Dilu's files of instances: what is read, what is refused by its line, and drawn ones of the same distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from springtide.core.errors import InvalidRequest
from springtide_studies.workloads.dilu import (
    MAX_LINE_CHARS,
    draw_sharing_workload,
    find_workloads,
    read_sharing_workload,
)

INFERENCE = (
    "'Instance': {'service_name': 'inference-a', 'type': 'inference', 'gpu_num': 1, 'sm_requests': 0.39, "
    "'sm_limits': 0.5900000000000001, 'memory': [4]}}"
)
TRAINING = (
    "'Instance': {'service_name': 'training-b', 'type': 'training', 'gpu_num': 2, 'sm_requests': 0.55, "
    "'sm_limits': 0.81, 'memory': [30, 30]}}"
)
START = "{'Time': '2024-06-19 15:46:09', 'Action': 'start', "
NEXT = "{'Time': '2024-06-19 15:46:10', 'Action': 'start', "
DELETE = "{'Time': '2024-06-19 15:47:09', 'Action': 'delete', "


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "instances-2.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_events_are_read_in_order(tmp_path: Path) -> None:
    workload = read_sharing_workload(written(tmp_path, START + INFERENCE, "", NEXT + TRAINING, DELETE + INFERENCE))
    assert (workload.name, workload.num_instances) == ("instances-2", 2)
    assert [(event.at_s, event.is_start) for event in workload.events] == [(0.0, True), (1.0, True), (60.0, False)]
    training = workload.events[1].instance
    assert (training.kind, training.num_devices, training.share.memory_mb) == ("training", 2, 30 * 1024)
    assert workload.events[0].instance == workload.events[2].instance


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (("what",), "line 1"),
        (("__import__('os').getcwd()",), "line 1"),
        (("-" * 1900 + "1",), "line 1"),
        (("[" * 1900,), "line 1"),
        (("{" + " " * MAX_LINE_CHARS + "}",), "longer than"),
        ((START + "'Instance': {}}",), "line 1: no 'service_name'"),
        ((START + INFERENCE, START + INFERENCE), "line 2: inference-a starts twice"),
        ((START + INFERENCE, DELETE + INFERENCE, DELETE + INFERENCE), "line 3: inference-a goes"),
        ((DELETE + INFERENCE,), "is not there as it started"),
        ((NEXT + INFERENCE, START + TRAINING), "line 2: its time lies before"),
        ((START + TRAINING.replace("[30, 30]", "[30]"),), "its memory"),
        ((START + TRAINING.replace("0.81", "0.5"),), "the limit of a share"),
        ((START + INFERENCE.replace("'gpu_num': 1", "'gpu_num': True"),), "gpu_num"),
        ((START + INFERENCE.replace("0.39", "1e999"),), "line 1"),
        ((START + INFERENCE.replace("'inference',", "'other',"),), "its type 'other'"),
        (("",), "holds no event"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(tmp_path: Path, lines: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match="instances-2") as refused:
        read_sharing_workload(written(tmp_path, *lines))
    assert sentence in str(refused.value)


def test_files_are_found_shortest_first(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="holds no instances"):
        list(find_workloads(tmp_path))
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload" / "instances-9.txt").write_text("longer")
    (tmp_path / "workload" / "instances-10.txt").write_text("long")
    assert [path.name for path in find_workloads(tmp_path)] == ["instances-10.txt", "instances-9.txt"]


def test_drawn_workloads_are_of_the_published_distribution() -> None:
    workload = draw_sharing_workload(1000, 3)
    assert workload == draw_sharing_workload(1000, 3)
    assert workload != draw_sharing_workload(1000, 4)
    started = [event.instance for event in workload.events if event.is_start]
    assert Counter(each.kind for each in started) == {"training": 200, "llm-inference": 200, "inference": 600}
    assert sum(not event.is_start for event in workload.events) == 700
    assert [event.at_s for event in workload.events] == sorted(event.at_s for event in workload.events)
    ranges = {"training": (0.4, 0.8, 1.0), "inference": (0.2, 0.4, 0.6), "llm-inference": (0.4, 0.6, 0.8)}
    for each in started:
        least, most, limit = ranges[each.kind]
        assert least <= each.share.request <= most
        assert each.share.request + 0.19 <= each.share.limit <= limit
        assert (each.num_devices in (2, 4)) == (each.kind == "training")
    shared = draw_sharing_workload(50, 1, num_families=2)
    assert len({event.instance.family for event in shared.events}) <= 6
