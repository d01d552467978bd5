"""Objects as files of one directory: whole or not there, never half, and no litter when a writer is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from springtide.core.errors import StorageError

# A folder carries a mark that no key has, so that `a` and `a/b` can both be objects, as in any object store.
FOLDER_MARK = "+"
# What is not an object begins with a sign that no key has.
PRIVATE_MARK = "~"
_MAX_RACES = 100


class ObjectDirectory:
    """The files under `root`, made if need be. Keys must be valid (key_names.py). Safe between threads and processes.

    With `is_durable` what was written survives a power cut, too; otherwise it survives every process. With `is_remade`
    a root that was taken away is an empty store; otherwise it is trouble.
    """

    def __init__(self, root: Path, *, is_durable: bool = False, is_remade: bool = False) -> None:
        self.root = root
        self._is_remade = is_remade
        self._is_durable = is_durable
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageError(f"cannot make the store's directory {root}: {error.strerror}; name another") from error

    def path_of(self, key: str) -> str:
        *folders, name = key.split("/")
        return os.path.join(self.root, *(folder + FOLDER_MARK for folder in folders), name)

    def write(self, key: str, data: memoryview, *, only_if_absent: bool) -> bool:
        """Make an object; whether it was written. Raises StorageError; then what was there still is."""
        path = self.path_of(key)
        if only_if_absent and os.path.exists(path):
            return False
        try:
            for _ in range(_MAX_RACES):
                try:
                    return self._write_once(path, data, only_if_absent=only_if_absent)
                except FileNotFoundError:
                    # The folder is not there yet, or a delete has just taken it away for being empty.
                    self._need_root()
                    self._make_folder(os.path.dirname(path))
        except OSError as error:
            raise self._trouble("write", key, error) from error
        raise StorageError(f"cannot write {key} in {self.root}: its folder is taken away again and again")

    def _need_root(self) -> None:
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
        """Make it as far as deletes let us: each of them takes away what it finds empty, also halfway up."""
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        while self._is_durable and folder != str(self.root):
            folder = os.path.dirname(folder)
            _make_durable(folder)

    def _new_file(self, folder: str) -> tuple[int, str]:
        """A file to write into, and its name; a file without a name, where there can be one, dies with its writer."""
        flags = os.O_WRONLY | os.O_CLOEXEC
        if hasattr(os, "O_TMPFILE"):
            try:
                return os.open(folder, flags | os.O_TMPFILE, 0o600), ""
            except OSError as error:
                # Some file systems say EPERM of a folder that is just being taken away: the name will tell.
                if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.EPERM}:
                    raise
        name = _private_name(folder)
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600), name

    def read(self, key: str) -> bytes | None:
        """An object's bytes, or None where there is none. Raises StorageError."""
        try:
            with open(self.path_of(key), "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            self._need_root()
            return None
        except OSError as error:
            raise self._trouble("read", key, error) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the store's one lock, which goes with its holder however that ends. Raises StorageError."""
        try:
            descriptor = os.open(self.root / f"{PRIVATE_MARK}lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._trouble("lock", "what is to be replaced", error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def holds(self, key: str) -> bool:
        """Whether the object is there; much cheaper than reading it."""
        return os.path.exists(self.path_of(key))

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects that are there, and folders that are empty then. Raises StorageError."""
        folders: set[str] = set()
        for key in keys:
            path = self.path_of(key)
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._trouble("remove", key, error) from error
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
        """The keys that begin so. Looks only into folders that can hold some. Raises StorageError."""
        self._need_root()
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
            raise self._trouble("list", before, error) from error
        for entry in entries:
            if entry.name.startswith(PRIVATE_MARK):
                continue
            if entry.name.endswith(FOLDER_MARK):
                yield from self._walk(entry.path, f"{before}{entry.name.removesuffix(FOLDER_MARK)}/")
            else:
                yield before + entry.name

    def _trouble(self, verb: str, key: str, error: OSError) -> StorageError:
        mend = {
            errno.ENOSPC: "free some space or name another directory",
            errno.EDQUOT: "free some space or name another directory",
            errno.EACCES: "its owner must let this user in",
            errno.EROFS: "name a directory that can be written",
        }.get(error.errno or 0, "look at that directory")
        return StorageError(f"cannot {verb} {key} in {self.root}: {error.strerror or error}; {mend}")


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
    """Give the written file its name, at once; whether it has got it."""
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
        # Only with a directory's descriptor does Python ask the system to follow the link; the path needs none.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
