"""A pool of processes that works through a stream of tasks, in order and with bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import Any, TypeVar

from lit_refusion.errors import UserError

T = TypeVar("T")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    function: Callable[..., T], tasks: Iterable[tuple[Any, ...]], *, num_workers: int, preload: str
) -> Iterator[T]:
    """`function(*task)` of every task, in the order of the tasks.

    At most two tasks a worker are read ahead. With 0 workers, or a single task, the work is done in this process:
    starting others takes seconds. An error comes out where it stands in the order, so that it is the same one
    whatever the number of workers.

    Args:
        function: a function at the top of a module.
        tasks: its arguments.
        num_workers: processes.
        preload: module that the processes import once, before they are forked.

    Raises:
        UserError: a process died.
    """
    errors: list[UserError] = []
    readable = _until_error(tasks, errors)
    head = list(islice(readable, 2))
    tasks = chain(head, readable)
    if num_workers == 0 or len(head) < 2:
        yield from (function(*task) for task in tasks)
    else:
        yield from _in_pool(function, tasks, num_workers, preload)
    if errors:
        raise errors[0]


def _until_error(tasks: Iterable[tuple[Any, ...]], errors: list[UserError]) -> Iterator[tuple[Any, ...]]:
    """The tasks up to the first that cannot be read; `errors` gets the reason."""
    try:
        yield from tasks
    except UserError as error:
        errors.append(error)


def _in_pool(
    function: Callable[..., T], tasks: Iterable[tuple[Any, ...]], num_workers: int, preload: str
) -> Iterator[T]:
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if has_server else "spawn")
    if has_server:
        context.set_forkserver_preload([preload])
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start)
    pending: deque[Future[T]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(function, *task))
            if len(pending) >= 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed (out of memory?); what is finished is kept: run the command again, with "
            "a smaller num_workers if the memory was short"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start() -> None:
    """Leave Ctrl-C to the parent, end with it, and use one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
