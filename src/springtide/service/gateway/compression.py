"""The content encodings of HTTP bodies that the gateway takes and gives: gzip and deflate."""

from __future__ import annotations

import zlib

from springtide.core.errors import SpringtideError

# The format that zlib reads and writes: "deflate" in HTTP is zlib's own, not the bare stream.
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
# The answer waits for it, and a higher level makes tensors hardly smaller.
_LEVEL = 1


class BadCompression(SpringtideError):
    """The bytes are not what the Content-Encoding says."""


def decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes | None:
    """Decompress `body` up to `max_bytes`; None if there is more. Raises BadCompression."""
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        data = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise BadCompression(f"the body is not {encoding}, as its Content-Encoding says: {error}") from None
    if len(data) > max_bytes:
        return None
    if not decompressor.eof:
        raise BadCompression(f"the {encoding} data of the body ends too early; send all of it")
    if decompressor.unused_data:
        raise BadCompression(f"the body goes on after the end of its {encoding} data; compress it in one piece")
    return data


def compressed(body: bytes, accepted: str) -> tuple[str, bytes] | None:
    """The first encoding of an Accept-Encoding header that is known, and `body` in it; None without one."""
    for part in accepted.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in _WINDOW_BITS and weight.replace(" ", "").rstrip("0.") != "q=":
            compressor = zlib.compressobj(_LEVEL, wbits=_WINDOW_BITS[name.strip()])
            return name.strip(), compressor.compress(body) + compressor.flush()
    return None
