"""Commands in processes of their own, whose lines are passed on and kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from lit_refusion.errors import UserError

KEPT_LINES = 8


class CommandError(UserError):
    """A command that ended badly; the message has its last lines."""


class Children:
    """Starts commands and can stop all of them."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._guard = threading.Lock()
        self._is_stopped = False

    def run(self, arguments: Sequence[str], *, name: str, log: Path, environment: dict[str, str], lock: int) -> None:
        """Run `lit-refusion ARGUMENTS`; its lines are appended to `log`, and printed behind `name` where it trains.

        It inherits the open file `lock`: as long as it lives, the lock on that holds.

        Raises:
            CommandError: it ended with another code than 0.
            KeyboardInterrupt: all were stopped.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        last: list[str] = []
        is_shown = arguments[0] == "train"
        if not is_shown:
            print(f"{name:12} | {arguments[0]} ...", flush=True)
        with log.open("a", encoding="utf-8") as file:
            process = self._start([sys.executable, "-m", "lit_refusion.cli", *arguments], environment, lock)
            assert process.stdout is not None
            for line in process.stdout:
                if is_shown:
                    print(f"{name:12} | {line}", end="", flush=True)
                file.write(line)
                file.flush()
                last = [*last[1 - KEPT_LINES :], line.rstrip()]
            code = process.wait()
        with self._guard:
            self._running.discard(process)
            if self._is_stopped:
                raise KeyboardInterrupt
        if code:
            raise CommandError(
                f"lit-refusion {arguments[0]} ended with code {code}; its last lines: " + " / ".join(last)
            )

    def _start(self, command: list[str], environment: dict[str, str], lock: int) -> subprocess.Popen[str]:
        with self._guard:
            if self._is_stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                pass_fds=[lock],
                start_new_session=True,  # a signal reaches it through `stop`, once
            )
            self._running.add(process)
            return process

    def stop(self) -> None:
        """Ask all commands to save and end, and start no other."""
        with self._guard:
            self._is_stopped = True
            for process in self._running:
                process.send_signal(signal.SIGINT)
