"""A test double of the zygote: starts fake_worker.py for each SpawnRequest and tells of births and deaths."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from springtide.core.wire import workers as wire

WORKER = Path(__file__).with_name("fake_worker.py")


def main() -> None:
    path = Path(sys.argv[sys.argv.index("--socket") + 1])
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    children: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    link: socket.socket | None = None
    decoder: wire.FrameDecoder[wire.ZygoteMessage] = wire.FrameDecoder(wire.ZygoteMessage)
    while True:
        for key, _ in selector.select(0.02):
            if key.fileobj is listener:
                link, _ = listener.accept()
                decoder = wire.FrameDecoder(wire.ZygoteMessage)
                selector.register(link, selectors.EVENT_READ)
                continue
            assert link is not None
            data = link.recv(1 << 16)
            if not data:
                selector.unregister(link)
                link.close()
                link = None
                continue
            for request in decoder.feed(data):
                assert isinstance(request, wire.SpawnRequest)
                if request.spec.workload.params.get("zygote") == "die":
                    os._exit(5)
                if request.spec.workload.params.get("zygote") == "hold":
                    link.sendall(wire.encode_frame(wire.Held(replica_id=request.spec.replica_id)))
                    time.sleep(7.0)
                with tempfile.NamedTemporaryFile(
                    dir=Path(request.spec.work_dir).parent.parent, suffix=".spec", delete=False
                ) as file:
                    file.write(msgspec.json.encode(request.spec))
                with Path(request.spec.log_path).open("ab") as log:
                    child = subprocess.Popen(
                        [sys.executable, str(WORKER), "--spec", file.name],
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                children[child.pid] = (request.spec.replica_id, child)
                link.sendall(wire.encode_frame(wire.Spawned(replica_id=request.spec.replica_id, pid=child.pid)))
        for pid, (replica_id, child) in list(children.items()):
            code = child.poll()
            if code is not None:
                del children[pid]
                if link is not None:
                    link.sendall(wire.encode_frame(wire.ChildExited(replica_id=replica_id, pid=pid, exit_code=code)))


if __name__ == "__main__":
    main()
