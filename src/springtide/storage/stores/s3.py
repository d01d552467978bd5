"""An object store behind any S3 API. Retries are made here, so that every request is counted."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec

from springtide.core.errors import InvalidRequest, StorageError
from springtide.storage.pacing import Intervals, PollInterval, real_pace
from springtide.storage.stores.request_count import RequestCount

Answer = TypeVar("Answer")

# A missed GET costs as much as a hit, which is the price of 12 ms of a function of 2 GB: so no shorter first pause.
S3_INTERVALS = Intervals(first_s=0.025, cap_s=1.0)
# Between attempts at a server that is busy or does not answer.
RETRY_INTERVALS = Intervals(first_s=0.1, cap_s=5.0, growth=2.0, jitter_fraction=1.0)
MAX_ATTEMPTS = 8
# S3's limit of one PUT; states and activations are far smaller.
MAX_PUT_BYTES = 5 << 30
# Files above this size are uploaded in parts of it, a few at a time.
PART_BYTES = 64 << 20
_PARTS_AT_ONCE = 4
_READ_BYTES = 4 << 20
# Error codes of a conditional write that failed because another writer was faster.
_CHANGED_CODES = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"})
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_BUSY_STATUS = frozenset({"408", "429", "500", "502", "503", "504"})
# With one of these variables the client finds the credentials of a container or a service account by itself.
_CREDENTIAL_VARIABLES = (
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)
# For each error code of a server, what it means and what the user can do.
_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "NoSuchBucket": "the bucket {bucket} does not exist at {endpoint}: make it, or name another in the store's URL",
        "InvalidBucketName": "{bucket} is no name of a bucket: name another in the store's URL",
        "InvalidAccessKeyId": "{endpoint} does not know the access key: set AWS_ACCESS_KEY_ID and its secret",
        "SignatureDoesNotMatch": "{endpoint} refuses the signature: AWS_SECRET_ACCESS_KEY does not belong to the key",
        "ExpiredToken": "the credentials for {endpoint} have expired: renew them and start again",
        "AccessDenied": "the credentials may not do this in the bucket {bucket} at {endpoint}: widen their policy",
        "PermanentRedirect": "the bucket {bucket} is in another region: give region=... in the store's URL",
        "AuthorizationHeaderMalformed": "the bucket {bucket} is in another region: give region=... in the store's URL",
        "EntityTooLarge": "the bucket {bucket} takes no object of this size: cut it into parts",
        "QuotaExceeded": "the bucket {bucket} is full: free some space",
    }
)


class S3Place(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a bucket. `endpoint` is empty for AWS; `style` is where URLs name it: path or virtual."""

    bucket: str
    prefix: str = ""
    endpoint: str = ""
    region: str = ""
    style: str = "path"
    is_plain_http_allowed: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidRequest for impossible values."""
        if _BUCKET.fullmatch(self.bucket) is None:
            raise InvalidRequest(f"{self.bucket!r} is no name of a bucket; the URL is s3://BUCKET/PREFIX?region=...")
        if self.style not in {"path", "virtual"}:
            raise InvalidRequest(f"style={self.style} must be path or virtual")
        if not self.endpoint:
            return
        parts = urlsplit(self.endpoint)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path not in {"", "/"}:
            raise InvalidRequest(f"endpoint={self.endpoint} must look like https://host:port")
        if self.is_unencrypted and not self.is_plain_http_allowed:
            raise InvalidRequest(
                f"endpoint={self.endpoint} is not encrypted; use https://, or add allow_http=true where the network "
                f"is trusted"
            )

    @property
    def is_unencrypted(self) -> bool:
        """Whether bytes leave this machine unencrypted."""
        parts = urlsplit(self.endpoint)
        return parts.scheme == "http" and parts.hostname not in LOOPBACK

    @property
    def host(self) -> str:
        """The endpoint for messages."""
        return self.endpoint or f"AWS{f' ({self.region})' if self.region else ''}"


def _client_of(place: S3Place, environment: Mapping[str, str]) -> Any:
    try:
        from obstore.store import S3Store as Client
    except ModuleNotFoundError:
        raise InvalidRequest("s3:// needs the obstore package: pip install 'springtide[functions]'") from None
    options: dict[str, Any] = {
        "prefix": place.prefix.strip("/") or None,
        "region": place.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1",
        # TLS (or loopback) protects the bytes already, and a digest would take four fifths of the CPU time of a put.
        "unsigned_payload": not place.is_unencrypted,
        # This module retries by itself, so that every retry is counted.
        "retry_config": {"max_retries": 0},
        "client_options": {
            "allow_http": place.endpoint.startswith("http://"),
            "connect_timeout": "5s",
            "read_timeout": "30s",
            "timeout": "600s",
        },
    }
    if place.endpoint:
        options["endpoint"] = place.endpoint.rstrip("/")
    if place.style == "virtual":
        options["virtual_hosted_style_request"] = True
        if place.endpoint:
            scheme, _, host = options["endpoint"].partition("://")
            options["endpoint"] = f"{scheme}://{place.bucket}.{host}"
    if environment.get("AWS_ACCESS_KEY_ID"):
        options["access_key_id"] = environment["AWS_ACCESS_KEY_ID"]
        options["secret_access_key"] = environment.get("AWS_SECRET_ACCESS_KEY", "")
        if environment.get("AWS_SESSION_TOKEN"):
            options["session_token"] = environment["AWS_SESSION_TOKEN"]
    elif not any(environment.get(name) for name in _CREDENTIAL_VARIABLES):
        options["credential_provider"] = _profile_credentials()
    return Client(place.bucket, **options)


def _profile_credentials() -> Any:
    advice = "there are no credentials for s3://: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError:
        raise InvalidRequest(advice) from None
    try:
        return Boto3CredentialProvider()
    except Exception as error:
        raise InvalidRequest(f"{advice} ({error})") from None


class S3Store:
    """The raw store of the objects under a prefix of a bucket."""

    def __init__(
        self,
        place: S3Place,
        *,
        pace: PollInterval | None = None,
        intervals: Intervals = S3_INTERVALS,
        retry_intervals: Intervals = RETRY_INTERVALS,
        max_attempts: int = MAX_ATTEMPTS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.title = f"the bucket {place.bucket} at {place.host}"
        self.max_object_bytes = MAX_PUT_BYTES
        self.part_bytes = PART_BYTES
        self.intervals = intervals
        self.pace = pace or real_pace()
        self.counts = RequestCount()
        self._place = place
        self._retry_intervals = retry_intervals
        self._max_attempts = max_attempts
        self._client = _client_of(place, os.environ if environment is None else environment)

    def write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        mode: Literal["create", "overwrite"] = "create" if only_if_absent else "overwrite"
        try:
            self._retried(
                lambda: obstore.put(self._client, key, data, mode=mode, use_multipart=False),
                lambda: self.counts.add(puts=1),
                f"write {key}",
                is_repeatable=not only_if_absent,
            )
        except AlreadyExistsError:
            return False
        return True

    def read(self, key: str) -> bytes | None:
        import obstore

        def read() -> bytes | None:
            try:
                return bytes(obstore.get(self._client, key).bytes())
            except FileNotFoundError as error:
                if _code_in(error) == "NoSuchBucket":
                    raise
                return None

        return self._retried(read, lambda: self.counts.add(gets=1, misses=1), f"read {key}")

    def read_version(self, key: str) -> tuple[bytes, str] | None:
        import obstore

        def read() -> tuple[bytes, str] | None:
            try:
                found = obstore.get(self._client, key)
            except FileNotFoundError as error:
                if _code_in(error) == "NoSuchBucket":
                    raise
                return None
            version = found.meta["e_tag"]
            if not version:
                raise StorageError(f"{self._place.host} names no versions (ETag) of objects: use another server")
            return bytes(found.bytes()), str(version)

        return self._retried(read, lambda: self.counts.add(gets=1, misses=1), f"read {key}")

    def replace(self, key: str, data: memoryview, version: str) -> str | None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def replace() -> str | None:
            mode: Any = {"e_tag": version} if version else "create"
            try:
                put = obstore.put(self._client, key, data, mode=mode, use_multipart=False)
            except (PreconditionError, AlreadyExistsError):
                return None
            except Exception as error:
                if _code_in(error) in _CHANGED_CODES:
                    return None
                raise
            return str(put["e_tag"])

        return self._retried(replace, lambda: self.counts.add(puts=1), f"replace {key}", is_repeatable=False)

    def upload(self, key: str, path: Path, num_bytes: int) -> None:
        """Write an object from a file in parts, a few at a time."""
        import obstore

        # One request per part, one to begin the upload and one to complete it.
        num_requests = -(-num_bytes // self.part_bytes) + 2
        self.counts.add(puts=num_requests)
        self._retried(
            lambda: obstore.put(
                self._client, key, path, use_multipart=True, chunk_size=self.part_bytes, max_concurrency=_PARTS_AT_ONCE
            ),
            lambda: self.counts.add(puts=num_requests),
            f"write {key}",
        )

    def download(self, key: str, path: Path) -> int | None:
        """Read an object into a file, part by part. Returns its number of bytes, or None if there is no object."""
        import obstore

        def read() -> int | None:
            try:
                stream = obstore.get(self._client, key).stream(min_chunk_size=_READ_BYTES)
            except FileNotFoundError as error:
                if _code_in(error) == "NoSuchBucket":
                    raise
                return None
            with path.open("wb") as file:
                return sum(file.write(part) for part in stream)

        return self._retried(read, lambda: self.counts.add(gets=1, misses=1), f"read {key}")

    def remove(self, keys: Sequence[str]) -> None:
        import obstore

        def remove() -> None:
            try:
                obstore.delete(self._client, list(keys))
            except FileNotFoundError as error:
                if _code_in(error) == "NoSuchBucket":
                    raise

        self._retried(remove, lambda: self.counts.add(deletes=1), f"remove {len(keys)} objects")

    def names(self, prefix: str) -> list[str]:
        import obstore

        # The client can only list whole folders.
        folder = prefix.rpartition("/")[0]

        def names() -> list[str]:
            pages = obstore.list(self._client, folder or None)
            return [str(entry["path"]) for page in pages for entry in page]

        return self._retried(names, lambda: self.counts.add(lists=1), f"list {prefix}")

    def close(self) -> None:
        return

    def _retried(
        self, ask: Callable[[], Answer], count_again: Callable[[], None], what: str, *, is_repeatable: bool = True
    ) -> Answer:
        """Send a request, and retry if the server is busy or unreachable. Raises StorageError with advice.

        A request that is not repeatable is retried only if the server answered that it was not executed.
        """
        from obstore.exceptions import AlreadyExistsError, BaseError

        pauses = self._retry_intervals.lengths(self.pace.draw)
        for attempt in range(1, self._max_attempts + 1):
            try:
                return ask()
            except AlreadyExistsError:
                raise
            except (BaseError, OSError) as error:
                is_refused = _is_busy(error)
                is_lost = _is_unreachable(error) and is_repeatable
                if attempt == self._max_attempts or not (is_refused or is_lost):
                    raise StorageError(f"cannot {what}: {self._reason(error, attempt)}") from error
            self.pace.sleep(next(pauses))
            count_again()
        raise AssertionError("the last attempt returns or raises")

    def _reason(self, error: Exception, attempts: int) -> str:
        place = self._place
        code = _code_in(error)
        if code in _ADVICE:
            return _ADVICE[code].format(bucket=place.bucket, endpoint=place.host)
        if _is_busy(error):
            return (
                f"{place.host} was too busy {attempts} times in a row ({code or _status_in(error)}): use fewer "
                f"functions or more prefixes, and go on later"
            )
        if _is_unreachable(error):
            return (
                f"{place.host} does not answer after {attempts} attempts: is the endpoint right and the network up? "
                f"({_short(error)})"
            )
        if _status_in(error) in {"401", "403"}:
            return _ADVICE["AccessDenied"].format(bucket=place.bucket, endpoint=place.host)
        if _status_in(error) == "404":
            return _ADVICE["NoSuchBucket"].format(bucket=place.bucket, endpoint=place.host)
        if "configured region" in str(error):
            return _ADVICE["PermanentRedirect"].format(bucket=place.bucket)
        if "credential" in str(error).lower():
            return f"there are no credentials for {place.host} that work: set AWS_ACCESS_KEY_ID and its secret"
        return f"{place.host} answered: {code or _short(error)}"


def _code_in(error: Exception) -> str:
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _status_in(error: Exception) -> str:
    found = _STATUS.search(str(error))
    return found[1] if found else ""


def _is_busy(error: Exception) -> bool:
    return _status_in(error) in _BUSY_STATUS or _code_in(error) in {"SlowDown", "ServiceUnavailable", "Throttling"}


def _is_unreachable(error: Exception) -> bool:
    return not _status_in(error) and "HTTP error" in str(error)


def _short(error: Exception) -> str:
    """The last part of the message's first line: the error without the URLs of the request."""
    text = str(error).partition("\n")[0].rpartition(" - ")[2]
    return re.sub(r"<[^>]*>", " ", text)[:200].strip()
