"""What chaos does beside killing: cuts connections, flips bits, fills disks, and forwards connections to a server."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PIDFD_GETFD = 438  # the system call that copies another process's descriptor
BALLAST = "ballast"


def cut_connections(one: int, other: int) -> int:
    """Shut down every TCP connection between two processes, as a cable that is pulled would; return their number."""
    theirs = {(link.raddr, link.laddr) for link in psutil.Process(other).net_connections("tcp") if link.raddr}
    links = [link for link in psutil.Process(one).net_connections("tcp") if (link.laddr, link.raddr) in theirs]
    process = os.pidfd_open(one)
    try:
        for link in links:
            copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, link.fd, 0)
            if copy >= 0:
                with socket.socket(fileno=copy) as connection, suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)
    return len(links)


def flip_bit(path: Path, chosen: random.Random) -> None:
    """Flip a bit in the second half of a file."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(chosen.randrange(size // 2, size))
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ (1 << chosen.randrange(8))]))


def flip_weights_once(chosen: random.Random) -> None:
    """Flip a bit of the weights that the next sync through files sends, after they were sent."""
    from coalign.weights.sync.stored import DiskTransport

    stage = DiskTransport.stage

    def stage_and_flip(self: Any, version: int, changing: bool, on_sent: Any) -> Any:
        def on_sent_and_flip() -> None:
            flip_bit(chosen.choice(sorted(Path(self.folder(version)).iterdir())), chosen)
            on_sent()

        DiskTransport.stage = stage
        return stage(self, version, changing, on_sent_and_flip)

    DiskTransport.stage = stage_and_flip


def fill_disk(folder: Path) -> None:
    """Leave no room on the disk of a folder."""
    with open(folder / BALLAST, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def free_disk(folder: Path) -> None:
    (folder / BALLAST).unlink()


class Proxy:
    """Forwards TCP connections to a server on this machine, until they are ``cut``."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.connections = 0  # that were cut
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections that there are."""
        with self._lock:
            cut, self._open = self._open, []
        self.connections += len(cut) // 2
        for each in cut:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                with self._lock:
                    self._open += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
