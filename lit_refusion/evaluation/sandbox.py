"""Running programs that a model wrote, within limits, and without trusting what they say of themselves.

What it guards against: the accidents and the common tricks of generated code. A program cannot use more time, memory,
processes or disk than its limits; cannot write but to a scratch folder, which is deleted; sees neither the environment
nor, as far as the system permits it, the network, other files or other processes; leaves nothing running; and does not
pass by ending early, by printing, or by replacing built-in names or the checker.

What it does not: a program and its tests share an interpreter, so that one written to defeat this very code can (it
finds the nonce in a frame of its caller, or answers the tests from their text). Modules that a program changed stay
changed for its tests. The kernel is shared. For code written by an adversary, run the whole command in a container or
a virtual machine without network.

How: a warden, a small process without threads, confines a new interpreter by namespaces (a bare file system with the
system and the interpreter to read; no network; own process ids), an unprivileged user, Landlock and resource limits.
The interpreter has the standard library alone (`-S`), so that a verdict does not depend on what is installed, and a
fixed hash seed. What the system does not permit is left out, and `describe` tells. Without namespaces the disk is
checked twenty times a second instead of bounded, and an ordinary user's program can change the modes of that user's
files; without Landlock as well it can read, write and signal whatever that user can. Root without namespaces needs an
interpreter that every user may read. Memory and processor time are limits of each process.
"""

from __future__ import annotations

import dataclasses
import functools
import marshal
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import lit_refusion
from lit_refusion.errors import UserError
from lit_refusion.evaluation import confinement, landlock

GRACE_SECONDS = 10.0
OPTIONS = ("-s", "-S", "-P", "-X", "utf8")  # no packages, nothing of the current folder


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use.

    Args:
        wall_seconds: from its start to the end of its tests.
        cpu_seconds: processor time of each of its processes.
        memory_bytes: address space of each of its processes.
        file_bytes: of each file and of all together.
        processes: processes and threads at a time.
        output_bytes: of what it prints to standard error that are kept; the rest, and standard output, is dropped.
    """

    wall_seconds: float
    cpu_seconds: int
    memory_bytes: int
    file_bytes: int
    processes: int
    output_bytes: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise UserError(f"limits.{field.name}={getattr(self, field.name)}: must be positive")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and what decides whether it is right, executed in this order.

    Args:
        source: what a model wrote.
        setup: code that comes before the tests, in the namespace of the program.
        tests: code that raises for a wrong program.
        entry_point: name of what is tested. With it, the tests' other built-in names are Python's own whatever the
            program defines; without, they are the program's (a task may ask for a function `sum`).
    """

    source: str
    setup: str = ""
    tests: str = ""
    entry_point: str | None = None


Status = Literal["passed", "failed", "exited", "timeout", "memory", "killed", "tampered"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended.

    Args:
        status: passed = all was executed; failed = something was raised; exited = it ended its process before the
            tests ended; timeout, memory = a limit; killed = by a signal; tampered = it wrote to the pipe of the
            verdict.
        message: one line: the error and where, the limit, the signal.
    """

    status: Status
    message: str


def run_program(program: Program, limits: Limits) -> Outcome:
    """Execute a program and its tests in a process of their own; safe to call from several threads.

    Raises:
        UserError: programs cannot be run on this system.
    """
    status, message = _run(program, limits, has_namespaces=has_namespaces())
    if status == "broken":
        raise UserError(f"sandbox: {message}; run as an ordinary user, or where user namespaces are permitted")
    return Outcome(status=status, message=message)  # type: ignore[arg-type]


def run_programs(programs: Iterable[Program], limits: Limits, *, num_workers: int) -> Iterator[Outcome]:
    """The outcomes of many programs in their order, `num_workers` at a time."""
    with ThreadPoolExecutor(num_workers) as pool:
        yield from pool.map(functools.partial(run_program, limits=limits), programs)


@functools.cache
def has_namespaces() -> bool:
    """Whether programs can be given namespaces of their own here; found out by running an empty one."""
    limits = Limits(
        wall_seconds=20.0, cpu_seconds=20, memory_bytes=2**30, file_bytes=2**20, processes=4, output_bytes=1024
    )
    return sys.platform == "linux" and _run(Program(source=""), limits, has_namespaces=True)[0] == "passed"


def describe() -> str:
    """One line: which protections are in force on this system."""
    version = landlock.version()
    parts = (
        "namespaces (bare file system, no network, own processes)" if has_namespaces() else "no namespaces",
        f"Landlock {version}" if version else "no Landlock",
        "unprivileged user of its own" if os.geteuid() == 0 else "same user",
        "resource limits",
    )
    return ", ".join(parts)


def _run(program: Program, limits: Limits, *, has_namespaces: bool) -> tuple[str, str]:
    """Status and message; status "broken" where the program could not be started."""
    scratch = tempfile.mkdtemp(prefix="program-")
    interpreter = _interpreter()
    prefixes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    job = {
        "program": program.source,
        "setup": program.setup,
        "tests": program.tests,
        "entry_point": program.entry_point,
        "limits": dataclasses.asdict(limits),
        "nonce": os.urandom(16).hex().encode(),
        "scratch": scratch,
        "interpreter": interpreter,
        "options": list(OPTIONS),
        "readable": [*confinement.SYSTEM, *sorted(prefixes), os.path.dirname(interpreter)],
        "has_namespaces": has_namespaces,
        "trial": Path(__file__).with_name("trial.py").read_text(),
    }
    try:
        return _ask_warden(marshal.dumps(job), limits.wall_seconds + GRACE_SECONDS)
    finally:
        _delete(scratch)


def _delete(folder: str) -> None:
    """Delete a folder, with what was made unreadable in it."""
    for path, names, _ in os.walk(folder):
        for inner in (os.path.join(path, name) for name in names):
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _ask_warden(job: bytes, patience: float) -> tuple[str, str]:
    """The verdict of a new warden, which is killed when it takes too long."""
    with subprocess.Popen(
        [_interpreter(), *OPTIONS, "-m", "lit_refusion.evaluation.warden"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(lit_refusion.__file__).parent.parent), "PATH": os.defpath},
        start_new_session=True,
    ) as warden:
        try:
            output, errors = warden.communicate(job, timeout=patience)
        except BaseException as error:
            _end(warden)
            if isinstance(error, subprocess.TimeoutExpired):
                return "timeout", f"not ended after {patience:g} s"
            raise
    if not output:
        last_line = (errors.decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return ("broken", last_line) if last_line else ("killed", "it ended the process that watched it")
    verdict = marshal.loads(output)
    return verdict["status"], verdict["message"]


def _end(warden: subprocess.Popen[bytes]) -> None:
    """End a warden, with time to end its program first."""
    warden.terminate()
    try:
        warden.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        warden.kill()


def _interpreter() -> str:
    """The Python that runs this, without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
