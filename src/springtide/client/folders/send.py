"""Sending the folder of a job or a service: the platform says which contents it lacks; those are sent first."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from springtide.client.folders.choice import FolderWish, chosen_folder
from springtide.client.folders.hashing import hash_files
from springtide.client.folders.scan import OWN_IGNORE, FoundFile, FoundFolder, scan
from springtide.client.sources.source import SentFolder, SourceFile
from springtide.core.errors import Conflict, InvalidRequest
from springtide.core.quantities import format_bytes
from springtide.core.status.platform import JobStatus, ServiceStatus
from springtide.storage.folders.contents import write_archive
from springtide.storage.folders.tree import FolderFile, FolderTree, check_amount, encode_tree, largest

if TYPE_CHECKING:
    from springtide.client.api import Client

# Files up to the first size are sent many in one body, of at most the second one.
_SMALL_BYTES = 1 << 20
_BODY_BYTES = 8 << 20
_SEND_TIMEOUT_S = 300.0
_TELL_EVERY_S = 1.0
_ATTEMPTS = 3
_ADVICE = f"; leave files out in {OWN_IGNORE}, or name another folder with --folder, or none with --no-folder"

Tell = Callable[[str], None]
StatusT = TypeVar("StatusT")


class _Changed(Exception):
    """A file has changed since it was hashed."""


@dataclass(frozen=True, slots=True)
class _Hashed:
    """A folder with the digests of its files, and where each is; None where the content is `main`."""

    tree: FolderTree
    places: dict[str, FoundFile]
    main: tuple[str, bytes]

    def read(self, file: FolderFile) -> bytes:
        """The content. Raises _Changed if it is not the one that was hashed."""
        if file.path == self.main[0]:
            return self.main[1]
        try:
            data = Path(self.places[file.path].location).read_bytes()
        except OSError:
            raise _Changed(file.path) from None
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise _Changed(file.path)
        return data


def submit_with_folder(
    client: Client, request: dict[str, Any], wish: FolderWish = None, on_progress: Tell = lambda line: None
) -> JobStatus:
    """Send the folder of the request's source as far as the platform lacks it, then submit the job.

    `request` holds the keyword arguments of Client.submit_job; `wish` is as for `chosen_folder`. Lines about what
    travels, and about what takes longer than a second, are passed to `on_progress`. Raises like Client.submit_job, and
    InvalidRequest for a folder that is too large.
    """
    return _with_folder(client, request["source"], partial(client.submit_job, **request), wish, on_progress, "job")


def deploy_with_folder(
    client: Client, request: dict[str, Any], wish: FolderWish = None, on_progress: Tell = lambda line: None
) -> ServiceStatus:
    """Send the folder, then deploy the service: as submit_with_folder, with the arguments of Client.deploy_service."""
    ask = partial(client.deploy_service, **request)
    return _with_folder(client, request["source"], ask, wish, on_progress, "service")


def _with_folder(
    client: Client,
    source: SourceFile,
    ask: Callable[..., StatusT],
    wish: FolderWish,
    on_progress: Tell,
    what: str,
) -> StatusT:
    """Call `ask`, with the folder as its keyword `folder` if one travels, which the platform has then."""
    chosen = _found_folder(source, wish, on_progress, f"the {what}")
    if chosen is None:
        return ask()
    folder, path, found = chosen
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            sent, _ = _send(client, folder, path, source.text, found, on_progress)
            return ask(folder=sent)
        except _Changed as changed:
            if attempt == _ATTEMPTS:
                raise InvalidRequest(
                    f"{changed} in {folder} changes while it is sent; leave it out with a line in {OWN_IGNORE}"
                ) from None
        except Conflict:
            # Contents that were not used for long are removed, which may have happened in between.
            if attempt == _ATTEMPTS or not _send(client, folder, path, source.text, found, on_progress)[1]:
                raise
        found = scan(folder, path)
    raise AssertionError("the last attempt returns or raises")


def pack_folder(
    source: SourceFile, wish: FolderWish, path: Path, *, max_bytes: int, on_progress: Tell
) -> SentFolder | None:
    """Write the archive of the folder that travels with a source to `path`; None, and no archive, if none travels.

    Arguments as for submit_with_folder. Raises InvalidRequest, also for an archive of more than `max_bytes`.
    """
    chosen = _found_folder(source, wish, on_progress, "it")
    if chosen is None:
        return None
    folder, main, found = chosen
    try:
        tree = _pack(_hash(folder, main, source.text, found, _Progress(on_progress)), path, max_bytes)
    except _Changed as changed:
        raise InvalidRequest(f"{changed} in {folder} changed while it was read; try again") from None
    if path.stat().st_size > max_bytes:
        sizes = {file.path: file.num_bytes for file in tree.files}
        raise InvalidRequest(
            f"{folder} has more than {format_bytes(max_bytes)} when it is compressed, and objects of a cluster take no "
            f"more; the largest: {largest(sizes)}{_ADVICE}, or submit it over the platform's REST API"
        )
    sha256 = encode_tree(tree)[0]
    return SentFolder(sha256=sha256, path=main, directory=_working_directory(folder), origin=str(folder))


def _pack(hashed: _Hashed, path: Path, max_bytes: int) -> FolderTree:
    by_digest = {file.sha256: file for file in hashed.tree.files}
    write_archive(lambda sha256: BytesIO(hashed.read(by_digest[sha256])), hashed.tree, path, max_bytes=max_bytes)
    return hashed.tree


def _found_folder(
    source: SourceFile, wish: FolderWish, on_progress: Tell, what: str
) -> tuple[Path, str, FoundFolder] | None:
    """The folder that travels with a source, the source's path in it, and its files; None if none travels."""
    location = source.location
    folder = None if location is None else chosen_folder(location, source.text, wish)
    if location is None or folder is None:
        if location is not None and wish is None:
            on_progress(f"{location.name} travels alone: {location.parent} holds too much; --folder names a folder")
        return None
    path = location.relative_to(folder).as_posix()
    found = scan(folder, path)
    files = (0 if file.path == path else file.stat.st_size for file in found.files)
    on_progress(f"{folder} travels with {what}: {_amount(len(found.files), sum(files) + len(source.text))}")
    for note in found.notes():
        on_progress(f"  {note}")
    return folder, path, found


