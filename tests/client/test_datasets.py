"""`st.dataset`, `st.stream` and uploads, against the platform's API in memory and its words alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from springtide.client.datasets import (
    append_dataset,
    close_dataset,
    dataset,
    datasets,
    remove_dataset,
    send_pieces,
    show_dataset,
    stream,
    upload_dataset,
)
from springtide.core.errors import BackendError, Conflict, InvalidRequest, NotFound
from springtide.core.workload import WorkloadId
from springtide.service.api.data_routes import DatasetCatalog
from springtide.storage.datasets.manifest import DatasetStatus
from springtide.storage.datasets.place import data_store_url
from springtide.storage.datasets.reading import DatasetReader
from springtide.storage.workloads.artifacts import Artifact


class Platform:
    """The platform as a client sees it, with the real catalog behind it; `asked` is what went over the wire."""

    def __init__(self, state_dir):
        self.state_dir = state_dir
        self.catalog = DatasetCatalog(self)
        self.asked = []
        self.loses_answers = 0

    def workload_dir(self, workload_id: WorkloadId):
        return self.state_dir / "workloads" / workload_id

    def data_store_url(self):
        return data_store_url(self.state_dir)

    def view(self):
        return type("View", (), {"jobs": {}})

    def request(self, method, path, answer_type, *, body=None, timeout_s=0.0):
        parts = path.removeprefix("/v1/data").strip("/").split("/")
        self.asked.append((method, len(parts)))
        if method == "GET" and parts == [""]:
            return self.catalog.listed()
        if method == "GET":
            return self.catalog.one(parts[0]) if len(parts) == 1 else self.catalog.shard(parts[0], parts[2])
        if method == "DELETE":
            return self.catalog.remove(parts[0])
        if method == "POST":
            answer = self.catalog.change(parts[0], body)
            if self.loses_answers:
                self.loses_answers -= 1
                raise BackendError("the connection to the platform was lost")
            return answer
        with self.catalog.upload() as file:
            file.write(body)
            return self.catalog.take_shard(parts[0], Artifact(sha256=parts[2], num_bytes=len(body)), file)

    def samples(self, name):
        reader = DatasetReader(self.catalog.store, name)
        found = reader.read(np.arange(reader.num_samples))
        reader.close()
        return found


@pytest.fixture
def platform(tmp_path):
    return Platform(tmp_path)


def test_references_are_values_with_checked_names():
    assert dataset("digits") == dataset("digits")
    assert not dataset("digits").is_stream
    assert dataset("digits", mixed=3).num_mixed == 3
    assert stream("clicks").is_stream
    for call in (dataset, stream):
        for name in ("", "A", "a/b", "../x"):
            with pytest.raises(InvalidRequest, match="name"):
                call(name)
    for mixed in (-1, 1.5, True, "2"):
        with pytest.raises(InvalidRequest, match="mixed is a number of shards"):
            dataset("digits", mixed=mixed)


def test_naming_a_dataset_needs_no_library():
    program = (
        "import sys; from springtide.client.datasets import dataset; dataset('digits'); "
        "print([name for name in ('numpy', 'torch', 'httpx2', 'obstore') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_upload_append_close_show_and_remove(platform):
    status = upload_dataset("digits", x=np.ones((50, 2)), y=np.arange(50), client=platform, shard_size="1KB")
    assert isinstance(status, DatasetStatus)
    assert (status.num_samples, status.num_shards, status.kind) == (50, 2, "whole")
    assert platform.samples("digits")["y"].tolist() == list(range(50))
    for first in (0, 3):
        append_dataset("clicks", {"x": np.arange(first, first + 3)}, client=platform)
    assert show_dataset("clicks", client=platform).num_samples == 6
    assert [each.name for each in datasets(client=platform)] == ["clicks", "digits"]
    assert close_dataset("clicks", client=platform).kind == "closed"
    with pytest.raises(Conflict, match="closed"):
        append_dataset("clicks", x=np.arange(3), client=platform)
    remove_dataset("clicks", client=platform)
    with pytest.raises(NotFound):
        show_dataset("clicks", client=platform)


def test_the_same_content_is_not_sent_again(platform):
    arrays = {"x": np.arange(1000.0)}
    upload_dataset("digits", arrays, client=platform, shard_size=1000)
    platform.asked.clear()
    upload_dataset("digits", arrays, client=platform, shard_size=1000)
    assert ("PUT", 3) not in platform.asked
    with pytest.raises(Conflict, match="already"):
        upload_dataset("digits", x=np.zeros(1000), client=platform, shard_size=1000)
    assert ("PUT", 3) not in platform.asked


def test_an_upload_that_broke_off_goes_on_where_it_was(platform, monkeypatch):
    arrays = {"x": np.arange(1000.0)}

    def broken(num_samples, num_bytes):
        if num_samples >= 375:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send_pieces(platform, "digits", "put", [arrays], shard_bytes=1000, on_progress=broken)
    assert datasets(client=platform) == []
    platform.asked.clear()
    told = []
    send_pieces(platform, "digits", "put", [arrays], shard_bytes=1000, on_progress=lambda *each: told.append(each[0]))
    assert platform.asked.count(("PUT", 3)) == 5
    assert told == list(range(125, 1001, 125))


def test_an_append_whose_answer_was_lost_is_made_once(platform):
    append_dataset("clicks", x=np.arange(3), client=platform)
    platform.loses_answers = 1
    assert append_dataset("clicks", x=np.arange(4), client=platform).num_samples == 7
    platform.loses_answers = 2
    with pytest.raises(BackendError):
        append_dataset("clicks", x=np.arange(5), client=platform)


def test_pieces_make_one_dataset_or_one_append_each(platform):
    pieces = [{"x": np.full((4, 2), turn)} for turn in range(3)]
    assert send_pieces(platform, "whole", "put", iter(pieces), shard_bytes=1000).version == 1
    assert platform.samples("whole")["x"][:, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert send_pieces(platform, "grows", "append", iter(pieces), shard_bytes=1000).version == 3
    with pytest.raises(InvalidRequest, match="the same arrays, types and shapes"):
        send_pieces(platform, "mixed", "put", [pieces[0], {"x": np.zeros(3)}], shard_bytes=1000)
    with pytest.raises(InvalidRequest, match="nothing to send"):
        send_pieces(platform, "none", "put", [], shard_bytes=1000)


def test_what_cannot_be_appended_is_said_before_anything_is_sent(platform):
    append_dataset("clicks", x=np.zeros((3, 2)), client=platform)
    platform.asked.clear()
    with pytest.raises(InvalidRequest, match=r"must be like what it holds: x \(F64 \[2\]\), not x \(F64 \[3\]\)"):
        append_dataset("clicks", x=np.zeros((3, 3)), client=platform)
    assert ("PUT", 3) not in platform.asked


def test_arrays_are_given_once_and_tensors_are_arrays(platform):
    with pytest.raises(InvalidRequest, match="not both"):
        upload_dataset("digits", {"x": np.zeros(3)}, y=np.zeros(3), client=platform)
    with pytest.raises(InvalidRequest, match="1 to 64 named arrays"):
        upload_dataset("digits", client=platform)
    with pytest.raises(InvalidRequest, match="size of a shard"):
        upload_dataset("digits", x=np.zeros(3), client=platform, shard_size="a lot")

    class Tensor:
        def detach(self):
            return self

        def cpu(self):
            return self

        def numpy(self):
            return np.arange(3)

    upload_dataset("digits", x=Tensor(), client=platform)
    assert platform.samples("digits")["x"].tolist() == [0, 1, 2]


def test_without_a_client_it_connects(platform, monkeypatch):
    class Connected:
        def __enter__(self):
            return platform

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("springtide.client.api.connect", Connected)
    assert datasets() == []
