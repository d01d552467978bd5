"""The shared memory of a GPU's tenants: the layout that C has, and what is left of it when something goes wrong."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from springtide.backends.sharing.gpu import segments as layout
from springtide.backends.sharing.gpu.build import find_compiler
from springtide.backends.sharing.gpu.segments import (
    CLOSED,
    GRANT_FIELDS,
    HELLO_FIELDS,
    PROCESS_FIELDS,
    UNLIMITED,
    USAGE_FIELDS,
    WELCOME_FIELDS,
    Fields,
    Segments,
    adopt_segments,
    make_segments,
    offsets_of,
    segment_directory,
    struct_of,
)
from springtide.core.errors import BackendError

HEADER = Path(__file__).parents[4] / "native" / "include" / "springtide_share.h"
RECORDS: dict[str, Fields] = {
    "st_grant": GRANT_FIELDS,
    "st_process": PROCESS_FIELDS,
    "st_usage": USAGE_FIELDS,
    "st_hello": HELLO_FIELDS,
    "st_welcome": WELCOME_FIELDS,
}
CONSTANTS = {
    "ST_MAGIC": layout.MAGIC,
    "ST_LAYOUT": layout.LAYOUT,
    "ST_NUM_PROCESSES": layout.NUM_PROCESSES,
    "ST_NUM_CYCLES": layout.NUM_CYCLES,
    "ST_SEGMENT_BYTES": layout.SEGMENT_BYTES,
    "ST_UNLIMITED": layout.UNLIMITED,
    "ST_CLOSED": layout.CLOSED,
    "ST_OK": layout.OK,
    "ST_UNKNOWN": layout.UNKNOWN,
    "ST_FULL": layout.FULL,
    "ST_BAD": layout.BAD,
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    found = segment_directory(tmp_path)
    yield found
    for path in found.iterdir():
        path.unlink()
    found.rmdir()


def make(place: Path, name: str = "a", **changed: object) -> Segments:
    values = {
        "device_uuid": bytes(range(16)),
        "tenant": "w/r",
        "memory_limit_bytes": 5,
        "stale_after_ns": 6,
        "max_wait_ns": 7,
        "now_ns": 8,
    } | changed
    return make_segments(place, name, **values)  # type: ignore[arg-type]


def test_the_layout_is_that_of_the_header_field_by_field(tmp_path: Path) -> None:
    try:
        compiler = find_compiler()
    except BackendError as error:
        pytest.skip(str(error))
    lines = [f'    printf("{name} 0 %llu\\n", (unsigned long long){name});' for name in CONSTANTS]
    for record, fields in RECORDS.items():
        lines.append(f'    printf("{record} 0 %zu\\n", sizeof(struct {record}));')
        lines += [f'    printf("{record}.{name} %zu %zu\\n", offsetof(struct {record}, {name}), '
                  f"sizeof(((struct {record} *)0)->{name}));" for name, _ in fields]  # fmt: skip
    lines.append('    puts(ST_SOCKET_VARIABLE " 0 0");')
    source = tmp_path / "layout.c"
    text = "#include <stddef.h>\n#include <stdio.h>\n#include <springtide_share.h>\nint main(void) {\n"
    source.write_text(text + "\n".join(lines) + "\n    return 0;\n}\n")
    command = [str(compiler), "-std=gnu11", f"-I{HEADER.parent}", str(source), "-o", str(tmp_path / "layout")]
    subprocess.run(command, check=True)
    said = subprocess.run([str(tmp_path / "layout")], check=True, capture_output=True, text=True).stdout
    expected = [f"{name} 0 {value}" for name, value in CONSTANTS.items()]
    for record, fields in RECORDS.items():
        expected.append(f"{record} 0 {struct_of(fields).size}")
        offsets = offsets_of(fields)
        expected += [f"{record}.{name} {offsets[name]} {struct_of([(name, code)]).size}" for name, code in fields]
    expected.append(f"{layout.SOCKET_VARIABLE} 0 0")
    assert said.splitlines() == expected


def test_what_was_granted_never_falls_and_the_word_to_wake_by_rises_with_it(place: Path) -> None:
    segments = make(place)
    segments.write_tick(100, 50, 0, 500_000)
    segments.write_tick(101, 40, UNLIMITED, 1)
    grant = layout.GRANT.unpack(os.pread(segments.grant_descriptor, layout.GRANT.size, 0))
    assert grant[9:] == (101, 50, 1, UNLIMITED, 1)
    segments.write_tick(102, 1 << 70, 0, 0)
    assert segments.granted_ns < 1 << 63
    segments.close()


def test_files_are_found_again_as_they_were(place: Path) -> None:
    made = make(place)
    made.write_tick(100, 50, UNLIMITED, 3)
    made.occupy(3, 4711, 17)
    made.close()
    found = adopt_segments(place, "a")
    assert found is not None
    assert (found.segment_id, found.granted_ns, found.flags, found.heartbeat_ns) == (
        made.segment_id,
        50,
        UNLIMITED,
        100,
    )
    assert found.occupants() == {3: (4711, 17)}
    assert found.is_whole()
    found.clear(3)
    assert found.occupants() == {}
    found.close()


def test_a_dead_process_keeps_nobody_from_adding_up_memory(place: Path) -> None:
    segments = make(place)
    turn = offsets_of(USAGE_FIELDS)["memory_turn"]
    for holder, left in ((4, 0), (5, 5)):
        os.pwrite(segments.usage_descriptor, holder.to_bytes(8, "little"), turn)
        segments.clear(3)
        assert int.from_bytes(os.pread(segments.usage_descriptor, 8, turn), "little") == left
    segments.close()


def test_given_up_files_are_closed_open_to_everybody_and_gone(place: Path) -> None:
    segments = make(place)
    kept = os.dup(segments.grant_descriptor)
    segments.give_up(200)
    assert list(place.iterdir()) == []
    grant = layout.GRANT.unpack(os.pread(kept, layout.GRANT.size, 0))
    assert grant[12] == UNLIMITED | CLOSED
    assert grant[10] > 1 << 61
    os.close(kept)


@pytest.mark.parametrize("suffix", ["grant", "usage"])
@pytest.mark.parametrize("damage", ["short", "gone", "magic", "another"])
def test_files_that_are_not_whole_are_not_taken_over(place: Path, suffix: str, damage: str) -> None:
    segments = make(place)
    path = place / f"a.{suffix}"
    if damage == "short":
        os.truncate(path, 100)
    elif damage == "gone":
        path.unlink()
    elif damage == "magic":
        path.write_bytes(b"x" + path.read_bytes()[1:])
    else:
        make(place, "b").close()
        (place / f"b.{suffix}").rename(path)
    assert segments.is_whole() == (damage == "magic")
    segments.close()
    num_files = len(os.listdir("/proc/self/fd"))
    assert adopt_segments(place, "a") is None
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_closed_files_are_not_taken_over(place: Path) -> None:
    segments = make(place)
    segments.write_tick(1, 1, CLOSED, 0)
    segments.close()
    assert adopt_segments(place, "a") is None


def test_a_file_cut_short_says_nothing_and_ends_nobody(place: Path) -> None:
    segments = make(place)
    for suffix in ("grant", "usage"):
        os.truncate(place / f"a.{suffix}", 0)
    assert segments.read() is None
    assert segments.occupants() == {}
    segments.wake()
    segments.write_tick(1, 2, 0, 3)
    assert not segments.is_whole()
    segments.close()


def test_a_name_of_any_length_fits(place: Path) -> None:
    segments = make(place, tenant="é" * 100)
    text = layout.GRANT.unpack(os.pread(segments.grant_descriptor, layout.GRANT.size, 0))[4]
    assert text.rstrip(b"\0").decode() == "é" * 31
    segments.close()


def test_a_directory_of_another_user_is_refused(tmp_path: Path, place: Path) -> None:
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(BackendError, match="belongs to another user"):
        segment_directory(tmp_path)
    place.unlink()
    place.mkdir()
