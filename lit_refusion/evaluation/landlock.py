"""Landlock, the Linux kernel's way for a process to give up access for good; needs no privilege.

Source: docs.kernel.org/userspace-api/landlock.html. Uses the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, list folders
FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # those that a rule for a single file may grant
NUM_FILE_RIGHTS = (0, 13, 14, 15, 15, 16)  # known to each version of the interface
TCP = 0b11  # bind, connect
SCOPES = 0b11  # abstract sockets, signals


class Ruleset(ctypes.Structure):
    """What is handled: refused unless a rule allows it."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class PathBeneath(ctypes.Structure):
    """What is allowed at and below an open path."""

    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _syscall(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))


def version() -> int:
    """Version of the kernel's interface; 0 where there is none."""
    return max(0, _syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)) if hasattr(os, "O_PATH") else 0


def confine(*, readable: Iterable[str], writable: Iterable[str]) -> int:
    """Keep this process, and those it starts, to these files and folders, without TCP and without signals to others.

    Needs `no_new_privs`. Older kernels refuse less: TCP since version 4, signals since version 6.

    Args:
        readable: may be read and executed; those that are missing are passed over.
        writable: may be changed, too.

    Returns:
        The version of the interface; 0 where there is none, and nothing is confined.
    """
    abi = version()
    if abi == 0:
        return 0
    every = (1 << NUM_FILE_RIGHTS[min(abi, len(NUM_FILE_RIGHTS) - 1)]) - 1
    handled = Ruleset(every, TCP if abi >= 4 else 0, SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _checked(_syscall(CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(size), 0))
    for path in readable:
        _allow(ruleset, path, READ)
    for path in writable:
        _allow(ruleset, path, every)
    _checked(_syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)
    return abi


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(folder).st_mode):
        rights &= FILE_RIGHTS
        rights &= (1 << NUM_FILE_RIGHTS[min(version(), len(NUM_FILE_RIGHTS) - 1)]) - 1
    rule = PathBeneath(rights, folder)
    _checked(_syscall(ADD_RULE, ruleset, 1, ctypes.byref(rule), 0))
    os.close(folder)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock: {os.strerror(number)}")
    return result
