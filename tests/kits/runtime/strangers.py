"""Processes of another account that connect to whatever listens, and members of groups that say what they hold."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest

NOBODY = 65534
# Connects `count` times to each address that it reads from stdin, sends `greeting`, prints how many connections stand
# after `wait_s`, or still after `patience_s` more, and holds them until the next line. For "host:*" it connects to
# whatever listens at that host, again and again until the next line, `count` times each time, and prints to how many
# addresses it did.
_STRANGER = """
import errno, os, resource, select, socket, sys, time
uid, count, wait_s, greeting = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), bytes.fromhex(sys.argv[4])
patience_s = float(sys.argv[5])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
if uid != os.getuid():
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)

def listening(host):
    wanted = socket.inet_aton(host)[::-1].hex().upper()
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A" and local.split(":")[0] == wanted:
            yield host, int(local.split(":")[1], 16)

def connect(address):
    link = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    link.setblocking(False)
    while link.connect_ex(address) == errno.EAGAIN:
        time.sleep(0.001)
    if greeting:
        try:
            link.send(greeting)
        except OSError:
            pass
    return link

def stands(link):
    try:
        link.getpeername()
        return link.recv(64) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False

print("ready", flush=True)
links = []
# Without a buffer, so that the next line can be waited for.
orders = open(0, "rb", buffering=0)
for line in orders:
    for link in links:
        link.close()
    name = line.strip().decode()
    if not name:
        continue
    if name.endswith(":*"):
        found, links = set(), []
        while not select.select([orders], [], [], 0)[0]:
            for address in listening(name[:-2]):
                found.add(address)
                links += [connect(address) for _ in range(count)]
            for link in links[: -5 * count]:
                link.close()
            del links[: -5 * count]
        print(len(found), flush=True)
        continue
    address = "\\0" + name[5:] if name.startswith("unix:") else (name.split(":")[0], int(name.split(":")[1]))
    links = [connect(address) for _ in range(count)]
    time.sleep(wait_s)
    until_s = time.monotonic() + patience_s
    while (standing := sum(map(stands, links))) and time.monotonic() < until_s:
        time.sleep(0.02)
    print(standing, flush=True)
"""
_MEMBER = """
import os, resource, socket, sys, threading, time
import torch
from springtide.core.errors import PeerLost
from springtide.runtime.elastic.group import form_group
rendezvous, rank, size, host, descriptors, key = sys.argv[1:]
rank, size, cpu = int(rank), int(size), torch.device("cpu")
resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors),) * 2)
torch.set_num_threads(1)
own = socket.create_server((host, 0))
group = None

def greet():
    while True:
        link, _ = own.accept()
        try:
            link.sendall(b"hello")
        except OSError:
            pass
        link.close()

print("ready", own.getsockname()[1], flush=True)
for line in sys.stdin:
    verb, *more = line.split()
    if verb == "form":
        if group is not None:
            group.close()
        while True:
            try:
                group = form_group(rendezvous, int(more[0]), rank, size, cpu, is_wanted=lambda: True, listen_host=host,
                    key=key)
                break
            except PeerLost as error:
                # The host of the group before may still listen there.
                print(error, file=sys.stderr)
                time.sleep(0.05)
        print("formed", flush=True)
    elif verb == "gather":
        output = torch.zeros(size)
        group.all_gather(output, torch.tensor([float(rank)]))
        print(output.tolist() == [float(other) for other in range(size)], flush=True)
    elif verb == "holds":
        print(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), flush=True)
    elif verb == "serve":
        threading.Thread(target=greet, daemon=True).start()
        print("serves", flush=True)
"""


class _Talking:
    """A process that answers each line with a line."""

    def __init__(self, source, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def tell(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline().strip()
        assert line, f"it ended with {self.process.wait()}"
        return line

    def ask(self, line):
        self.tell(line)
        return self.answer()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def stranger(count=1000, *, wait_s=0.3, patience_s=0.0, greeting=b"", uid=NOBODY):
    """A process of another account: `ask` it for an address to have it connect `count` times.

    It answers with how many connections stand after `wait_s`; while some do, it looks again for `patience_s` more.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another account")
    process = _Talking(_STRANGER, uid, count, wait_s, greeting.hex(), patience_s)
    try:
        assert process.answer() == "ready"
        yield process
    finally:
        process.close()


class GroupMember(_Talking):
    """A process that forms groups when it is told to. It also has a server of its own, as users' code may."""

    def __init__(self, rendezvous, rank, size, host, *, descriptors=64, key=""):
        super().__init__(_MEMBER, rendezvous, rank, size, host, descriptors, key)
        self.host = host

    def wait_ready(self):
        self.own_port = int(self.answer().split()[1])

    def wait_listening_port(self):
        """The one port of its host that something listens at, but for its own server's."""
        deadline = time.monotonic() + 30
        while len(found := self._listening_ports()) != 1:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        return found[0]

    def _listening_ports(self):
        wanted = bytes(reversed([int(part) for part in self.host.split(".")])).hex().upper()
        with open("/proc/net/tcp", encoding="ascii") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        found = [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[1].split(":")[0] == wanted]
        return [port for port in found if port != self.own_port]


def wait_held(members, held=None, wait_s=30.0):
    """What all members hold, each its numbers of descriptors and threads, once that stands still, or is `held`."""
    deadline = time.monotonic() + wait_s
    last = None
    while (now := tell_all(members, "holds")) != (last if held is None else held):
        assert time.monotonic() < deadline, (now, held)
        last = now
        time.sleep(0.05)
    return now


def tell_all(members, line):
    """Ask all members at once, and return their answers in order."""
    for member in members:
        member.tell(line)
    return [member.answer() for member in members]
