"""Training runs for tests: their commands and files, and processes of their own that are cheap to start and to kill.

A new interpreter needs seconds to import torch and Lightning. `start` forks from a server that has imported them and
has done nothing else, so that a child is as clean as a new process and there at once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils import tensorboard  # noqa: F401  imported here, as the next one, so that no child has to
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

from lit_refusion import losses
from lit_refusion.callbacks.save_last import SaveLast
from lit_refusion.cli import main
from lit_refusion.config import choices
from lit_refusion.data.loader import ViewMaker
from lit_refusion.data.plan import Visit
from lit_refusion.module import TrainingModule
from lit_refusion.noise import Stream
from lit_refusion.run_folder import load_checkpoint
from tests.conftest import ARCHITECTURES, REPOSITORY

OBJECTIVES = choices("objective")
PACKED = ["loader=packed", "loader.max_row_length=120"]
LONGEST_CHILD = 120
"""Seconds after which a child that hangs is ended, so that its test fails."""


# Runs: data, commands, results


def prepared_data(folder: Path, tokenizer: Path, *, answer: str = "The answer is {}.") -> Path:
    """60 additions with responses of four lengths, prepared; `command` holds out a fifth."""
    records = [
        {"query": f"What is {a} + {b}?", "response": answer.format(a + b) + " Yes." * (a % 4)}
        for a in range(12)
        for b in range(5)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run("prepare", "data=files", f"data.sources.0.files=[{folder}/records.jsonl]", f"data.folder={folder}/data",
        f"data.tokenizer={tokenizer}", "num_workers=0")  # fmt: skip
    return folder / "data"


def run(*arguments: str) -> None:
    """A command in this process, which must succeed."""
    assert main(arguments) == 0, arguments


def command(data: Path, folder: Path, objective: str, *extra: str) -> list[str]:
    """6 steps of 8 examples, validated every 3 and saved every 2."""
    architecture = [f"++backbone.architecture.{name}={value}" for name, value in ARCHITECTURES["qwen3"].items()]
    return [
        "train", f"objective={objective}", "data=prepared", f"data.folder={data}", f"run={folder}",
        *architecture, "loader.micro_batch_size=8",
        "loader.validation_fraction=0.2", "trainer.global_batch_size=8", "trainer.max_steps=6",
        "trainer.validate_every=3", "trainer.checkpoint_every=2", "trainer.log_every=1", "trainer.progress=none",
        "trainer.accelerator=cpu", "optimizer.warmup_steps=2", "optimizer.eps=1e-4", "seed=3", *extra,
    ]  # fmt: skip


def checkpoint(folder: Path, name: str = "last") -> dict[str, Any]:
    return load_checkpoint(folder / "checkpoints" / f"{name}.ckpt")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint(folder)["state_dict"]


def metrics(folder: Path) -> list[dict[str, str]]:
    lines = (folder / "metrics.csv").read_text().splitlines()
    return [dict(zip(lines[0].split(","), line.split(","))) for line in lines[1:]]


def figures(folder: Path) -> list[dict[str, str]]:
    """The logged rows without time and memory, which differ between two runs of the same numbers."""
    cost = {"train/tokens_per_second", "train/seconds", "train/peak_memory_gb"}
    return [{name: x for name, x in row.items() if name not in cost} for row in metrics(folder)]


def as_it_was(folder: Path) -> Path:
    """The folder as it was at the first call, whatever has been done to it since."""
    kept = folder.with_name("kept")
    if not kept.exists():
        shutil.copytree(folder, kept)
    shutil.rmtree(folder)
    return Path(shutil.copytree(kept, folder))


def steps_with(figure: str, folder: Path) -> list[int]:
    """The steps that a figure was logged at."""
    return [int(row["step"]) for row in metrics(folder) if row.get(figure)]


def different(one: Any, two: Any, path: str = "") -> list[str]:
    """Where two nests of plain data and tensors are not the same to the bit."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return [] if torch.equal(one, two) else [path]
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return [place for key in one for place in different(one[key], two[key], f"{path}/{key}")]
    if isinstance(one, list | tuple) and type(one) is type(two) and len(one) == len(two):
        return [place for i, pair in enumerate(zip(one, two)) for place in different(*pair, f"{path}/{i}")]
    return [] if one == two else [f"{path}: {one!r} and {two!r}"]


