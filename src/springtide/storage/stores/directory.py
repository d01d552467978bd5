"""Objects as files in one directory: complete or absent, and no temporary files left by killed writers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from springtide.core.errors import StorageError
from springtide.storage.files import make_private

# Folder names end with a character that no key contains, so that `a` and `a/b` can both be objects.
FOLDER_MARK = "+"
# Names of files that are not objects begin with a character that no key contains.
PRIVATE_MARK = "~"
_MAX_RACES = 100


class ObjectDirectory:
    """The files under `root`, which is created if missing. Keys must be valid (key_names.py). Thread- and process-safe.

    With `is_durable` objects also survive a power failure; otherwise they only outlive processes. With `is_remade` a
    root that was removed counts as an empty store; otherwise as an error.
    """

    def __init__(self, root: Path, *, is_durable: bool = False, is_remade: bool = False) -> None:
        self.root = root
        self._is_remade = is_remade
        self._is_durable = is_durable
        try:
            make_private(root)
        except OSError as error:
            raise StorageError(f"cannot make the store's directory {root}: {error.strerror}; name another") from error

    def path_of(self, key: str) -> str:
        *folders, name = key.split("/")
        return os.path.join(self.root, *(folder + FOLDER_MARK for folder in folders), name)

    def write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        """Write an object. Returns whether it was written. Raises StorageError; then the previous object stays."""
        path = self.path_of(key)
        if only_if_absent and os.path.exists(path):
            return False
        try:
            for _ in range(_MAX_RACES):
                try:
                    return self._write_once(path, data, only_if_absent=only_if_absent)
                except FileNotFoundError:
                    # The folder does not exist yet, or a concurrent delete removed it because it was empty.
                    self._check_root()
                    self._make_folder(os.path.dirname(path))
        except OSError as error:
            raise self._storage_error("write", key, error) from error
        raise StorageError(f"cannot write {key} in {self.root}: its folder is taken away again and again")

    def _check_root(self) -> None:
        if not self._is_remade and not self.root.is_dir():
            raise StorageError(f"the store's directory {self.root} is gone; make it again or name another")

    def _write_once(self, path: str, data: memoryview, *, only_if_absent: bool) -> bool:
        folder = os.path.dirname(path)
        descriptor, temporary = self._new_file(folder)
        try:
            _write_all(descriptor, data)
            if self._is_durable:
                os.fsync(descriptor)
            is_written = _publish(descriptor, temporary, path, only_if_absent=only_if_absent)
        finally:
            os.close(descriptor)
            if temporary:
                _discard(temporary)
        if is_written and self._is_durable:
            _make_durable(folder)
        return is_written

    def _make_folder(self, folder: str) -> None:
        """Create the folder and its parents. Concurrent deletes may remove empty ones meanwhile; the caller retries."""
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        while self._is_durable and folder != str(self.root):
            folder = os.path.dirname(folder)
            _make_durable(folder)

    def _new_file(self, folder: str) -> tuple[int, str]:
        """Open a file to write into; its descriptor and name. A file without a name disappears with its writer."""
        flags = os.O_WRONLY | os.O_CLOEXEC
        if hasattr(os, "O_TMPFILE"):
            try:
                return os.open(folder, flags | os.O_TMPFILE, 0o600), ""
            except OSError as error:
                # Some file systems return EPERM for a folder that is being removed; opening by name will tell.
                if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.EPERM}:
                    raise
        name = _private_name(folder)
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600), name

    def read(self, key: str) -> bytes | None:
        """An object's bytes, or None if there is no object. Raises StorageError."""
        try:
            with open(self.path_of(key), "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            self._check_root()
            return None
        except OSError as error:
            raise self._storage_error("read", key, error) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's lock, which is released even if its holder is killed. Raises StorageError."""
        try:
            descriptor = os.open(self.root / f"{PRIVATE_MARK}lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._storage_error("lock", "what is to be replaced", error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def holds(self, key: str) -> bool:
        """Whether the object exists; much cheaper than reading it."""
        return os.path.exists(self.path_of(key))

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects if they exist, and folders that become empty. Raises StorageError."""
        folders: set[str] = set()
        for key in keys:
            path = self.path_of(key)
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._storage_error("remove", key, error) from error
            folders.add(os.path.dirname(path))
        for folder in sorted(folders, key=len, reverse=True):
            self._prune(folder)

    def _prune(self, folder: str) -> None:
        while folder != str(self.root) and folder.endswith(FOLDER_MARK):
            try:
                os.rmdir(folder)
            except OSError:
                return
            folder = os.path.dirname(folder)

    def keys(self, prefix: str) -> list[str]:
        """The keys with this prefix. Scans only folders that can contain any. Raises StorageError."""
        self._check_root()
        *folders, _ = prefix.split("/")
        start = os.path.join(self.root, *(folder + FOLDER_MARK for folder in folders))
        parts = [folder + "/" for folder in folders]
        return [key for key in self._walk(start, "".join(parts)) if key.startswith(prefix)]

    def _walk(self, folder: str, before: str) -> Iterator[str]:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._storage_error("list", before, error) from error
        for entry in entries:
            if entry.name.startswith(PRIVATE_MARK):
                continue
            if entry.name.endswith(FOLDER_MARK):
                yield from self._walk(entry.path, f"{before}{entry.name.removesuffix(FOLDER_MARK)}/")
            else:
                yield before + entry.name

    def _storage_error(self, verb: str, key: str, error: OSError) -> StorageError:
        advice = {
            errno.ENOSPC: "free some space or name another directory",
            errno.EDQUOT: "free some space or name another directory",
            errno.EACCES: "its owner must let this user in",
            errno.EROFS: "name a directory that can be written",
        }.get(error.errno or 0, "look at that directory")
        return StorageError(f"cannot {verb} {key} in {self.root}: {error.strerror or error}; {advice}")


def _make_durable(folder: str) -> None:
    """Make a folder's entries durable, unless the folder was deleted meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _private_name(folder: str) -> str:
    return os.path.join(folder, PRIVATE_MARK + secrets.token_hex(8))


def _write_all(descriptor: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def _publish(descriptor: int, temporary: str, path: str, *, only_if_absent: bool) -> bool:
    """Give the written file its name atomically. Returns whether it got it."""
    try:
        _link(descriptor, temporary, path)
        return True
    except FileExistsError:
        if only_if_absent:
            return False
    if temporary:
        os.replace(temporary, path)
        return True
    second = _private_name(os.path.dirname(path))
    _link(descriptor, "", second)
    try:
        os.replace(second, path)
    except OSError:
        _discard(second)
        raise
    return True


def _discard(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _link(descriptor: int, temporary: str, path: str) -> None:
    if temporary:
        os.link(temporary, path)
    else:
        # Python follows the link only if `src_dir_fd` is given; the absolute path does not use it.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
