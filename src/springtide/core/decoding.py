"""Decoding into declared types, the first time in any thread.

msgspec 0.22 collects what it knows of a Struct when the type is first decoded, and crashes the process (SIGSEGV) if a
second thread decodes the type meanwhile: it reads the half-filled table. So a decoder is made under one lock and kept.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")
Hook = Callable[[type, Any], Any]
_MAKING = threading.Lock()
_json_decoder = functools.cache(msgspec.json.Decoder)
_msgpack_decoder = functools.cache(msgspec.msgpack.Decoder)


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type. It is kept for good: not for types that are made while the process runs."""
    with _MAKING:
        return cast("msgspec.json.Decoder[T]", _json_decoder(kind))  # type: ignore[arg-type]


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """The decoder of a type. It is kept for good: not for types that are made while the process runs."""
    with _MAKING:
        return cast("msgspec.msgpack.Decoder[T]", _msgpack_decoder(kind))  # type: ignore[arg-type]


def decode_json(data: bytes | memoryview | str, kind: type[T]) -> T:
    """Raises msgspec.MsgspecError, and UnicodeDecodeError for text that is no UTF-8."""
    return json_decoder(kind).decode(data)


def decode_msgpack(data: bytes | memoryview, kind: type[T], *, dec_hook: Hook | None = None) -> T:
    """Raises msgspec.MsgspecError, and UnicodeDecodeError for text that is no UTF-8."""
    decoder = msgpack_decoder(kind)
    return decoder.decode(data) if dec_hook is None else msgspec.msgpack.decode(data, type=kind, dec_hook=dec_hook)


def convert(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """A value of plain types, as msgspec.convert does it. Raises msgspec.ValidationError."""
    json_decoder(kind)
    return msgspec.convert(value, kind, strict=strict)


def decoder_of_made_type(kind: Any, dec_hook: Hook | None = None) -> msgspec.json.Decoder[Any]:
    """A decoder of a type that was made while the process runs, which the caller keeps."""
    with _MAKING:
        return msgspec.json.Decoder(kind, dec_hook=dec_hook)
