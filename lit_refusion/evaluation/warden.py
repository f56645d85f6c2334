"""The process that runs one program: confines it, watches it, ends all that it started, and says how it went.

`sandbox.py` starts it in an interpreter without packages, with the job on its standard input; it marshals
its verdict to standard output. The caller has threads and much memory, and must not fork; this process has neither.
A program waits for it to start, so it imports little.
"""

from __future__ import annotations

import contextlib
import fcntl
import marshal
import os
import select
import signal
import sys
import time
from typing import Any, NamedTuple

from lit_refusion.evaluation import confinement, landlock

LONGEST_REPORT = 4096
POLL_SECONDS = 0.05


class Ending(NamedTuple):
    """How the program's process ended, and what it left."""

    wait_status: int | None  # None: it was still running at the deadline, or had filled the disk
    report: bytes
    errors: bytes
    seconds: float
    is_full: bool = False


def main() -> None:
    """Run the job on standard input and print its verdict."""
    signal.signal(signal.SIGTERM, _leave)
    confinement.set_process_flag(confinement.DIE_WITH_PARENT, signal.SIGTERM)
    job = marshal.loads(sys.stdin.buffer.read())
    job["user"] = confinement.unprivileged_user()
    try:
        verdict = _in_namespaces(job) if job["has_namespaces"] else _without_namespaces(job)
    except OSError as error:
        verdict = {"status": "broken", "message": str(error)}
    if verdict:
        sys.stdout.buffer.write(marshal.dumps(verdict))
        sys.stdout.buffer.flush()
    os._exit(0)  # without the interpreter's cleaning up


def _leave(*_: Any) -> None:
    """End, after what is in `finally`."""
    raise SystemExit(1)


