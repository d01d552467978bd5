"""Opens the store that a URL names. Each kind of store is imported only when it is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit, urlunsplit

from springtide.core.errors import InvalidRequest
from springtide.storage.key_names import checked_key
from springtide.storage.stores.checked import CheckedStore

STORE_FORMS = (
    "memory://NAME, file:///absolute/path, s3://BUCKET/PREFIX?region=..., shm://NAME, redis://HOST:PORT/NUMBER"
)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


def open_store(url: str, environment: Mapping[str, str] | None = None) -> CheckedStore:
    """Open the store that a URL names. Raises InvalidRequest for an invalid URL, StorageError if it cannot be opened.

    `environment` holds the credentials of an object store (None: this process's own). Schemes: memory (one process),
    file (a directory), s3 (any S3 API), shm (shared memory of one machine), redis and rediss. docs/storage.md lists
    their options.
    """
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise InvalidRequest(f"a store's URL must look like one of: {STORE_FORMS}") from None
    if parts.scheme == "memory":
        _options_of(options, parts)
        return memory_store(_name(parts))
    if parts.scheme == "file":
        from springtide.storage.stores.files import FileStore

        (durable,) = _options_of(options, parts, "durable")
        return CheckedStore(FileStore(_path(parts), is_durable=_flag(durable)))
    if parts.scheme == "shm":
        from springtide.storage.stores.shared_memory import SharedMemoryStore

        _options_of(options, parts)
        return CheckedStore(SharedMemoryStore(_name(parts)))
    if parts.scheme == "s3":
        return _open_s3(parts, options, environment)
    if parts.scheme in {"redis", "rediss"}:
        return _open_redis(parts, options)
    raise InvalidRequest(f"no store has the scheme {parts.scheme!r}; a store's URL is one of: {STORE_FORMS}")


def memory_store(name: str = "") -> CheckedStore:
    """The store of that name in this process; without a name, a new private one."""
    from springtide.storage.stores.memory import MemoryStore

    return CheckedStore(MemoryStore(name))


def _open_s3(parts: SplitResult, options: dict[str, str], environment: Mapping[str, str] | None) -> CheckedStore:
    from springtide.storage.stores.s3 import S3Place, S3Store

    endpoint, region, style, allow_http = _options_of(options, parts, "endpoint", "region", "style", "allow_http")
    prefix = parts.path.strip("/")
    if prefix:
        checked_key(prefix)
    place = S3Place(
        bucket=parts.netloc,
        prefix=prefix,
        endpoint=endpoint,
        region=region,
        style=style or "path",
        is_plain_http_allowed=_flag(allow_http),
    )
    return CheckedStore(S3Store(place, environment=environment))


def _open_redis(parts: SplitResult, options: dict[str, str]) -> CheckedStore:
    from springtide.storage.stores.redis import RedisStore

    (name,) = _options_of(options, parts, "name")
    if re.fullmatch(r"/?\d{0,5}", parts.path) is None:
        raise InvalidRequest(f"{parts.scheme}:// ends with the number of a database, as in redis://host:6379/0")
    url = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    return CheckedStore(RedisStore(url, name=name or "springtide"))


def _flag(text: str) -> bool:
    if text.lower() not in {"", "0", "1", "false", "true", "no", "yes"}:
        raise InvalidRequest(f"{text!r} must be true or false")
    return text.lower() in {"1", "true", "yes"}


def _options_of(options: dict[str, str], parts: SplitResult, *names: str) -> list[str]:
    """The values of these options, "" for missing ones. Raises InvalidRequest for any other option."""
    unknown = sorted(set(options) - set(names))
    if unknown:
        known = f"it takes {', '.join(names)}" if names else "it takes none"
        raise InvalidRequest(f"{parts.scheme}:// has no option {', '.join(unknown)}; {known}")
    return [options.get(name, "") for name in names]


def _name(parts: SplitResult) -> str:
    name = parts.netloc + parts.path.rstrip("/")
    if _NAME.fullmatch(name) is None or name in {".", ".."}:
        raise InvalidRequest(
            f"{parts.scheme}:// needs a name of at most 64 letters, digits, '.', '_' or '-', as in "
            f"{parts.scheme}://wire; this one is {name!r}"
        )
    return name


def _path(parts: SplitResult) -> Path:
    path = Path(unquote(parts.path))
    if parts.netloc not in {"", "localhost"} or not path.is_absolute() or path == Path("/"):
        raise InvalidRequest("file:// needs an absolute path with three slashes, as in file:///var/springtide/objects")
    return path
