"""Content encodings, and how much they may unpack to."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from springtide.service.gateway.compression import BadCompression, compressed, decompressed

PACK = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", PACK)
def test_a_body_is_unpacked_up_to_its_limit(encoding):
    body = PACK[encoding](b"x" * 1000)
    assert decompressed(body, encoding, 1000) == b"x" * 1000
    assert decompressed(body, encoding, 999) is None


def test_a_small_body_that_unpacks_to_very_much_takes_no_memory_for_it():
    bomb = zlib.compress(b"\0" * (64 << 20), 9)
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        assert decompressed(bomb, "deflate", 1 << 10) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", PACK)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: b"",
        lambda body: body[:-1],
        lambda body: body + b"x",
        lambda body: body + body,
        lambda body: b"{}",
        lambda body: body[:12] + b"\xff\xff" + body[14:],
    ],
)
def test_damaged_data_is_refused(encoding, spoil):
    with pytest.raises(BadCompression):
        decompressed(spoil(PACK[encoding](b"some text that is here")), encoding, 1 << 20)


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("GZIP;q=0.5, deflate", "gzip"),
        ("br, gzip", "gzip"),
        ("gzip;q=0, deflate;q=1.0", "deflate"),
        ("gzip; q=0.000", None),
        ("identity", None),
        ("*", None),
        ("", None),
    ],
)
def test_an_answer_is_packed_in_what_is_accepted(accepted, encoding):
    found = compressed(b"x" * 2000, accepted)
    if encoding is None:
        assert found is None
    else:
        assert found is not None
        assert found[0] == encoding
        assert decompressed(found[1], encoding, 2000) == b"x" * 2000
