"""A process that compares mathematical answers, and is replaced when one takes too long.

math-verify's own timeouts are signals, which only the main thread gets. A process can be ended from any thread.
Run as a module it is that process: one JSON line in, one out.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lit_refusion

MEMORY_BYTES = 4 * 2**30
START_SECONDS = 120.0
"""For importing sympy, on a slow file system."""


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """Whether two answers are equal, what was read as the answer (None: nothing), and why it is wrong."""

    is_equal: bool
    answer: str | None
    note: str = ""


class Judge:
    """The caller's end: starts the process when it is first needed; one comparison at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compare(self, answer: str, right: str, *, is_marked: bool, seconds: float) -> Ruling:
        """Compare an answer with the right one.

        Args:
            answer: LaTeX; with `is_marked` all of it is the answer, else it is looked for in it.
            right: LaTeX of the right answer.
            is_marked: see `answer`.
            seconds: after which the answer counts as wrong.
        """
        question = json.dumps({"answer": answer, "right": right, "is_marked": is_marked}) + "\n"
        with self._lock:
            process = self._started()
            start = time.monotonic()
            try:
                assert process.stdin is not None
                process.stdin.write(question.encode())
                process.stdin.flush()
                line = _read_line(process, seconds)
            except OSError:
                line = b""
            if not line.endswith(b"\n"):
                note = f"not done after {seconds:g} s" if time.monotonic() - start >= seconds else "its process ended"
                self._stop()
                return Ruling(is_equal=False, answer=answer if is_marked else None, note=f"math-verify: {note}")
        return Ruling(**json.loads(line))

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(Path(lit_refusion.__file__).parent.parent)},
            )
            weakref.finalize(self, _end, self._process)
            _read_line(self._process, START_SECONDS)
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """A line with its end; without it where the time was up or the process ended."""
    assert process.stdout is not None
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], left)[0]:
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                break
            line += chunk
    return line


def serve() -> None:
    """Answer the questions on standard input until it ends."""
    import math_verify

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, most))
    configs = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]

    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, configs, parsing_timeout=None)

    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # what a library prints is no reply
        print(file=replies, flush=True)
        for line in sys.stdin:
            question = json.loads(line)
            print(json.dumps(_ruling(math_verify.verify, parse, **question)), file=replies, flush=True)


def _ruling(verify: Any, parse: Any, *, answer: str, right: str, is_marked: bool) -> dict[str, Any]:
    try:
        golds, found = parse(f"${right.strip()}$"), parse(f"${answer.strip()}$" if is_marked else answer)
        is_equal = bool(found) and bool(verify(golds, found, timeout_seconds=None))
        text = answer if is_marked else str(found[-1])
        return {"is_equal": is_equal, "answer": text if found else None}
    except Exception as error:  # sympy raises whatever it likes
        return {"is_equal": False, "answer": answer if is_marked else None, "note": type(error).__name__}


if __name__ == "__main__":
    serve()
