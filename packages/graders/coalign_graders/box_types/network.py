"""Lets what runs in a network without interfaces reach one port of this machine, and nothing else."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_CLONE_NEWNET = 0x40000000
_SET_FLAGS, _UP = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP


def listen(port: int, network: int | None) -> tuple[socket.socket, int]:
    """Listen at 127.0.0.1:``port`` in ``network``, a descriptor of its namespace; None: in a new one.

    Returns the socket, which any thread may serve, and the network. Raises OSError without root's rights.
    """

    def enter() -> tuple[socket.socket, int]:
        libc = ctypes.CDLL(None, use_errno=True)
        if (libc.unshare(_CLONE_NEWNET) if network is None else libc.setns(network, _CLONE_NEWNET)) != 0:
            raise OSError(
                ctypes.get_errno(), f"entering a box's network: {os.strerror(ctypes.get_errno())} (needs root)"
            )
        with socket.socket() as control:
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))
        listener = socket.create_server(("127.0.0.1", port))
        return listener, os.open("/proc/thread-self/ns/net", os.O_RDONLY) if network is None else network

    with ThreadPoolExecutor(1) as pool:  # a thread of its own, which ends: it cannot come back from that network
        return pool.submit(enter).result()


async def relay(port: int, free: asyncio.Semaphore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes between a connection and 127.0.0.1:``port`` until one of them ends; hang up if none is ``free``."""
    with suppress(ConnectionError):
        if free.locked():
            return writer.close()
        async with free:
            try:
                server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return writer.close()
            ways = [asyncio.create_task(_pump(*way)) for way in ((reader, server_writer), (server_reader, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                writer.close()
                server_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
