"""A warm process that has imported the handler, and forks functions: what a service's start from a snapshot is like.

Single-threaded, without a socket but its control channel, and never any user code: see `runtime.zygote`, whose rules
hold here, too. Run as `python -m springtide.backends.functions.emulator.template FD HANDLER [MODULE...]`.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from typing import Any

import msgspec

from springtide.backends.functions.emulator.cage import EXIT_NOT_CAGED, enter
from springtide.core.decoding import decode_json

_MAX_REQUEST_BYTES = 1 << 17
_POLL_S = 5.0


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A function to fork: what it is called by, its environment, where it works, its CPU group, its threads."""

    instance: str
    environment: dict[str, str]
    directory: str
    group_procs: str
    handler: str
    num_threads: int


class ForkAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`pid` runs; or, with an `exit_code`, it has ended."""

    instance: str
    pid: int
    exit_code: int | None = None


def main(arguments: list[str]) -> int:
    """Import everything, report that by one empty answer, then fork until the emulator closes the channel."""
    channel = socket.socket(fileno=int(arguments[0]))
    handler = arguments[1]
    for name in [*arguments[2:], handler.rpartition(".")[0]]:
        module = importlib.import_module(name)
        if name == "torch":
            _quicken(module)
    num_tasks = len(os.listdir("/proc/self/task"))
    if num_tasks > 1:
        sys.stderr.write(f"importing {handler} starts {num_tasks - 1} threads: functions forked from it would hang\n")
        return 1
    gc.collect()
    gc.freeze()
    channel.send(msgspec.json.encode(ForkAnswer(instance="", pid=os.getpid())))
    _serve(channel)
    return 0


def _quicken(torch: Any) -> None:
    """Take a step with the usual optimizers: the first one imports much of torch. With one thread only.

    A pool of threads would not exist in the children.
    """
    torch.set_num_threads(1)
    importlib.import_module("springtide.runtime.process.deferred_compiler").defer_compiler()
    for make in (torch.optim.SGD, torch.optim.AdamW):
        model = torch.nn.Linear(2, 2)
        optimizer = make(model.parameters(), lr=0.1)
        torch.autograd.backward(model(torch.ones(2, 2)).sum())
        optimizer.step()


def _serve(channel: socket.socket) -> None:
    wake_receiver, wake_sender = socket.socketpair()
    for end in (wake_receiver, wake_sender):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_sender.fileno(), warn_on_full_buffer=False)
    children: dict[int, str] = {}
    while True:
        ready, _, _ = select.select([channel, wake_receiver], [], [], _POLL_S)
        if wake_receiver in ready:
            wake_receiver.recv(4096)
        for pid, code in _reaped(children):
            answer = ForkAnswer(instance=children.pop(pid), pid=pid, exit_code=code)
            channel.send(msgspec.json.encode(answer))
        if channel in ready:
            data, descriptors, _, _ = socket.recv_fds(channel, _MAX_REQUEST_BYTES, 1)
            if not data:
                return
            request = decode_json(data, ForkRequest)
            own_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                _become_function(request, own_pid, descriptors[0], [channel, wake_receiver, wake_sender])
            os.close(descriptors[0])
            children[pid] = request.instance
            channel.send(msgspec.json.encode(ForkAnswer(instance=request.instance, pid=pid)))


def _reaped(children: dict[int, str]) -> list[tuple[int, int]]:
    found = []
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if pid in children:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _become_function(request: ForkRequest, parent_pid: int, log: int, own: list[socket.socket]) -> None:
    """In the child: cut every tie, enter the cage, run the handler's loop, and never return."""
    code = EXIT_NOT_CAGED
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for end in own:
            end.close()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, max(log, null) + 1)
        enter(parent_pid, request.group_procs)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.directory)
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(request.num_threads)
        # Imported here: its native client reads the Runtime API's address when it is imported.
        run = importlib.import_module("awslambdaric.__main__").main
        sys.argv = ["awslambdaric", request.handler]
        run(sys.argv)
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Not sys.exit: the frames of the template below must not run on in the child.
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
