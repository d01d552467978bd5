"""`springtide data`: from files and functions to datasets, and one sentence for everything that is none."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from springtide.cli.commands.data import size
from springtide.cli.commands.data_sources import pieces_of
from springtide.core.errors import InvalidRequest
from springtide.storage.datasets.manifest import DatasetArray, DatasetStatus
from springtide.storage.frames import FrameTensor, encode, tensor_of

STATUS = DatasetStatus(
    name="clicks",
    kind="growing",
    num_samples=1234,
    num_bytes=56789,
    num_shards=3,
    version=3,
    digest="d" * 64,
    arrays=(DatasetArray("x", "F32", (8, 8)), DatasetArray("y", "I64", ())),
    changed_at_unix_s=1.79e9,
    arrivals_per_s=12.5,
)


@pytest.fixture
def sent(monkeypatch):
    """What the commands hand to the client."""
    calls = []

    def send(client, name, verb, pieces, *, shard_bytes, on_progress):
        arrays = [{key: np.asarray(array) for key, array in piece.items()} for piece in pieces]
        calls.append((name, verb, arrays, shard_bytes))
        on_progress(10, 1000)
        return STATUS

    monkeypatch.setattr("springtide.client.datasets.send_pieces", send)
    return calls


def one(source):
    (piece,) = pieces_of(str(source))
    return {name: np.asarray(array).tolist() for name, array in piece.items()}


def test_files_of_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3), y=np.zeros(3))
    np.savez_compressed(tmp_path / "b.npz", x=np.arange(3))
    np.save(tmp_path / "c.npy", np.arange(4))
    (tmp_path / "d.safetensors").write_bytes(encode({"x": tensor_of(np.arange(5))}))
    assert one(tmp_path / "a.npz") == {"x": [0, 1, 2], "y": [0.0, 0.0, 0.0]}
    assert one(tmp_path / "b.npz") == {"x": [0, 1, 2]}
    assert one(tmp_path / "c.npy") == {"x": [0, 1, 2, 3]}
    assert one(tmp_path / "d.safetensors") == {"x": [0, 1, 2, 3, 4]}


FACTORIES = """
import numpy as np

class Tensors:
    tensors = (np.arange(2), np.arange(2))

def mapping(): return dict(x=[1, 2], y=[3, 4])
def pair(): return np.arange(2), np.arange(2)
def tensors(): return Tensors()
def pieces():
    yield dict(x=[1])
    yield [2],
def broken(): raise ValueError("no\\nluck")
def breaks_off():
    yield dict(x=[1])
    raise KeyError("gone")
def number(): return 3
def three(): return 1, 2, 3
def strange():
    yield 3
value = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "load.py"
    path.write_text(FACTORIES)
    return path


def test_functions_of_the_users(file):
    assert one(f"{file}:mapping") == {"x": [1, 2], "y": [3, 4]}
    assert one(f"{file}:pair") == one(f"{file}:tensors") == {"x": [0, 1], "y": [0, 1]}
    assert list(pieces_of(f"{file}:pieces")) == [{"x": [1]}, {"x": [2]}]


