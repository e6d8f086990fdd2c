"""A seccomp filter: the system calls that untrusted code is refused.

It lists refused calls, not allowed ones, because compiled packages use a wide and changing set of harmless calls. Calls
newer than this table are refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

# name:number on x86_64:number on aarch64. Sockets and what works on them, other processes and their memory, keys,
# mounts, namespaces, clocks, modules, memory that no limit counts, queues and segments of others, disks as a whole, and
# what Landlock does not guard about files: metadata and locks.
_REFUSED = """
accept4:288:242 accept:43:202 acct:163:89 add_key:248:217 adjtimex:159:171 bind:49:200 bpf:321:280 chmod:90:- chown:92:-
chroot:161:51 clock_adjtime:305:266 clock_settime:227:112 connect:42:203 create_module:174:- delete_module:176:106
fanotify_init:300:262 fchmod:91:52 fchmodat2:452:452 fchmodat:268:53 fchown:93:55 fchownat:260:54 finit_module:313:273
flock:73:32 fremovexattr:199:16 fsconfig:431:431 fsetxattr:190:7 fsmount:432:432 fsopen:430:430 fspick:433:433
futimesat:261:- get_kernel_syms:177:- getpmsg:181:- init_module:175:105 inotify_init1:294:26 inotify_init:253:-
io_uring_enter:426:426 io_uring_register:427:427 io_uring_setup:425:425 ioperm:173:- iopl:172:- ioprio_set:251:30
kcmp:312:272 kexec_file_load:320:294 kexec_load:246:104 keyctl:250:219 lchown:94:- listen:50:201 lookup_dcookie:212:18
lremovexattr:198:15 lsetxattr:189:6 mbind:237:235 memfd_create:319:279 memfd_secret:447:447 migrate_pages:256:238
modify_ldt:154:- mount:165:40 mount_setattr:442:442 move_mount:429:429 move_pages:279:239 mq_open:240:180
mq_unlink:241:181 msgctl:71:187 msgget:68:186 msgrcv:70:188 msgsnd:69:189 name_to_handle_at:303:264 nfsservctl:180:42
open_by_handle_at:304:265 open_tree:428:428 perf_event_open:298:241 personality:135:92 pidfd_getfd:438:438
pidfd_open:434:434 pidfd_send_signal:424:424 pivot_root:155:41 process_madvise:440:440 process_mrelease:448:448
process_vm_readv:310:270 process_vm_writev:311:271 ptrace:101:117 putpmsg:182:- query_module:178:- quotactl:179:60
quotactl_fd:443:443 reboot:169:142 removexattr:197:14 request_key:249:218 rt_sigqueueinfo:129:138
rt_tgsigqueueinfo:297:240 sched_setaffinity:203:122 sched_setattr:314:274 sched_setparam:142:118
sched_setscheduler:144:119 semctl:66:191 semget:64:190 semop:65:193 semtimedop:220:192 sendmmsg:307:269 sendmsg:46:211
set_mempolicy:238:237 set_mempolicy_home_node:450:450 setdomainname:171:162 setfsgid:123:152 setfsuid:122:151
setgid:106:144 setgroups:116:159 sethostname:170:161 setns:308:268 setpriority:141:140 setregid:114:143
setresgid:119:149 setresuid:117:147 setreuid:113:145 settimeofday:164:170 setuid:105:146 setxattr:188:5 shmat:30:196
shmctl:31:195 shmget:29:194 socket:41:198 swapoff:168:225 swapon:167:224 sync:162:81 syncfs:306:267 syslog:103:116
tkill:200:130 truncate:76:45 umount2:166:39 unshare:272:97 uselib:134:- userfaultfd:323:282 ustat:136:- utime:132:-
utimensat:280:88 utimes:235:- vhangup:153:58 vserver:236:-
"""
_CONDITIONAL = {  # allowed depending on arguments: (number on x86_64, on aarch64)
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fcntl": (72, 25),
    "fork": (57, None),
    "vfork": (58, None),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "open": (2, None),
    "openat": (257, 56),
    "openat2": (437, 437),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "socketpair": (53, 199),
}
_NEWEST = 462  # the last call of the table's kernel
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*
_X32 = 0x40000000

_LOAD, _AND, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes each, low half first
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_THREAD, _NAMESPACES = 0x00010000, 0x7E020000  # CLONE_THREAD; every CLONE_NEW*
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_PR_SET_PDEATHSIG = 1
_F_SETFL, _F_DUPFD_CLOEXEC = 4, 1030  # requests up to F_SETFL copy a descriptor or read and set its flags
# Is it a terminal (in two ways), its size, bytes to read, blocking or not, closed on exec or not.
_ALLOWED_IOCTLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_ACCESS_MODE, _UNNAMED = 0o3, 0o20000000  # O_ACCMODE; the bit of O_TMPFILE that O_DIRECTORY lacks

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def apply(*, fork: bool, threads: bool, unnamed: bool) -> bool:
    """Install the filter for this thread and all that it starts; False on a machine without one.

    ``fork``: may start processes and programs, and send signals to all that its namespace holds, not only to itself.
    ``threads``: may start threads. ``unnamed``: may make files that are in no folder.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        return False
    code = _program(*_MACHINES[machine], fork=fork, threads=threads, unnamed=unnamed)
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) == 0


