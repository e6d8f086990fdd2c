"""Landlock: limits the files that untrusted code can open, make or remove to those beneath named paths."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, of the same number on every machine
_ASK_VERSION, _PATH_BENEATH = 1, 1
_SET_NO_NEW_PRIVS = 38
_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE, _MAKE, _TRUNCATE, _DEVICE_CONTROL = 1 << 5, 1 << 8, 1 << 14, 1 << 15
_OF_A_FILE = _EXECUTE | _WRITE | _READ | _TRUNCATE | _DEVICE_CONTROL
_READABLE = _EXECUTE | _READ | _LIST
_WRITABLE = _WRITE | _READ | _LIST | _MAKE | _TRUNCATE  # a flat folder of plain files: quick to clear
_HANDLED = ((5, 16), (3, 15), (2, 14), (1, 13))  # rights on files: (from version, how many)


def apply(*, readable: Iterable[str], writable: Iterable[str], removable: bool) -> bool:
    """Let this thread, and all that it starts, open only files beneath these paths; False if this kernel cannot.

    Paths that do not exist are skipped. ``removable``: files in the writable ones can be removed and renamed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = find_version(libc)
    if version < 1:
        return False
    handled = (1 << next(count for since, count in _HANDLED if version >= since)) - 1
    network = 0b11 if version >= 4 else 0  # bind and connect, of TCP
    scopes = 0b11 if version >= 6 else 0  # abstract sockets and signals, to the outside
    attributes = struct.pack("QQQ", handled, network, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = libc.syscall(_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    writable_rights = _WRITABLE | _REMOVE if removable else _WRITABLE
    for paths, rights in ((readable, _READABLE), (writable, writable_rights)):
        for path in filter(os.path.exists, paths):
            _add(libc, ruleset, path, rights & handled)
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = libc.syscall(_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


def find_version(libc: ctypes.CDLL) -> int:
    """What this kernel's Landlock can do; below 1 if it has none."""
    return libc.syscall(_CREATE, None, 0, _ASK_VERSION)


def _add(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH)
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= _OF_A_FILE
    if libc.syscall(_ADD, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0) != 0:
        raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}", path)
    os.close(descriptor)
