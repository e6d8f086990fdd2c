"""Sends bytes from one node to another for a moment, over plain sockets: can they reach each other, and how fast."""

from __future__ import annotations

import socket
import time

from coalign.threads import start_thread

SECONDS = 1.0  # that bytes are sent
CONNECT_SECONDS = 5.0
PIECE = 2**20  # bytes


def open_sink(host: str) -> int:
    """Accept one connection on a free port of ``host``, read what comes and answer the number of bytes; the port."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.settimeout(4 * CONNECT_SECONDS)

    def read() -> None:
        with listener:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(4 * CONNECT_SECONDS)
                buffer, count = bytearray(PIECE), 0
                try:
                    while got := connection.recv_into(buffer):
                        count += got
                    connection.sendall(b"%d" % count)
                except OSError:
                    return

    start_thread(read, "coalign-doctor-sink")
    return listener.getsockname()[1]


def send_bytes(host: str, port: int) -> float:
    """Send bytes to a sink for SECONDS; return bytes a second. Raises OSError if it cannot be reached."""
    piece, started_at = bytes(PIECE), time.monotonic()
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
        started_at = time.monotonic()
        while time.monotonic() - started_at < SECONDS:
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        count = int(connection.recv(64) or b"0")
    return count / (time.monotonic() - started_at)
