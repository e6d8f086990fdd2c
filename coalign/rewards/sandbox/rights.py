"""The rights that the supervisor drops before it starts untrusted code: other processes, networks, capabilities."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from pathlib import Path

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
    """Enter new namespaces for users, new processes, network and IPC; False if the system does not allow it."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def drop_capabilities() -> None:
    """Give up all capabilities: root, and a process in a new user namespace, is then an ordinary user."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITIES_V3, 0))
    if libc.capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def die_with_parent() -> None:
    """Have this process killed when its parent ends."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
