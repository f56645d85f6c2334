"""A contender in a process of its own: requests and answers are JSON lines. Needs nothing but Python's library.

Runs under the reference's Python as well as ours. Contenders that wait do not run, so they can take turns.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


class Worker:
    """A process that runs `python -m MODULE` on one thread and answers what it is asked.

    Args:
        module: calls `serve`.
        python: interpreter; None for this one.
        path: folders from which the process may import besides the repository.
    """

    def __init__(self, module: str, *, python: str | None = None, path: Sequence[str] = ()) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join([*(str(Path(folder).resolve()) for folder in path), str(REPOSITORY)]),
        }
        reader, writer = os.pipe()  # not its output stream, on which anybody may print
        self.process = subprocess.Popen(
            [python or sys.executable, "-m", module, str(writer)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            pass_fds=[writer],
            text=True,
            env=environment,
        )
        os.close(writer)
        self.answers = os.fdopen(reader)

    def ask(self, action: str, **arguments: Any) -> Any:
        """The answer to one request; raises with the worker's traceback where it failed."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"action": action, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        line = self.answers.readline()
        if not line:
            raise SystemExit(f"the worker {self.process.args} ended with {self.process.wait()}; see its messages above")
        answer = json.loads(line)
        if "error" in answer:
            raise SystemExit(f"the worker {self.process.args} failed at {action}:\n{answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the process."""
        self.process.communicate()
        self.answers.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def serve(actions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(int(sys.argv[1]), "w")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": actions[request["action"]](**request["arguments"])}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Clock:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self.start = (time.perf_counter(), time.process_time())

    def read(self) -> dict[str, float]:
        """Both, by name."""
        return {"seconds": time.perf_counter() - self.start[0], "cpu_seconds": time.process_time() - self.start[1]}


class Memory:
    """How much more memory than now this process will have had at most (Linux)."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed would be used again without being seen
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        self.before = status("VmRSS")

    def extra(self) -> int:
        """Bytes."""
        return 1024 * max(0, status("VmHWM") - self.before)


def status(name: str) -> int:
    """A figure of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
