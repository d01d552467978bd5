"""Processes that load samples hold nothing of the training process, and end with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from springtide.runtime.data.batch_loader import BatchLoader, PartIds

WAIT_S = 30.0


class Descriptors(Dataset):
    """Samples that say which of these descriptors are still what they were."""

    def __init__(self, inodes):
        self.inodes = inodes

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {fd: os.fstat(fd).st_ino == inode for fd, inode in self.inodes.items()}


def test_sockets_and_locks_are_given_up_and_files_are_kept(tmp_path):
    left, right = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    lock, file = (tmp_path / "fence.lock").open("w"), (tmp_path / "data.bin").open("w")
    with left, right, listener, lock, file:
        fcntl.flock(lock, fcntl.LOCK_EX)
        handles = [left, listener, lock, file]
        inodes = {handle.fileno(): os.fstat(handle.fileno()).st_ino for handle in handles}
        dataset = Descriptors(inodes)
        loader = BatchLoader(DataLoader(dataset, batch_size=1, num_workers=1, collate_fn=list), 0, torch.device("cpu"))
        part = PartIds(0, (0,))
        (held,) = loader.fetch(part, lambda: iter([part]))
        assert held == dict(zip(inodes, [False, False, False, True], strict=True))
        # Closing is all that frees a lock, or ends a connection, once no other process has it open.
        lock.close()
        left.close()
        with (tmp_path / "fence.lock").open("w") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        right.settimeout(WAIT_S)
        assert right.recv(1) == b""
        loader.close()


PARENT = """
import os, signal, time, torch
from torch.utils.data import DataLoader
from springtide.runtime.data.batch_loader import BatchLoader, PartIds

class Pids:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 7:
            time.sleep(600)
        return os.getpid()

signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
loader = BatchLoader(DataLoader(Pids(), batch_size=1, num_workers=2, collate_fn=list), 0, torch.device("cpu"))
parts = [PartIds(0, (index,)) for index in (0, 1, 7, 7)]
print(*(loader.fetch(part, lambda at=at: iter(parts[at:]))[0] for at, part in enumerate(parts[:2])), flush=True)
while True:
    time.sleep(0.1)
"""


def is_alive(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
def test_they_outlast_a_signal_to_leave_and_die_with_the_training_process():
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            pids = [int(word) for word in process.stdout.readline().split()]
            assert len(set(pids)) == 2
            assert all(is_alive(pid) for pid in pids)
            # To the whole process group, as a platform tells a worker to leave.
            os.killpg(process.pid, signal.SIGTERM)
            assert process.stdout.readline() == "told\n"
            assert all(is_alive(pid) for pid in pids)
            process.kill()
            process.wait()
            deadline = time.monotonic() + WAIT_S
            while any(is_alive(pid) for pid in pids):
                assert time.monotonic() < deadline, "processes that load samples outlive the training process"
                time.sleep(0.01)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
