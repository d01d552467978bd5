"""How a function's process comes to be: started from nothing, or forked from a warm template. And how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from springtide.backends.functions.emulator import cage
from springtide.backends.functions.emulator.template import ForkAnswer, ForkRequest
from springtide.core.decoding import decode_json
from springtide.core.errors import BackendError

_TEMPLATE_START_S = 120.0
_MAX_ANSWER_BYTES = 1 << 12


class FunctionProcess:
    """A process that leads its own session. `exited` is its exit code (a signal is negative) once it has ended."""

    def __init__(self, pid: int, exited: asyncio.Future[int]) -> None:
        self.pid = pid
        self.exited = exited

    def kill(self) -> None:
        """SIGKILL the process and its group, unless it has ended."""
        if self.exited.done():
            return
        # Until it leads its session, its process group does not exist.
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)


class FunctionLauncher(Protocol):
    """Starts function processes."""

    async def launch(self, request: ForkRequest, log: int) -> FunctionProcess:
        """Start a process whose output goes to the descriptor `log`. Raises BackendError."""
        ...

    async def close(self) -> None:
        """End the processes that only serve for launching."""
        ...


class PlainLauncher:
    """A new interpreter for each function: `python -m awslambdaric HANDLER`, as in a container image."""

    def __init__(self, python: str) -> None:
        self._python = python or sys.executable

    async def launch(self, request: ForkRequest, log: int) -> FunctionProcess:
        """Start one. Raises BackendError."""
        program = [self._python, "-m", "awslambdaric", request.handler]
        caged = [sys.executable, "-S", "-E", str(Path(cage.__file__)), str(os.getpid()), request.group_procs, *program]
        try:
            process = subprocess.Popen(
                caged,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=request.directory,
                env=request.environment,
                start_new_session=True,
            )
        except OSError as error:
            raise BackendError(f"a function's process cannot be started: {error}") from error
        return FunctionProcess(process.pid, _exit_of(process))

    async def close(self) -> None:
        """Nothing to do."""


def _exit_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """A future of the exit code, through a descriptor that turns readable when the process ends."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int] = loop.create_future()
    descriptor = os.pidfd_open(process.pid)

    def on_exit() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        code = process.wait()
        if not exited.done():
            exited.set_result(code)

    loop.add_reader(descriptor, on_exit)
    return exited


class TemplateLauncher:
    """Forks functions from one warm process, which is started with the first of them and again if it died."""

    def __init__(self, handler: str, preload: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._handler = handler
        self._preload = preload
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready: asyncio.Future[None] | None = None
        self._begun: dict[str, asyncio.Future[FunctionProcess]] = {}
        self._exits: dict[str, asyncio.Future[int]] = {}

    async def launch(self, request: ForkRequest, log: int) -> FunctionProcess:
        """Fork a function. Raises BackendError if the template cannot be started."""
        # Its copy is kept until it is sent: the caller closes its own.
        log = os.dup(log)
        try:
            channel = await self._warm_channel()
            loop = asyncio.get_running_loop()
            begun: asyncio.Future[FunctionProcess] = loop.create_future()
            self._begun[request.instance] = begun
            self._exits[request.instance] = loop.create_future()
            try:
                socket.send_fds(channel, [msgspec.json.encode(request)], [log])
            except OSError as error:
                self._begun.pop(request.instance), self._exits.pop(request.instance)
                raise BackendError(f"the warm template is gone: {error.strerror}") from error
        finally:
            os.close(log)
        return await begun

    async def warm_up(self) -> None:
        """Start the template and wait until it can fork. Raises BackendError."""
        await self._warm_channel()

    async def close(self) -> None:
        """End the template; functions that were forked from it die with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._on_hang_up()

    async def _warm_channel(self) -> socket.socket:
        if self._channel is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            program = [sys.executable, "-m", "springtide.backends.functions.emulator.template", str(theirs.fileno())]
            number = str(os.getpid())
            caged = [sys.executable, "-S", "-E", str(Path(cage.__file__)), number, ""]
            self._process = subprocess.Popen(
                [*caged, *program, self._handler, *self._preload],
                stdin=subprocess.DEVNULL,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            self._channel = ours
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            loop.add_reader(ours, self._on_readable)
        assert self._ready is not None
        channel = self._channel
        try:
            async with asyncio.timeout(_TEMPLATE_START_S):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            raise BackendError(f"the warm template took more than {_TEMPLATE_START_S:.0f} s to import") from error
        return channel

    def _on_readable(self) -> None:
        assert self._channel is not None
        try:
            data = self._channel.recv(_MAX_ANSWER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._on_hang_up()
            return
        answer = decode_json(data, ForkAnswer)
        if not answer.instance:
            assert self._ready is not None
            self._ready.set_result(None)
        elif answer.exit_code is not None:
            exited = self._exits.pop(answer.instance, None)
            if exited is not None and not exited.done():
                exited.set_result(answer.exit_code)
        else:
            process = FunctionProcess(answer.pid, self._exits[answer.instance])
            self._begun.pop(answer.instance).set_result(process)

    def _on_hang_up(self) -> None:
        """The template has died, and so have its children: fail pending launches, and report each child as killed."""
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.poll()
        gone = BackendError(f"the warm template could not import {self._handler} or died; its log says why")
        for waiting in (self._ready, *self._begun.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(gone)
        for exited in self._exits.values():
            if not exited.done():
                exited.set_result(-signal.SIGKILL)
        self._ready = None
        self._begun, self._exits = {}, {}
