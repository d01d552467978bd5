"""The process that has imported libraries and forks workers: one thread, no user code, no secrets."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from springtide.core.errors import BackendError
from springtide.core.wire.workers import FrameDecoder, Spawned, SpawnRequest, WorkerSpec, encode_frame
from springtide.runtime.zygote.forked import become_worker, end_with, fork, raise_oom_score, show_title
from springtide.runtime.zygote.libraries import ImportRecord, import_libraries, obstacle_to_forking
from springtide.runtime.zygote.messages import FromPreloaded, Imported, NotImported, own_variables
from springtide.runtime.zygote.program_imports import ProgramImports

_READ_BYTES = 1 << 16


def run_preloaded(
    link: socket.socket, zygote: int, names: Sequence[tuple[str, str]], variables: Mapping[str, str]
) -> NoReturn:
    """Import `names` with these variables set, and fork workers as the zygote asks for them, until it closes `link`."""
    end_with(zygote)
    raise_oom_score()
    show_title(f"libraries {' '.join(sorted({module.partition('.')[0] for module, _ in names}))}")
    before = dict(os.environ)
    os.environ.update(variables)
    # Else torch asks CUDA itself whether there is a GPU, which cannot be used after a fork then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    torch.set_num_threads(1)
    told = _import(names)
    gc.collect()
    gc.freeze()
    _tell(link, told)
    if isinstance(told, NotImported):
        os._exit(0)
    decoder: FrameDecoder[SpawnRequest] = FrameDecoder(SpawnRequest)
    while data := link.recv(_READ_BYTES):
        for request in decoder.feed(data):
            _fork_worker(link, request.spec, before, variables)
    os._exit(0)


def _import(names: Sequence[tuple[str, str]]) -> Imported | NotImported:
    # As in the program's own process: the directory where the platform began is none of its folders.
    path, began_in = sys.path[:], os.getcwd()
    sys.path[:] = [entry for entry in path if entry not in ("", began_in)]
    began_s = time.process_time()
    try:
        with ImportRecord() as record:
            import_libraries(names)
    except (Exception, SystemExit) as error:
        return NotImported(reason=f"{type(error).__name__}: {error}"[:300])
    finally:
        sys.path[:] = path
    if obstacle := obstacle_to_forking():
        return NotImported(reason=obstacle)
    return Imported(
        found=record.found,
        missing=record.missing,
        variables=frozenset(record.variables),
        cpu_s=time.process_time() - began_s,
        private_mib=_private_mib(),
    )


def _private_mib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) >> 10


def _fork_worker(
    link: socket.socket, spec: WorkerSpec, before: Mapping[str, str], variables: Mapping[str, str]
) -> None:
    """Fork the worker by a child that ends, so that the zygote is its parent, as of all workers."""

    def work() -> NoReturn:
        os.setsid()
        # Once it is told, nothing but this process knows whether it has begun: then it may begin.
        _tell(link, Spawned(replica_id=spec.replica_id, pid=os.getpid()))
        link.close()
        for name in variables.keys() - own_variables(spec, before).keys():
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
        become_worker(spec, ())

    def part() -> NoReturn:
        fork(work)
        os._exit(0)

    os.waitpid(fork(part), 0)


def _tell(link: socket.socket, message: FromPreloaded | ProgramImports) -> None:
    try:
        link.sendall(encode_frame(message))
    except (OSError, BackendError):
        os._exit(1)
