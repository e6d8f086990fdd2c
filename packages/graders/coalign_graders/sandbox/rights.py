"""The rights that the supervisor drops before it starts untrusted code: other processes, networks, capabilities."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
from pathlib import Path

_NEW_MOUNTS, _NO_SETUID, _NO_DEVICES = 0x00020000, 2, 4
_NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PID, _NEW_NET = 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_SET_DEATH_SIGNAL = 1
_CAPABILITIES_V3 = 0x20080522
_TRANSIENT = range(61184, 65520)  # user ids that systemd reserves for transient services


def take_own_user_id() -> bool:
    """As root, take a real user id that nobody has, so that RLIMIT_NPROC counts only this process and its children.

    That limit counts by real user id and spares root. The effective user id, by which files are opened, stays. False
    without root's rights.
    """
    if os.geteuid() != 0:
        return False
    try:
        os.setresuid(_TRANSIENT[os.getpid() % len(_TRANSIENT)], 0, 0)
    except OSError:
        return False
    return True


def isolate() -> bool:
    """Enter new namespaces for users, new processes, mounts, network, IPC; False if the system does not allow it."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def mount_folder(path: str, megabytes: int, files: int) -> bool:
    """Mount memory of a fixed size over a folder, seen by this namespace alone; False if the system does not allow it.

    What is removed while it is open or mapped counts until it is gone, which no list of the folder's files could show.
    """
    options = f"size={megabytes}m,nr_inodes={files + 1},mode=700".encode()
    flags = _NO_SETUID | _NO_DEVICES
    return ctypes.CDLL(None).mount(b"coalign", os.fsencode(path), b"tmpfs", flags, options) == 0


def drop_capabilities() -> None:
    """Give up all capabilities: root, and a process in a new user namespace, is then an ordinary user."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITIES_V3, 0))
    if libc.capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, of which ``parent`` is a pidfd that it was given or opened."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if select.select([parent], [], [], 0)[0]:  # it has ended before it could be told
        os._exit(1)
