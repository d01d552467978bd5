"""What is told a Redis and asked of it without a client library: who may do what, and whether it answers."""

from __future__ import annotations

import hashlib
import socket
import ssl
from urllib.parse import unquote, urlsplit

_LONGEST_ANSWER = 4096
# Functions run users' code: it may put and get, but not change where the server writes, or end it.
_RULES = ("~*", "&*", "+@all", "-@admin", "-@dangerous", "+info")


def user_words(password: str) -> tuple[str, ...]:
    """The rule of the only user, for a configuration or a command line: the password's digest, not the password."""
    return ("user", "default", "on", f"#{hashlib.sha256(password.encode()).hexdigest()}", *_RULES)


def answers(url: str, timeout_s: float) -> bool:
    """Whether the Redis of a redis:// or rediss:// address lets us in and answers in time; other stores always do."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss"):
        return True
    words = [["PING"]]
    if parts.password is not None:
        words.insert(0, ["AUTH", *([unquote(parts.username)] if parts.username else []), unquote(parts.password)])
    try:
        host = parts.hostname or "localhost"
        with socket.create_connection((host, parts.port or 6379), timeout=timeout_s) as plain:
            connection = plain
            if parts.scheme == "rediss":
                connection = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            connection.settimeout(timeout_s)
            connection.sendall(b"".join(map(_command, words)))
            answer = b""
            while answer.count(b"\r\n") < len(words) and len(answer) < _LONGEST_ANSWER:
                piece = connection.recv(_LONGEST_ANSWER)
                if not piece:
                    return False
                answer += piece
    except (OSError, ValueError):
        return False
    return answer.endswith(b"+PONG\r\n") and b"-" not in answer[:1]


def _command(words: list[str]) -> bytes:
    """A command in Redis's own protocol: an array of strings, each with its length before it."""
    encoded = [word.encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