def _send(
    client: Client, folder: Path, path: str, text: str, found: FoundFolder, on_progress: Tell
) -> tuple[SentFolder, int]:
    """Send what the platform lacks of a folder; returns it and how many contents were sent. Raises _Changed."""
    progress = _Progress(on_progress)
    hashed = _hash(folder, path, text, found, progress)
    sha256, listed = encode_tree(hashed.tree)
    digests = [sha256, *dict.fromkeys(file.sha256 for file in hashed.tree.files)]
    answer = client.request(
        "POST", "/v1/missing-contents", dict[str, list[str]], body={"sha256": digests}, timeout_s=_SEND_TIMEOUT_S
    )
    missing = set(answer["missing"])
    by_digest = {file.sha256: file for file in hashed.tree.files if file.sha256 in missing}
    progress.begin("sent", sum(file.num_bytes for file in by_digest.values()))
    for body in _bodies(hashed, list(by_digest.values())):
        _put(client, body)
        progress.add(sum(map(len, body.values())))
    if sha256 in missing:
        # The list comes last: with it the platform has the whole folder.
        _put(client, {sha256: listed})
    return SentFolder(sha256=sha256, path=path, directory=_working_directory(folder), origin=str(folder)), len(missing)


def _hash(folder: Path, path: str, text: str, found: FoundFolder, progress: _Progress) -> _Hashed:
    """The folder with the digests of its files. Raises InvalidRequest for more than may travel."""
    check_amount(((file.path, file.stat.st_size) for file in found.files), advice=_ADVICE)
    progress.begin("read", sum(file.stat.st_size for file in found.files))
    main = text.encode()
    files = hash_files(folder, (file for file in found.files if file.path != path), progress.add)
    mode = next((file.stat.st_mode for file in found.files if file.path == path), 0)
    # The file itself is sent as it was read at first, whatever it holds by now.
    files.append(FolderFile(path, hashlib.sha256(main).hexdigest(), len(main), bool(mode & 0o100)))
    files.sort(key=lambda file: file.path)
    tree = FolderTree(tuple(files), tuple(found.folders))
    return _Hashed(tree, {file.path: file for file in found.files}, (path, main))


def _bodies(hashed: _Hashed, files: list[FolderFile]) -> Iterator[dict[str, bytes]]:
    """The contents in bodies: large ones alone, small ones together."""
    body, num_bytes = dict[str, bytes](), 0
    for file in files:
        if file.num_bytes > _SMALL_BYTES:
            yield {file.sha256: hashed.read(file)}
            continue
        if num_bytes + file.num_bytes > _BODY_BYTES:
            yield body
            body, num_bytes = {}, 0
        body[file.sha256] = hashed.read(file)
        num_bytes += file.num_bytes
    if body:
        yield body


def _put(client: Client, body: dict[str, bytes]) -> None:
    if len(body) == 1:
        [(sha256, data)] = body.items()
        client.request("PUT", f"/v1/contents/{sha256}", dict[str, int], body=data, timeout_s=_SEND_TIMEOUT_S)
        return
    packed = msgspec.msgpack.encode(body)
    client.request("POST", "/v1/contents", dict[str, int], body=packed, timeout_s=_SEND_TIMEOUT_S)


def _working_directory(folder: Path) -> str:
    """The place in the folder where this process works; empty for the folder itself, or outside of it."""
    try:
        here = Path(os.getcwd())
    except FileNotFoundError:
        return ""
    return here.relative_to(folder).as_posix() if here != folder and here.is_relative_to(folder) else ""


def _amount(num_files: int, num_bytes: int) -> str:
    return f"{num_files:,} file{'' if num_files == 1 else 's'}, {format_bytes(num_bytes)}"


class _Progress:
    """Tells how far it has come, once a second, from the first second on."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._verb, self._total, self._done = "", 0, 0
        self._told_s = time.monotonic()

    def begin(self, verb: str, total_bytes: int) -> None:
        """Begin to count what is "read" or "sent"."""
        self._verb, self._total, self._done = verb, total_bytes, 0

    def add(self, num_bytes: int) -> None:
        """Count bytes, and tell how many there are if the last line was a second ago."""
        self._done += num_bytes
        if time.monotonic() - self._told_s >= _TELL_EVERY_S:
            self._told_s = time.monotonic()
            self._tell(f"  {self._verb} {format_bytes(self._done)} of {format_bytes(self._total)}")
