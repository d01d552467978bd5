"""The process in which user text is compiled, so that no text can end or hold up the control plane.

Run as a script by `source_check`, with only the standard library: it reads requests from its standard input and writes
one answer each to its standard output, both with a length of four bytes before JSON. Every request is compiled in a
fork of its own, whose memory and time are limited; nothing of the text is executed.

    request   {"files": {name: text, ..}, "main": "train.py", "object": "fit"}
    answer    {"problem": "", "identity": "5c0f.."} | {"problem": "train.py line 3 is not valid Python: .."} |
              {"exceeded": "2 s of CPU time"}

The identity is that of the object in the main file (code_identity.py); empty if none is named or found.
"""

import importlib.util
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable

# For all files of one request together. A file of 1 MiB of usual code needs a fifth of these.
CPU_S = 2
WALL_S = 5.0
MEMORY_BYTES = 512 * 1024 * 1024
_LENGTH = struct.Struct(">I")
_NESTED = "{} is nested too deeply to be compiled; flatten it"


def problem_of(name: str, text: str) -> str:
    """What is wrong with a file; empty if it is Python."""
    try:
        compile(text, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"{name} line {error.lineno} is not valid Python: {error.msg}"
    except (ValueError, OverflowError) as error:
        return f"{name} is not valid Python: {error}"
    except RecursionError:
        return _NESTED.format(name)
    except MemoryError:
        # The parser raises it for deep nesting as well, when there is memory left.
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MEMORY_BYTES // 4:
            raise
        return _NESTED.format(name)
    return ""


def load_identity() -> Callable[[dict[str, str], str, str], str]:
    """The function of the file beside this one: isolated, the interpreter finds no module there."""
    place = os.path.join(os.path.dirname(os.path.abspath(__file__)), "code_identity.py")
    spec = importlib.util.spec_from_file_location("code_identity", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[dict[str, str], str, str], str] = module.identity_of
    return found


identity_of = load_identity()


def compile_all(files: dict[str, str], main: str, name: str, answer_fd: int) -> None:
    """Compile in this process, which is limited and ends here."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    try:
        sources = {path: text for path, text in files.items() if path.endswith(".py")}
        answer = {"problem": next((found for found in map(problem_of, sources, sources.values()) if found), "")}
        if name and not answer["problem"]:
            answer["identity"] = identity_or_none(files, main, name)
    except MemoryError:
        answer = {"exceeded": f"{MEMORY_BYTES >> 20} MB of memory"}
    os.write(answer_fd, json.dumps(answer).encode())


def identity_or_none(files: dict[str, str], main: str, name: str) -> str:
    """The identity; empty if the syntax tree is too deep to be walked."""
    try:
        return identity_of(files, main, name)
    except RecursionError:
        return ""


def answer_to(files: dict[str, str], main: str = "", name: str = "") -> dict[str, str]:
    """Compile the files in a fork and return what it said, or which limit it met."""
    read_fd, write_fd = os.pipe()
    began_s = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            compile_all(files, main, name, write_fd)
        finally:
            os._exit(0)
    os.close(write_fd)
    said = b""
    while True:
        left_s = began_s + WALL_S - time.monotonic()
        if left_s <= 0.0 or not select.select([read_fd], [], [], left_s)[0]:
            break
        data = os.read(read_fd, 65536)
        if not data:
            break
        said += data
    os.close(read_fd)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if said:
        answer: dict[str, str] = json.loads(said)
        return answer
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by == signal.SIGXCPU:
        return {"exceeded": f"{CPU_S} s of CPU time"}
    if ended_by == signal.SIGKILL:
        return {"exceeded": f"{WALL_S:g} s"}
    return {"exceeded": f"what Python's compiler can take: it ended with signal {ended_by}"}


def main() -> None:
    """Answer requests until the standard input ends, as it does with the control plane."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        head = sys.stdin.buffer.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return
        request = json.loads(sys.stdin.buffer.read(_LENGTH.unpack(head)[0]))
        body = json.dumps(answer_to(request["files"], request["main"], request["object"])).encode()
        sys.stdout.buffer.write(_LENGTH.pack(len(body)) + body)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
