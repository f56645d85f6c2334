"""What a process gives up before it runs a stranger's program: files, processes, network, user and resources.

Uses the standard library alone: `warden.py` runs it in an interpreter without packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterable, Mapping

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PROCESSES, NEW_NETWORK = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NO_SETUID, NO_DEVICES, BIND, RECURSIVE, PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
SET_MOUNT_ATTRIBUTES, HERE, WHOLE_TREE = 442, -100, 0x8000
READ_ONLY = 0x1 | 0x2 | 0x4  # nor set-uid programs, nor devices
DIE_WITH_PARENT, DUMPABLE, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 36, 38
FIRST_USER, NOBODY = 2_000_000_000, 65534

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
HOME = "/tmp"
"""The scratch folder, as a program in namespaces sees it."""


def _call(name: str, *arguments: object) -> None:
    """A function of the C library; raises OSError where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def set_process_flag(flag: int, value: int) -> None:
    """prctl(2); nothing where the system has none."""
    if hasattr(ctypes.CDLL(None), "prctl"):
        _call("prctl", flag, *(ctypes.c_ulong(number) for number in (value, 0, 0, 0)))


def enter_namespaces() -> None:
    """Own mounts, network, shared memory and, for processes started from here on, process ids.

    Root needs nothing for it; others get a user namespace, in which they stay who they are.

    Raises:
        OSError: the system does not permit it.
    """
    kinds = NEW_MOUNTS | NEW_IPC | NEW_PROCESSES | NEW_NETWORK
    user, group = os.geteuid(), os.getegid()
    _call("unshare", kinds if user == 0 else kinds | NEW_USER)
    if user != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call("mount", *encoded, ctypes.c_ulong(flags), os.fsencode(options) or None)


def _make_read_only(path: str, *, reach: int = WHOLE_TREE) -> None:
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY)
    _call("syscall", SET_MOUNT_ATTRIBUTES, HERE, os.fsencode(path), reach, attributes, ctypes.c_size_t(32))


def build_root(root: str, *, readable: Iterable[str], file_bytes: int, user: int) -> None:
    """Make a bare file system the root: the system and the interpreter to read, and a `/tmp` in memory.

    Nothing of it is left when the last process of the namespace ends.

    Args:
        root: an empty folder.
        readable: files and folders that are there, read-only.
        file_bytes: size of `/tmp`.
        user: owner of `/tmp`.

    Raises:
        OSError: the system does not permit it.
    """
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", root, "tmpfs", NO_SETUID | NO_DEVICES, "mode=755,size=1m")
    for path in readable:
        _show(path, root + path)
    for path in DEVICES:
        _touch(root + path)
        _mount(path, root + path, None, BIND)
    for path in ("/proc", HOME):
        os.makedirs(root + path, exist_ok=True)
    with contextlib.suppress(OSError):  # containers that mask parts of theirs permit no other
        _mount("proc", root + "/proc", "proc", NO_SETUID | NO_DEVICES)
    size = f"mode=700,uid={user},size={file_bytes},nr_inodes=16384"
    _mount("tmpfs", root + HOME, "tmpfs", NO_SETUID | NO_DEVICES, size)
    _make_read_only(root, reach=0)
    os.chroot(root)
    os.chdir(HOME)


def _show(path: str, target: str) -> None:
    if os.path.lexists(target) or not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target)
    else:
        _touch(target)
    _mount(path, target, None, BIND | RECURSIVE)
    _make_read_only(target)


def _touch(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w"):
        pass


def unprivileged_user() -> int:
    """Who the program is to be: as root a user of its own, which nobody else is; else the one who runs this.

    A user of its own makes the limit on processes count this program's alone, and lets all of them be killed at once.
    """
    if os.geteuid() != 0:
        return os.geteuid()
    try:
        with open("/proc/self/uid_map") as file:
            ranges = [[int(number) for number in line.split()] for line in file]
    except OSError:
        return NOBODY
    is_known = any(first <= FIRST_USER and first + count > FIRST_USER + 2**22 for first, _, count in ranges)
    return FIRST_USER + os.getpid() if is_known else NOBODY


def become(user: int) -> None:
    """Drop to an unprivileged user for good; nothing where this process is that user."""
    if os.geteuid() != user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def num_tasks(user: int) -> int:
    """Processes and threads of a user now, of those that can be seen."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def limit_resources(limits: Mapping[str, int], *, num_others: int) -> None:
    """Set the limits of this process, hard, as far as the system has them.

    Args:
        limits: the fields of `sandbox.Limits`.
        num_others: tasks of the same user that count against its limit on processes.
    """
    cpu = limits["cpu_seconds"]
    wanted = {
        "RLIMIT_CPU": (cpu, cpu + 1),  # SIGXCPU, then SIGKILL for those that ignore it
        "RLIMIT_FSIZE": (limits["file_bytes"],) * 2,
        "RLIMIT_NPROC": (limits["processes"] + num_others,) * 2,
        "RLIMIT_NOFILE": (256, 256),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_AS": (limits["memory_bytes"],) * 2,
    }
    for name, (soft, hard) in wanted.items():
        if hasattr(resource, name):
            _, most = resource.getrlimit(getattr(resource, name))
            cap = hard if most == resource.RLIM_INFINITY else min(hard, most)
            with contextlib.suppress(ValueError, OSError):  # macOS has names that it does not let one set
                resource.setrlimit(getattr(resource, name), (min(soft, cap), cap))
