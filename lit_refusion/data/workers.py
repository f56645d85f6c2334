"""The loader's processes: their errors, and what signals mean to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from lit_refusion.callbacks.interrupt import STOP_SIGNALS
from lit_refusion.errors import UserError, first_line


class WorkerLoader(DataLoader):
    """Starts its processes with signals held back until they know what to do with them."""

    def __iter__(self) -> Any:
        """As DataLoader's."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ignore_signals(is_serving: Any, worker: int) -> None:
    """Ctrl-C and Slurm's signals reach the whole group; workers go on serving until the step under way has ended."""

    def end_if_released(*_: Any) -> None:
        if not is_serving.is_set():
            os._exit(0)

    for number in STOP_SIGNALS:
        signal.signal(number, end_if_released)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


@contextmanager
def plain_worker_errors() -> Iterator[None]:
    """Errors of the loader's processes as if they had happened in this one."""
    try:
        yield
    except UserError as error:
        if "in DataLoader worker" not in str(error):
            raise
        raise UserError(str(error).rsplit("UserError: ", maxsplit=1)[-1].strip()) from error
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise UserError(
            f"{first_line(error)}. If the memory ran out, lower loader.num_workers; go on with resume=auto"
        ) from error
