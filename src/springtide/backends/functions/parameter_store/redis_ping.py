"""Commands to a Redis without a client library: its access rules, and whether it answers."""

from __future__ import annotations

import hashlib
import socket
import ssl
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from springtide.core.errors import BackendError

_LONGEST_LINE = 4096
_LONGEST_ANSWER = 1 << 20
# Functions run users' code: it may put and get, but not change where the server writes, or end it.
_RULES = ("~*", "&*", "+@all", "-@admin", "-@dangerous", "+info")


class RedisRefusal(BackendError):
    """A Redis answered with an error of its own; the text begins with its code, as in `WRONGPASS ...`."""


def user_words(password: str) -> tuple[str, ...]:
    """The rule of the only user, for a configuration or a command line: the password's digest, not the password."""
    return ("user", "default", "on", f"#{hashlib.sha256(password.encode()).hexdigest()}", *_RULES)


def answers(url: str, timeout_s: float) -> bool:
    """Whether the Redis at a redis:// or rediss:// address accepts the login and answers in time; True for others."""
    if urlsplit(url).scheme not in ("redis", "rediss"):
        return True
    try:
        return ask(url, ["PING"], timeout_s) == "PONG"
    except (OSError, ValueError, RedisRefusal):
        return False


def ask(url: str, command: list[str], timeout_s: float) -> str:
    """The answer to one command. Raises RedisRefusal, and OSError or ValueError if no Redis answers."""
    parts = urlsplit(url)
    host = parts.hostname or "localhost"
    with socket.create_connection((host, parts.port or 6379), timeout=timeout_s) as plain:
        connection = plain
        if parts.scheme == "rediss":
            connection = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
        connection.settimeout(timeout_s)
        with connection.makefile("rb") as answers_in:
            if parts.password is not None:
                user = [unquote(parts.username)] if parts.username else []
                connection.sendall(_command(["AUTH", *user, unquote(parts.password)]))
                _answer(answers_in)
            connection.sendall(_command(command))
            return _answer(answers_in)


def _answer(lines: BinaryIO) -> str:
    """One answer in Redis's own protocol: a line, an error, or a string with its length before it."""
    line = lines.readline(_LONGEST_LINE)
    if not line.endswith(b"\r\n"):
        raise ValueError("the connection ended within an answer")
    kind, text = line[:1], line[1:-2].decode(errors="replace")
    if kind == b"-":
        raise RedisRefusal(text)
    if kind == b"+":
        return text
    if kind != b"$" or not text.isdecimal() or int(text) > _LONGEST_ANSWER:
        raise ValueError("what answers is no Redis")
    data = lines.read(int(text) + 2)
    if len(data) < int(text) + 2:
        raise ValueError("the connection ended within an answer")
    return data[:-2].decode(errors="replace")


def _command(words: list[str]) -> bytes:
    """A command in Redis's own protocol: an array of strings, each with its length before it."""
    encoded = [word.encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
