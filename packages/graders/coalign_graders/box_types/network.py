"""Lets what runs in a network without interfaces reach one port of this machine, and nothing else."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from coalign_graders.box_types.program import require_program

# A process of its own: one with threads can make no user namespace, and could not leave what it has entered.
_LISTEN = """
import ctypes, fcntl, os, socket, struct, sys
channel, port, names = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
user, group, libc = os.geteuid(), os.getegid(), ctypes.CDLL(None, use_errno=True)
if libc.unshare(sum({"net": 0x40000000, "user": 0x10000000}[name] for name in names)):
    sys.exit("making a network: " + os.strerror(ctypes.get_errno()))
if "user" in names:
    for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        open(f"/proc/self/{file}", "w").write(text)
with socket.socket() as control:
    fcntl.ioctl(control, 0x8914, struct.pack("16sH22x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
listener = socket.create_server(("127.0.0.1", port))
namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in names]
socket.send_fds(channel, [b"1"], [listener.fileno(), *namespaces])
"""


async def listen(port: int, enter: Sequence[str], unshare: Sequence[str] = ()) -> tuple[socket.socket, dict[str, int]]:
    """Listen at 127.0.0.1:``port`` in the network of the command that begins with ``enter``.

    First it makes the namespaces ``unshare`` (`net`, `user`), which are returned as descriptors, beside the socket.
    Raises SandboxError if this user may not.
    """
    near, far = socket.socketpair()
    with near, far:
        program = (*enter, sys.executable, "-S", "-c", _LISTEN, str(far.fileno()), str(port), *unshare)
        await require_program(*program, pass_fds=(far.fileno(),))
        _, (listener, *namespaces), _, _ = socket.recv_fds(near, 1, 3)
    return socket.socket(fileno=listener), dict(zip(unshare, namespaces, strict=True))


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
