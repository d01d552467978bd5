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
        self._ends = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._carriers = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._ends.append(client)
                server = socket.create_connection(self._server)
                self._ends.append(server)
                for ends in ((client, server, True), (server, client, False)):
                    self._carriers.append(threading.Thread(target=self._carry, args=ends, daemon=True))
                    self._carriers[-1].start()

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
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._carriers:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()
