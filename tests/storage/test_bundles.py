"""Bundles are the same bytes for the same files; a hostile one writes nothing at all."""

from __future__ import annotations

import io
import os
import stat
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import InvalidRequest, StorageError
from springtide.storage.bundles import BundleLimits, pack, unpack


def zip_of(*entries, method=zipfile.ZIP_DEFLATED):
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return target.getvalue()


def entry(name, mode):
    made = zipfile.ZipInfo(name)
    made.create_system = 3
    made.external_attr = mode << 16
    return made


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace("__SLASH__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_file_alone_comes_back_as_it_was(tmp_path):
    paths = unpack(pack("train.py", "x = 'ä'\n"), tmp_path / "code")
    assert paths == [tmp_path / "code" / "train.py"]
    assert contents(tmp_path / "code") == {"train.py": "x = 'ä'\n"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["code"]


def test_neighbours_come_along_and_private_files_stay(tmp_path):
    root = tmp_path / "project"
    for name in (
        "train.py", "blocks.py", "deep/er/cells.py", "deep/__init__.py", "sizes.json", "weights.bin", ".env",
        ".git/config.py", "__pycache__/blocks.py", "venv/lib/python/site.py", ".venv/other.py", "node_modules/x.json",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}")
    (root / "venv" / "pyvenv.cfg").write_text("home = /usr")
    (root / "linked.py").symlink_to(root / "blocks.py")
    (tmp_path / "secret.py").write_text("secret")
    (root / "outside.py").symlink_to(tmp_path / "secret.py")
    (root / "loop").symlink_to(root)
    unpack(pack("train.py", "# as it was at submission", root), tmp_path / "code")
    assert contents(tmp_path / "code") == {
        "train.py": "# as it was at submission",
        "blocks.py": "# blocks.py",
        "linked.py": "# blocks.py",
        "deep/__init__.py": "# deep/__init__.py",
        "deep/er/cells.py": "# deep/er/cells.py",
        "sizes.json": "# sizes.json",
    }


def test_the_same_files_make_the_same_bytes_whatever_their_times_and_order(tmp_path):
    bundles = []
    for number, names in enumerate((("a.py", "b.py"), ("b.py", "a.py"))):
        root = tmp_path / str(number)
        root.mkdir()
        for name in names:
            (root / name).write_text(name)
            os.utime(root / name, (number * 1e9, number * 1e9))
            (root / name).chmod(0o600 if number else 0o755)
        bundles.append(pack("main.py", "pass", root))
    assert bundles[0] == bundles[1]
    assert pack("main.py", "other", tmp_path / "0") != bundles[0]


def test_too_much_to_ship_is_said_with_what_to_do(tmp_path):
    for number in range(5):
        (tmp_path / f"m{number}.py").write_text("x" * 100)
    with pytest.raises(InvalidRequest, match=r"over 3 files to ship; move main\.py into a folder"):
        pack("main.py", "pass", tmp_path, BundleLimits(max_files=3))
    with pytest.raises(InvalidRequest, match=r"over 300 bytes to ship; move main\.py"):
        pack("main.py", "pass", tmp_path, BundleLimits(max_bytes=300))
    with pytest.raises(InvalidRequest, match="over 3 bytes"):
        pack("main.py", "pass", None, BundleLimits(max_bytes=3))
    with pytest.raises(InvalidRequest, match="is no directory"):
        pack("main.py", "pass", tmp_path / "nowhere")
    for name in ("/etc/passwd", "../main.py", "", "a//b.py", "a\\b.py"):
        with pytest.raises(InvalidRequest, match="cannot be shipped"):
            pack(name, "pass")


ENCRYPTED = bytearray(zip_of(("a.py", "1")))
ENCRYPTED[6] |= 1
ENCRYPTED[ENCRYPTED.index(b"PK\x01\x02") + 8] |= 1
LYING = zip_of(("a.py", bytes(100_000)))
HOSTILE = {
    "a path outside": (zip_of(("ok.py", "1"), ("../evil.py", "1")), "outside its root"),
    "a path outside, deeper": (zip_of(("a/../../evil.py", "1")), "outside its root"),
    "an absolute path": (zip_of(("/tmp/evil.py", "1")), "must be relative"),
    "a path of another system": (zip_of((entry("a\\..\\evil.py", 0o100644), "1")), "forward slashes"),
    "a drive": (zip_of(("c:/evil.py", "1")), "must be relative"),
    "a link": (zip_of((entry("link", stat.S_IFLNK | 0o777), "/etc/passwd")), "it is a link"),
    "a device": (zip_of((entry("pipe", stat.S_IFIFO | 0o777), "")), "it is a link or a device"),
    "a folder": (zip_of((entry("folder/", stat.S_IFDIR | 0o777), "")), "empty part"),
    "the same path twice": (zip_of(("a.py", "1"), ("b.py", "2")).replace(b"b.py", b"a.py"), "names a path twice"),
    "a file that is a folder": (zip_of(("a", "1"), ("a/b", "2")), "names a path twice"),
    "an unprintable name": (zip_of(("a\x1b[2J.py", "1")), "cannot be printed"),
    "a long name": (zip_of(("a" * 600, "1")), "too long"),
    "a bomb": (zip_of(("zeros", bytes(50_000_000))), "refused"),
    "many files": (zip_of(*((f"f{number}", "") for number in range(40))), "40 files is over the limit of 30"),
    "a size that lies": (LYING.replace((100_000).to_bytes(4, "little"), (10).to_bytes(4, "little")), "broken|refused"),
    "another size": (bytes(1_000_000), "over the limit"),
    "no zip": (b"hello", "broken"),
    "nothing": (b"", "broken"),
    "half a zip": (zip_of(("a.py", "1" * 1000))[:-30], "broken"),
    "damaged content": (zip_of(("a.py", "12345"), method=zipfile.ZIP_STORED).replace(b"12345", b"12346"), "broken"),
    "a password": (bytes(ENCRYPTED), "broken"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_bundle_is_one_sentence_and_writes_nothing(what, tmp_path):
    data, words = HOSTILE[what]
    inside = tmp_path / "deep" / "inside"
    inside.mkdir(parents=True)
    with pytest.raises(StorageError, match=words) as caught:
        unpack(data, inside / "code", BundleLimits(max_bytes=200_000, max_files=30))
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path != inside and path != inside.parent] == []


def test_what_is_there_already_is_not_overwritten(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text("mine")
    with pytest.raises(StorageError, match="cannot unpack the bundle"):
        unpack(pack("train.py", "pass"), tmp_path / "code")
    assert contents(tmp_path) == {"code/mine.py": "mine"}


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_bundle_unpacks_or_is_a_storage_error(tmp_path_factory, position, value):
    data = bytearray(pack("train.py", "pass\n" * 50))
    data[position % len(data)] = value
    folder = tmp_path_factory.mktemp("damaged")
    try:
        unpack(bytes(data), folder / "code")
    except StorageError:
        assert list(folder.iterdir()) == []
