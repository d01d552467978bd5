"""Whether user text is Python: found out in another process, since compiling alone can crash, freeze or fill one."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from springtide.core.decoding import decode_json
from springtide.core.errors import CapacityError, InvalidRequest

_SERVER = Path(__file__).with_name("compile_server.py")
_LENGTH = struct.Struct(">I")
# Each check takes at most some seconds; whoever would wait for longer than these is asked to come again.
MAX_WAITING = 8
RETRY_AFTER_S = 5.0
MAX_KEPT = 64


class SourceCheck:
    """Compiles user text in a small process, one request at a time. The process starts with the first request.

    It holds nothing of the platform and ends with it. If it is gone, the next request starts another one.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_WAITING)
        self._server: subprocess.Popen[bytes] | None = None
        # Of the last requests that were valid, by their digests: a quote and the submission ask for the same.
        self._identities: dict[str, str] = {}

    def check(self, files: Mapping[str, str], main: str = "", name: str = "") -> str:
        """Return the identity of the object `name` of the file `main` (code_identity.py); empty if it has none.

        `files` are texts by name. Raises InvalidRequest if a Python file is not valid, or if compiling them takes more
        than the limits on time and memory, and CapacityError if too many others wait to be checked.
        """
        if not files:
            return ""
        for path, text in files.items():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                kind = "Python" if path.endswith(".py") else "text"
                raise InvalidRequest(f"{path} is not valid {kind}: {error}") from None
        body = msgspec.json.encode({"files": files, "main": main, "object": name})
        digest = hashlib.sha256(body).hexdigest()
        with self._place():
            known = self._identities.get(digest)
            if known is not None:
                return known
            answer = self._ask(body)
        if "exceeded" in answer:
            names = ", ".join(sorted(files))
            raise InvalidRequest(
                f"{names:.200} could not be checked: compiling takes more than {answer['exceeded']}; generate such "
                "code at run time, or put the data in it into a file"
            )
        if answer["problem"]:
            raise InvalidRequest(answer["problem"])
        identity = answer.get("identity", "")
        with self._turn:
            self._identities[digest] = identity
            while len(self._identities) > MAX_KEPT:
                del self._identities[next(iter(self._identities))]
        return identity

    def close(self) -> None:
        """End the process."""
        with self._turn:
            self._drop()

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise CapacityError("too many sources are being checked; try again", retry_after_s=RETRY_AFTER_S)
        try:
            with self._turn:
                yield
        finally:
            self._places.release()

    def _ask(self, body: bytes) -> dict[str, str]:
        for is_last in (False, True):
            stdin, stdout = self._started()
            try:
                stdin.write(_LENGTH.pack(len(body)) + body)
                stdin.flush()
                head = stdout.read(_LENGTH.size)
                if len(head) == _LENGTH.size:
                    return decode_json(stdout.read(_LENGTH.unpack(head)[0]), dict[str, str])
            except (OSError, msgspec.DecodeError):
                pass
            self._drop()
            if is_last:
                break
        return {"exceeded": "what its process can take: it ended"}

    def _started(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._server is None or self._server.poll() is not None:
            self._drop()
            self._server = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        return self._server.stdin, self._server.stdout

    def _drop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.kill()
        server.wait()
        for stream in (server.stdin, server.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


SOURCES = SourceCheck()
atexit.register(SOURCES.close)