def test_what_is_no_source_is_one_sentence(file, tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object))
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "half.npz").write_bytes(b"PK\x03\x04")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "none.safetensors").write_text("")
    (tmp_path / "b.safetensors").write_bytes(encode({"x": FrameTensor("BF16", (1,), b"ab")}))
    for source, words in {
        f"{file}:broken": "broken in load.py failed: ValueError: no",
        f"{file}:breaks_off": "breaks_off in load.py failed: KeyError: 'gone'",
        f"{file}:number": "number in load.py gave int; it must return named arrays",
        f"{file}:three": "gave tuple",
        f"{file}:strange": "gave int",
        f"{file}:value": "has no function 'value'",
        f"{file}:nothing": "has no function 'nothing'",
        str(file): "name the function that returns the arrays, after a colon",
        "nowhere.py:f": "there is no file 'nowhere.py'",
        "nowhere.npz": "there is no file 'nowhere.npz'",
        "data.csv": "no source of samples; give arrays.npz",
        str(tmp_path / "objects.npy"): "cannot be read as .npy",
        str(tmp_path / "objects.npz"): "cannot be read as .npz",
        str(tmp_path / "text.npz"): "cannot be read as .npz",
        str(tmp_path / "half.npz"): "cannot be read as .npz",
        str(tmp_path / "text.safetensors"): "cannot be read as .safetensors",
        str(tmp_path / "none.safetensors"): "cannot be read as .safetensors",
        str(tmp_path / "b.safetensors"): "convert it to float32 first",
    }.items():
        with pytest.raises(InvalidRequest) as caught:
            list(pieces_of(source))
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_sizes_as_people_read_them():
    assert [size(each) for each in (0, 999, 1000, 56_789, 999_600, 5_280_856, 3e12)] == [
        "0 B", "999 B", "1 KB", "56.8 KB", "1 MB", "5.28 MB", "3 TB",
    ]  # fmt: skip


def test_put_and_append_send_what_the_source_gives(springtide, sent, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    put = springtide("data", "put", "clicks", str(tmp_path / "a.npz"), "--shard-size", "2MB")
    assert put.exit_code == 0, put.output
    assert "clicks has 1,234 samples, 56.8 KB in 3 shards, and grows" in put.output
    assert "st.dataset('clicks')" in put.output
    append = springtide("data", "append", "clicks", str(tmp_path / "a.npz"))
    assert "st.stream('clicks')" in append.output
    assert [call[:2] for call in sent] == [("clicks", "put"), ("clicks", "append")]
    assert sent[0][3] == 2_000_000
    assert sent[0][2][0]["x"].tolist() == [0, 1, 2]


def test_json_is_the_status(springtide, sent, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    ran = springtide("data", "put", "clicks", str(tmp_path / "a.npz"), "--json")
    assert msgspec.json.decode(ran.stdout, type=DatasetStatus) == STATUS


def test_looking_closing_and_removing(springtide, client):
    asked = []

    def request(method, path, answer_type, *, body=None, timeout_s=0.0):
        asked.append((method, path, getattr(body, "verb", None)))
        return [STATUS] if path == "/v1/data" else STATUS

    client.request = request
    listed = springtide("data", "ls").output.splitlines()
    assert listed[0].split() == ["NAME", "KIND", "SAMPLES", "SIZE", "SHARDS", "ARRAYS"]
    assert listed[1].split() == ["clicks", "growing", "1,234", "56.8", "KB", "3", "x:F32[8,8]", "y:I64"]
    shown = springtide("data", "show", "clicks").output
    for words in ("1,234 samples", "x          F32[8,8]", "y          I64\n", "12.5 samples/s", "d" * 64):
        assert words in shown
    assert "and grows" in springtide("data", "close", "clicks").output
    assert springtide("data", "rm", "clicks").output == "clicks is gone\n"
    assert asked == [
        ("GET", "/v1/data", None),
        ("GET", "/v1/data/clicks", None),
        ("POST", "/v1/data/clicks", "close"),
        ("DELETE", "/v1/data/clicks", None),
    ]


def test_nothing_there_yet(springtide, client):
    client.request = lambda *arguments, **named: []
    ran = springtide("data", "ls")
    assert "no datasets" in ran.output
    assert "springtide data put NAME FILE.npz" in ran.output
    assert springtide("data", "ls", "--json").output == "[]\n"


def test_trouble_is_one_sentence_and_an_exit_code(springtide, sent):
    ran = springtide("data", "put", "clicks", "nowhere.npz")
    assert ran.exit_code == 2
    assert ran.output.splitlines() == [
        "there is no file 'nowhere.npz'; give arrays.npz, array.npy, arrays.safetensors or FILE.py:FACTORY"
    ]
    assert springtide("data", "put", "clicks", "a.npz", "--shard-size", "much").exit_code == 2
