"""A stretch of network before a server that holds back the requests a test names."""

from __future__ import annotations

import contextlib
import socket
import threading


class SlowLink:
    """Hands on everything between its port and the server's, but for requests that begin with what `holds` says."""

    def __init__(self, host, port, holds):
        self._server, self._holds = (host, port), holds
        self.held = threading.Event()
        self.gate = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                threading.Thread(target=self._carry, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(server, client, False), daemon=True).start()

    def _carry(self, source, sink, is_request):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_request and self._holds(data.partition(b"\r\n")[0]):
                    self.held.set()
                    self.gate.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.gate.set()
        self._listener.close()