def assert_same_state(folder: Path, reference: Path) -> None:
    """Weights, optimizer and schedule at the end, and the best weights, are the same to the bit."""
    for name in ("last", "best"):
        one, two = checkpoint(folder, name), checkpoint(reference, name)
        for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers"):
            assert different(one[key], two[key]) == [], (name, key)


def assert_same_run(folder: Path, reference: Path) -> None:
    """The same state, every row of figures once, and nothing half-written left over."""
    assert_same_state(folder, reference)
    assert figures(folder) == figures(reference)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
    ]
    assert not list(folder.glob("*.partial"))


# What happens to a run


@dataclass(frozen=True)
class Blow:
    """A signal that a run sends to itself at a place in its course.

    Args:
        number: the signal.
        place: "training", in the middle of a training step; "gradients", between backward and update; "validation", in
            the middle of one; "validated", when its figures are logged and nothing is saved; "saving last" or "saving
            best", with half of a checkpoint's bytes written; "renaming FILE", before FILE gets the name it is for.
        step: steps that are done by then; none for "renaming".
        turn: number, from 0, of the batch in this step or validation, or of the renaming in this process.
        group: send it to the whole process group, loader processes included.
    """

    number: signal.Signals
    place: str
    step: int = 0
    turn: int = 0
    group: bool = False

    def arm(self) -> None:
        """Have the code of this process deal the blow."""
        if self.place == "training":
            _before(TrainingModule, "training_step", lambda module, _, i: self._at(module, i % _accumulation(module)))
        elif self.place == "gradients":
            _before(TrainingModule, "configure_gradient_clipping", lambda module, *_: self._at(module))
        elif self.place == "validation":
            _before(TrainingModule, "validation_step", lambda module, _, i: self._at(module, i))
        elif self.place == "validated":
            _before(SaveLast, "on_validation_end", lambda _, trainer, module: self._at(module))
        elif self.place.startswith("renaming "):
            turns = iter([False] * self.turn + [True])
            name = self.place.removeprefix("renaming ")
            _before(Path, "replace", lambda path, _: path.name == name and next(turns, False) and self._strike())
        else:
            self._arm_save(self.place.removeprefix("saving "))

    def _arm_save(self, name: str) -> None:
        original = torch.save

        def save(state: dict[str, Any], file: Any) -> None:
            if Path(file.name).name == f".{name}.ckpt.partial" and state["global_step"] == self.step:
                memory = io.BytesIO()
                original(state, memory)
                file.write(memory.getvalue()[: memory.tell() // 2])
                file.flush()
                self._strike()
                file.seek(0)
            original(state, file)

        torch.save = save

    def _at(self, module: TrainingModule, turn: int = 0) -> None:
        if (module.global_step, turn) == (self.step, self.turn):
            self._strike()

    def _strike(self) -> None:
        (os.killpg if self.group else os.kill)(os.getpid(), self.number)


def _accumulation(module: TrainingModule) -> int:
    return module.trainer.accumulate_grad_batches


def _before(owner: type, name: str, act: Callable[..., Any]) -> None:
    """Have a method do something first."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return original(*args, **kwargs)

    setattr(owner, name, method)


def train(arguments: list[str], *blows: Blow, seen: Path | None = None) -> int:
    """A command in a child; `seen` gets a line "step example epoch" for every example that is trained on."""
    for blow in blows:
        blow.arm()
    if seen is not None:
        _note_examples(seen)
    return main(arguments)


def _note_examples(path: Path) -> None:
    """Write down what reaches `training_step`; without loader processes, batches come in the order they are made."""
    made: list[list[str]] = []

    def note(maker: ViewMaker, visits: list[Visit]) -> None:
        if maker.stream == Stream.TRAIN_NOISE:
            made.append([f"{visit.step} {visit.index} {visit.epoch}\n" for visit in visits])

    def write(*_: Any) -> None:
        with path.open("a") as file:
            file.writelines(made.pop(0))

    _before(ViewMaker, "batch", note)
    _before(TrainingModule, "training_step", write)


# Processes


@dataclass(frozen=True)
class Child:
    """A process that was started; it leads a process group of its own."""

    pid: int
    log: Path

    def wait(self) -> int:
        """Its exit code; minus the number of the signal where one killed it."""
        server = _server()
        server.send(self.pid)
        return server.recv()

    @property
    def output(self) -> str:
        """What it has written to stdout and stderr."""
        return self.log.read_text()


def start(
    function: Callable[..., int | None],
    *arguments: Any,
    log: Path,
    environment: Mapping[str, str] | None = None,
    **named: Any,
) -> Child:
    """A process that calls a function of an importable module and exits with what it returns."""
    server = _server()
    server.send((function, arguments, named, log, environment or {}))
    return Child(server.recv(), log)


def start_ranks(
    count: int, arguments: list[str], folder: Path, *, blows: Mapping[int, Blow] | None = None, name: str = "rank"
) -> list[Child]:
    """The ranks of one DDP run, as torchrun starts them; their logs and the examples they see go to `folder`."""
    return [
        start(
            train,
            [*arguments, f"trainer.devices={count}", "strategy=ddp"],
            *([blows[rank]] if blows and rank in blows else []),
            seen=folder / f"{name}{rank}.seen",
            log=folder / f"{name}{rank}.log",
            environment=environment,
        )
        for rank, environment in enumerate(torchrun_environments(count))
    ]


def train_all(commands: list[list[str]], max_logits: int = losses.MAX_LOGITS) -> int:
    """Several commands in one child, which stays in one process group."""
    losses.MAX_LOGITS = max_logits
    return max(main(arguments) for arguments in commands)


def run_ranks(count: int, commands: list[list[str]], folder: Path, **named: Any) -> None:
    """Several commands, one after the other, by the ranks of one world; they must succeed. See `train_all`."""
    environments = torchrun_environments(count) if count > 1 else [{"DS_ACCELERATOR": "cpu"}]
    children = [
        start(train_all, commands, log=folder / f"rank{rank}.log", environment=environment, **named)
        for rank, environment in enumerate(environments)
    ]
    codes = [child.wait() for child in children]
    assert codes == [0] * count, children[0].output[-3000:]


def torchrun_environments(count: int) -> list[dict[str, str]]:
    """The variables that torchrun gives to each rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu",
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@functools.cache
def _server() -> Connection:
    """The process that forks; it ends with this one."""
    here, there = multiprocessing.Pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.children import serve; serve({there.fileno()})"],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        pass_fds=[there.fileno()],
        start_new_session=True,
    )
    there.close()
    atexit.register(lambda: (process.terminate(), process.wait()))
    return here


def serve(descriptor: int) -> None:
    """Start a process for every task, and tell the exit code for every process number."""
    with contextlib.redirect_stdout(io.StringIO()):
        main(["train", "--show-config"])  # so that what Hydra imports is there as well
    gc.freeze()  # so that children do not copy the pages that they collect garbage in
    connection, context = Connection(descriptor), multiprocessing.get_context("fork")
    processes: dict[int, Any] = {}
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if isinstance(request, int):
            process = processes.pop(request)
            process.join()
            connection.send(process.exitcode)
        else:
            process = context.Process(target=_child, args=request)
            process.start()
            processes[process.pid] = process
            connection.send(process.pid)


def _child(
    function: Callable[..., int | None],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    log: Path,
    environment: Mapping[str, str],
) -> None:
    os.setsid()
    signal.alarm(LONGEST_CHILD)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.exit(function(*arguments, **named))
