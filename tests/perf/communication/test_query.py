"""Samples of collectives: their files, and what they become."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from springtide.core.errors import InvalidRequest
from springtide.core.resources import DeviceId, make_node
from springtide.perf.communication.fabric import T4_SERVER, V100_SERVER
from springtide.perf.communication.query import CommunicationSample, SampleFile, read_samples, write_samples


def two_samples(*links: object) -> SampleFile:
    return SampleFile(
        source="a test",
        nodes=(make_node("a", 4), make_node("b", 4)),
        links=links or (T4_SERVER,),  # type: ignore[arg-type]
        samples=(
            CommunicationSample(device_ids=(DeviceId("a/0"), DeviceId("a/1")), num_bytes=4096, duration_s=1e-4),
            CommunicationSample(
                device_ids=(DeviceId("a/0"), DeviceId("b/1")), num_bytes=8, duration_s=2e-4, dtype="int8"
            ),
        ),
    )


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    made = two_samples()
    write_samples(tmp_path / "samples.json", made)
    assert read_samples(tmp_path / "samples.json") == made


def test_samples_become_queries_on_the_clusters_graph() -> None:
    queries, measured_s = two_samples().queries()
    assert [query.subgraph.num_servers for query in queries] == [1, 2]
    assert [query.dtype for query in queries] == ["float32", "int8"]
    assert np.array_equal(measured_s, [1e-4, 2e-4])
    mixed, _ = two_samples(T4_SERVER, V100_SERVER).queries()
    assert {links.name for links in mixed[1].subgraph.links} == {"t4", "v100"}


def test_what_is_no_such_file_is_refused_with_a_mend(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_samples(tmp_path / "missing.json")
    (tmp_path / "other.json").write_text('{"samples": 3}')
    with pytest.raises(InvalidRequest, match="profile communication"):
        read_samples(tmp_path / "other.json")
    with pytest.raises(InvalidRequest, match="one for all or one for each"):
        two_samples(T4_SERVER, V100_SERVER, T4_SERVER).queries()
