"""Head and loss alone: time and memory of each kernel, forward and backward, by size of the vocabulary."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.figures import ratio, shown, spread, table, turns
from benchmarks.worker import Clock, Memory, Worker, serve
from lit_refusion.losses import fused_cross_entropy, token_cross_entropy
from lit_refusion.objective import Objective

WHOLE = "all logits at once"


def measure(asked: argparse.Namespace, documents: Any) -> list[dict[str, Any]]:
    """Every kernel, each in a process of its own."""
    from benchmarks.train_worker import Documents, load_objective

    num_rows = supervised_rows(load_objective("refusion"), Documents(documents[: asked.micro_batch]))
    rows = []
    for size in map(int, asked.vocab.split(",")):
        with ExitStack() as workers:
            names = [WHOLE, *asked.kernels.split(",")]
            kernels = {name: workers.enter_context(Worker("benchmarks.train_loss")) for name in names}
            for name, worker in kernels.items():
                worker.ask("begin", name=name, width=asked.width, num_rows=num_rows, vocab_size=size)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in kernels}
            for repeat in range(asked.repeats):
                for name in turns(list(kernels), repeat):
                    found[name].append(kernels[name].ask("run"))
            memory = {name: worker.ask("extra_memory") for name, worker in kernels.items()}
        rows += figures(size, found, memory)
    print(f"## Head and loss, width {asked.width}, {num_rows:,} supervised rows of {asked.micro_batch} documents\n")
    titles = ("vocabulary", "kernel", "ms", "CPU ms", "time, as a share", "extra memory (MB)", "sum of the losses")
    print(table(titles, [_cells(row) for row in rows]), flush=True)
    return rows


def supervised_rows(objective: Objective, documents: Any) -> int:
    """Rows with a loss in a micro-batch."""
    rng = np.random.default_rng(0)
    return sum(int((view.targets >= 0).sum()) for item in documents.examples for view in objective.views(item, rng))


def figures(size: int, found: dict[str, list[dict[str, float]]], memory: dict[str, int]) -> list[dict[str, Any]]:
    """Times and memory; shares are of the first's."""
    seconds = {name: [run["seconds"] for run in runs] for name, runs in found.items()}
    return [
        {
            "vocabulary": size,
            "kernel": name,
            "seconds": spread(seconds[name]),
            "cpu_seconds": spread([run["cpu_seconds"] for run in runs]),
            "share": ratio(seconds[name], seconds[WHOLE]),
            "extra_memory": memory[name],
            "loss": runs[0]["loss"],
        }
        for name, runs in found.items()
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    times = [shown({k: 1000 * v for k, v in row[name].items()}) for name in ("seconds", "cpu_seconds")]
    memory, share = f"{row['extra_memory'] / 1e6:,.0f}", shown(row["share"], ".2f")
    return [f"{row['vocabulary']:,}", row["kernel"], *times, share, memory, f"{row['loss']:.3f}"]


class Kernel:
    """One kernel with a head and rows."""

    def begin(self, name: str, *, width: int, num_rows: int, vocab_size: int) -> None:
        """Make them, run once, and count memory from there on."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.name = name
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.hidden = torch.randn(num_rows, width, requires_grad=True)
        self.targets, self.weights = torch.randint(vocab_size, (num_rows,)), torch.rand(num_rows)
        self.run()
        self.memory = Memory()

    def run(self) -> dict[str, float]:
        """Forward and backward."""
        clock = Clock()
        loss = self._loss()
        (loss * self.weights).sum().backward()
        found = {**clock.read(), "loss": loss.sum().item()}
        self.hidden.grad = self.head.weight.grad = None
        return found

    def extra_memory(self) -> int:
        """Bytes, the gradient of the head included."""
        return self.memory.extra()

    def _loss(self) -> torch.Tensor:
        if self.name == WHOLE:
            return F.cross_entropy(self.head(self.hidden).float(), self.targets, reduction="none")
        if self.name == "chunked":
            return token_cross_entropy(self.head, self.hidden, self.targets, vocab_size=len(self.head.weight))
        return fused_cross_entropy(self.head, self.hidden, self.targets, kernel=self.name)  # type: ignore[arg-type]


if __name__ == "__main__":
    kernel = Kernel()
    serve({name: getattr(kernel, name) for name in ("begin", "run", "extra_memory")})