def _in_namespaces(job: dict[str, Any]) -> dict[str, Any] | None:
    """The first process of the new namespace prints the verdict; when it ends, the kernel ends all others in it."""
    confinement.enter_namespaces()
    first = os.fork()
    if first:
        try:
            os.waitpid(first, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        return None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    confinement.set_process_flag(confinement.DIE_WITH_PARENT, signal.SIGKILL)
    size = job["limits"]["file_bytes"]
    confinement.build_root(job["scratch"], readable=job["readable"], file_bytes=size, user=job["user"])
    job["scratch"] = confinement.HOME
    verdict = _supervise(job)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    return verdict


def _without_namespaces(job: dict[str, Any]) -> dict[str, Any]:
    """What the program starts and abandons becomes this process's child, and is ended as such."""
    confinement.set_process_flag(confinement.SUBREAPER, 1)
    if os.geteuid() == 0:
        os.chown(job["scratch"], job["user"], job["user"])
    try:
        return _supervise(job)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what ends the rest is not to be ended halfway
        _end_all(job["user"])


def _end_all(user: int) -> None:
    """End every process that descends from this one; as root also by the user that is theirs alone."""
    while True:
        for process in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if user != os.geteuid() and user != confinement.NOBODY:
            _end_user(user)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _end_user(user: int) -> None:
    helper = os.fork()
    if helper == 0:
        try:
            confinement.become(user)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(helper, 0)


def _descendants(root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    front = [root]
    while front:
        new = [child for parent in front for child in children.get(parent, ()) if child not in found]
        found.update(new)
        front = new
    return found


def _supervise(job: dict[str, Any]) -> dict[str, Any]:
    """Start the program, wait for its end or the deadline, and judge."""
    confinement.set_process_flag(confinement.DUMPABLE, 0)  # the program cannot look into this process
    report_out, report_in = os.pipe()
    errors_out, errors_in = os.pipe()
    job["report"] = 64 + os.urandom(1)[0] % 128
    program = os.fork()
    if program == 0:
        try:
            _become_program(job, report_in, errors_in)
        except BaseException as error:
            os.write(report_in, b"\n".join((job["nonce"], b"broken", str(error).encode())))
        finally:
            os._exit(1)
    os.close(report_in)
    os.close(errors_in)
    ending = _watch(program, report_out, errors_out, job)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program, signal.SIGKILL)
    return judge(ending, job["nonce"], job["limits"])


def _become_program(job: dict[str, Any], report: int, errors: int) -> None:
    """Confine this process and replace it by an interpreter; does not return."""
    os.setsid()
    text = {name: job[name] for name in ("program", "setup", "tests", "entry_point", "nonce", "report")}
    path = os.path.join(job["scratch"], "job")
    with open(path, "w+b") as file:
        os.unlink(path)
        file.write(marshal.dumps(text))
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(errors, 2)
    os.dup2(report, job["report"], inheritable=True)
    num_others = 0 if job["has_namespaces"] or os.geteuid() == 0 else confinement.num_tasks(job["user"])
    confinement.become(job["user"])
    if not os.access(job["interpreter"], os.X_OK):
        raise OSError(f"{job['interpreter']}: not readable for an unprivileged user")
    os.chdir(job["scratch"])
    confinement.set_process_flag(confinement.NO_NEW_PRIVILEGES, 1)
    readable = [*job["readable"], *(["/proc"] if job["has_namespaces"] else [])]
    landlock.confine(readable=readable, writable=[job["scratch"], *confinement.DEVICES])
    confinement.limit_resources(job["limits"], num_others=num_others)
    environment = {"PATH": "/usr/bin:/bin", "HOME": job["scratch"], "TMPDIR": job["scratch"], "PYTHONHASHSEED": "0"}
    os.execve(job["interpreter"], [job["interpreter"], *job["options"], "-c", job["trial"]], environment)


def _watch(program: int, report: int, errors: int, job: dict[str, Any]) -> Ending:
    """Read both pipes, of each as much as is kept and the rest to the floor, until the program ends."""
    limits, start = job["limits"], time.monotonic()
    kept = {report: b"", errors: b""}
    longest = {report: LONGEST_REPORT, errors: limits["output_bytes"]}
    open_pipes = [report, errors]
    for pipe in open_pipes:
        fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_NONBLOCK)

    def read(patience: float) -> None:
        for pipe in select.select(open_pipes, [], [], patience)[0]:
            chunk = os.read(pipe, 65536)
            kept[pipe] += chunk[: longest[pipe] - len(kept[pipe])]
            if not chunk:
                open_pipes.remove(pipe)

    ended, status, is_full = 0, 0, False
    while not ended and not is_full and (left := limits["wall_seconds"] + start - time.monotonic()) > 0:
        read(min(left, POLL_SECONDS if open_pipes else 0.002))
        ended, status = os.waitpid(program, os.WNOHANG)
        is_full = not job["has_namespaces"] and _size(job["scratch"]) > limits["file_bytes"]
    read(0)
    seconds = time.monotonic() - start
    return Ending(
        wait_status=status if ended else None,
        report=kept[report],
        errors=kept[errors],
        seconds=seconds,
        is_full=is_full,
    )


def _size(folder: str) -> int:
    """Bytes of the files in a folder and below."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def judge(ending: Ending, nonce: bytes, limits: dict[str, Any]) -> dict[str, Any]:
    """Status and message of an ending."""
    said, _, rest = ending.report.partition(b"\n")
    status, _, message = (part.decode("utf-8", "replace") for part in rest.partition(b"\n"))
    last_line = (ending.errors.decode("utf-8", "replace").strip().splitlines() or [""])[-1][:300]
    if ending.is_full:
        return {"status": "killed", "message": f"wrote more than {limits['file_bytes']} bytes"}
    if ending.wait_status is None:
        return {"status": "timeout", "message": f"not done after {limits['wall_seconds']:g} s"}
    code = os.waitstatus_to_exitcode(ending.wait_status)
    if -code in (signal.SIGXCPU, signal.SIGKILL) and ending.seconds >= limits["cpu_seconds"]:
        return {"status": "timeout", "message": f"not done after {limits['cpu_seconds']} s of processor time"}
    if code < 0:
        return {"status": "killed", "message": f"{signal.Signals(-code).name} {last_line}".strip()}
    if ending.report and said != nonce:
        return {"status": "tampered", "message": "wrote to the pipe that is not its own"}
    if status == "passed" and message:
        return {"status": "tampered", "message": "the tests were ended more than once"}
    if ending.report and (code == 0 or status == "broken"):
        return {"status": status, "message": message}
    if "MemoryError" in last_line:
        return {"status": "memory", "message": last_line}
    return {
        "status": "exited",
        "message": f"ended with exit code {code} before its tests did: {last_line}".rstrip(": "),
    }


if __name__ == "__main__":
    main()
