"""The pool of processes: order, bounded reading ahead, errors, and that no process is left behind."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lit_refusion.errors import UserError
from lit_refusion.processes import in_order, num_cores

PRELOAD = "json"  # something light: the processes need nothing else
PATIENCE = 30  # seconds after which a process that should have ended counts as hung


def run(function: Any, tasks: Any, num_workers: int, found: list[Any] | None = None) -> list[Any]:
    """All results, also in `found` as they come."""
    found = [] if found is None else found
    found.extend(in_order(function, tasks, num_workers=num_workers, preload=PRELOAD))
    return found


def square(number: int) -> int:
    return number * number


def process_id(number: int) -> int:
    return os.getpid()


def fail_from_three_on(number: int) -> int:
    if number >= 3:
        raise KeyError(f"task {number}")
    return number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def settings_of_a_worker(number: int) -> tuple[bool, str | None, bool]:
    ignores_interrupt = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return ignores_interrupt, os.environ.get("TOKENIZERS_PARALLELISM"), multiprocessing.parent_process() is not None


def finish_behind_the_next(number: int, folder: str) -> int:
    """An even task ends only once the odd one behind it has closed the pipe that both open."""
    if number % 2:
        Path(folder, str(number - 1)).write_text("done")
    else:
        Path(folder, str(number)).read_text()
    return number


def report_and_hang(number: int, pipe: str) -> None:
    with open(pipe, "w") as file:
        file.write(f"{os.getpid():>9}\n")  # ten bytes: less than a pipe tears apart
    signal.pause()


def hang(pipe: str) -> None:
    run(report_and_hang, [(number, pipe) for number in range(8)], num_workers=2)


# Order


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 20])
def test_results_come_in_the_order_of_the_tasks(count: int, num_workers: int) -> None:
    assert run(square, ((number,) for number in range(count)), num_workers) == [n * n for n in range(count)]


def test_a_task_that_ends_early_waits_for_its_turn(tmp_path: Path) -> None:
    for number in range(0, 6, 2):
        os.mkfifo(tmp_path / str(number))
    assert run(finish_behind_the_next, ((number, str(tmp_path)) for number in range(6)), 2) == list(range(6))


def test_no_workers_means_this_process() -> None:
    assert set(run(process_id, [(1,), (2,), (3,)], 0)) == {os.getpid()}


def test_workers_are_other_processes() -> None:
    found = set(run(process_id, [(number,) for number in range(12)], 2))
    assert os.getpid() not in found
    assert len(found) <= 2


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_reading_ahead_is_bounded(num_workers: int) -> None:
    taken = 0

    def tasks() -> Iterator[tuple[int]]:
        nonlocal taken
        for number in range(40):
            taken += 1
            yield (number,)

    lead = []
    for done, _ in enumerate(in_order(square, tasks(), num_workers=num_workers, preload=PRELOAD)):
        lead.append(taken - done)
    assert taken == 40
    assert max(lead) == max(2, 2 * num_workers)  # without workers, two are read to see whether there is more than one


# Errors


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_the_first_error_in_order_comes_out_behind_the_results_before_it(num_workers: int) -> None:
    found: list[int] = []
    with pytest.raises(KeyError, match="task 3"):
        run(fail_from_three_on, ((n,) for n in range(9)), num_workers, found)
    assert found == [0, 1, 2]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_an_error_of_the_tasks_comes_out_where_it_stands_in_the_order(good: int, num_workers: int) -> None:
    def tasks() -> Iterator[tuple[int]]:
        yield from ((number,) for number in range(good))
        raise UserError("no more")

    found: list[int] = []
    with pytest.raises(UserError, match="no more"):
        run(square, tasks(), num_workers, found)
    assert found == [number * number for number in range(good)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_a_task_wins_over_a_later_one_of_the_tasks(num_workers: int) -> None:
    def tasks() -> Iterator[tuple[int]]:
        yield from ((number,) for number in range(4))
        raise UserError("no more")

    with pytest.raises(KeyError, match="task 3"):
        run(fail_from_three_on, tasks(), num_workers)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_killed_worker_is_one_error_that_says_what_to_do(num_workers: int) -> None:
    with pytest.raises(UserError, match=r"worker process was killed .*what is finished is kept: run .* again.*smaller"):
        run(die_at_three, ((number,) for number in range(30)), num_workers)


# Processes


def test_workers_leave_interrupts_to_the_parent_and_use_one_thread() -> None:
    assert set(run(settings_of_a_worker, [(n,) for n in range(6)], 2)) == {(True, "false", True)}


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("last", [11, 3], ids=["all results taken", "stopped early"])
def test_no_worker_outlives_the_work(last: int) -> None:
    results = in_order(process_id, ((number,) for number in range(12)), num_workers=2, preload=PRELOAD)
    workers = set()
    for number, worker in enumerate(results):
        workers.add(worker)
        if number == last:
            break
    results.close()
    assert workers
    assert [worker for worker in workers if is_alive(worker)] == []


def wait_for(descriptor: int, what: str) -> None:
    assert select.select([descriptor], [], [], PATIENCE)[0], what


def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDWR)  # for writing as well, so that opening it waits for no one
    parent = multiprocessing.get_context("forkserver").Process(target=hang, args=(str(pipe),))
    parent.start()
    workers = []
    for number in range(2):
        wait_for(reading, f"only {number} of 2 workers have started")
        workers.append(os.pidfd_open(int(os.read(reading, 10))))
    os.close(reading)

    parent.kill()
    parent.join()

    try:
        for worker in workers:
            wait_for(worker, "a worker lives on without its parent")  # readable once the process has ended
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)


def test_the_number_of_cores_is_what_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7})
    assert num_cores() == 3