def _program(column: int, arch: int, *, fork: bool, threads: bool, unnamed: bool) -> list[Instruction]:
    start = _allow() if fork else _refuse(errno.EPERM)
    rules = {
        "clone": [
            *_argument(0),
            *_if(_ANY_BIT, _NAMESPACES, _refuse(errno.EPERM)),
            *([] if threads else [_refuse(errno.EAGAIN)]),
            *([] if fork else [(_ANY_BIT, 1, 0, _THREAD), _refuse(errno.EAGAIN)]),
            _allow(),
        ],
        "clone3": [_refuse(errno.ENOSYS)],  # its flags are in memory, out of sight; libc falls back on clone
        "fork": [_allow() if fork else _refuse(errno.EAGAIN)],
        "vfork": [_allow() if fork else _refuse(errno.EAGAIN)],
        "execve": [start],  # would also undo the signal that ends the job with its supervisor
        "execveat": [start],
        # Copies, and flags of the file. Anything else sets who gets which signal (F_SETOWN, F_SETSIG), or locks.
        "fcntl": [
            *_argument(1),
            *_if(_EQUAL, _F_DUPFD_CLOEXEC, _allow()),
            *_if(_GREATER, _F_SETFL, _refuse(errno.EPERM)),
            _allow(),
        ],
        "ioctl": [
            *_argument(1),
            *(one for control in _ALLOWED_IOCTLS for one in _if(_EQUAL, control, _allow())),
            _refuse(errno.EPERM),
        ],
        "kill": [_allow()] if fork else _own_process(),
        "tgkill": [_allow()] if fork else _own_process(),
        "open": _open(1, unnamed),
        "openat": _open(2, unnamed),
        "openat2": [_refuse(errno.ENOSYS)],  # its flags are in memory, out of sight
        "prctl": [*_argument(0), *_if(_EQUAL, _PR_SET_PDEATHSIG, _refuse(errno.EPERM)), _allow()],
        "prlimit64": [*_argument(0), *_if(_EQUAL, 0, _allow()), _refuse(errno.EPERM)],
        # A pair of streams is connected for good; a pair of datagrams could send to any address. Event loops need one.
        "socketpair": [
            *_argument(0),
            (_EQUAL, 1, 0, socket.AF_UNIX),
            _refuse(errno.EPERM),
            *_argument(1),
            (_AND, 0, 0, 0xF),
            *_if(_EQUAL, socket.SOCK_STREAM, _allow()),
            _refuse(errno.EPERM),
        ],
    }
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    if arch == _MACHINES["x86_64"][1]:
        code += [(0x35, 0, 1, _X32), _refuse(errno.ENOSYS)]
    code += _if(_GREATER, _NEWEST, _refuse(errno.ENOSYS))
    for entry in _REFUSED.split():
        number = entry.split(":")[1 + column]
        if number != "-":
            code += _if(_EQUAL, int(number), _refuse(errno.EPERM))
    for name, rule in rules.items():
        number = _CONDITIONAL[name][column]
        if number is not None:
            code += [(_EQUAL, 0, len(rule), number), *rule]
    return [*code, _allow()]


def _argument(position: int) -> list[Instruction]:
    return [(_LOAD, 0, 0, _ARGUMENT + 8 * position)]


def _if(test: int, constant: int, then: Instruction) -> list[Instruction]:
    return [(test, 0, 1, constant), then]


def _open(position: int, unnamed: bool) -> list[Instruction]:
    """Before Linux 6.2 Landlock lets a file be emptied that is not opened for writing, or (mode 3) for nothing."""
    return [
        *_argument(position),
        *([] if unnamed else _if(_ANY_BIT, _UNNAMED, _refuse(errno.EOPNOTSUPP))),
        (_AND, 0, 0, _ACCESS_MODE),
        *_if(_EQUAL, _ACCESS_MODE, _refuse(errno.EPERM)),
        *_argument(position),
        (_AND, 0, 0, _ACCESS_MODE | os.O_TRUNC),
        *_if(_EQUAL, os.O_RDONLY | os.O_TRUNC, _refuse(errno.EPERM)),
        _allow(),
    ]


def _own_process() -> list[Instruction]:
    return [*_argument(0), *_if(_EQUAL, os.getpid(), _allow()), _refuse(errno.EPERM)]


def _allow() -> Instruction:
    return (_RETURN, 0, 0, _ALLOW)


def _refuse(error: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | error)
