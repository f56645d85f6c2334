"""Where a training step of each objective spends its time, and how near it comes to the machine's matrix products."""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.figures import spread, table
from benchmarks.worker import Clock
from lit_refusion.objective import Objective

OBJECTIVES = ("ar", "refusion", "llada", "bd3", "dream", "orthrus")
KINDS = ("matrix products", "attention", "head and loss", "optimizer", "norms, elementwise, copies", "Python, other")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
LOSSES = ("aten::_log_softmax", "aten::nll_loss", "aten::logsumexp", "aten::_softmax", "aten::linear_cross_entropy")


def measure(asked: argparse.Namespace, documents: Any) -> dict[str, Any]:
    """A row for each objective, with the first vocabulary."""
    from benchmarks.train import folded, model_folder

    size = int(asked.vocab.split(",")[0])
    documents = folded(documents, size)[: 2 * asked.micro_batch]
    rate = product_rate()
    with model_folder(asked, size) as model:
        rows = [profiled(asked, str(model), name, documents, size, rate) for name in OBJECTIVES]
    print(
        f"## Where a step goes, width {asked.width}, {asked.layers} layers, vocabulary {size:,}, {len(documents)} "
        f"documents, padded\n\nMatrix products of 1,024 x 1,024 in fp32: {rate / 1e9:,.1f} GFLOP/s on one thread.\n"
    )
    titles = ("objective", "ms a step", *KINDS, "GFLOP a step", "GFLOP/s", "of the products' rate")
    print(table(titles, [_cells(row) for row in rows]), flush=True)
    return {"product_rate": rate, "objectives": rows}


def product_rate() -> float:
    """FLOP/s of a large fp32 matrix product: the best of several."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    seconds = []
    for _ in range(6):
        clock = Clock()
        torch.mm(a, b)
        seconds.append(clock.read()["cpu_seconds"])
    return 2 * 1024**3 / min(seconds)


def profiled(
    asked: argparse.Namespace, model: str, name: str, documents: Any, vocab_size: int, rate: float
) -> dict[str, Any]:
    """One objective: steps timed plainly, one counted, one under the profiler."""
    from benchmarks.train import step
    from benchmarks.train_worker import Ours, load_objective

    ours = Ours()
    ours.load(model, kernel=asked.kernels.split(",")[0], checkpointing=asked.checkpointing)
    ours.objective = load_objective(name)
    prepare(ours.objective, ours)
    ours.begin_training(1e-4)
    request = step(asked, "padded", documents)
    run: Callable[[], dict[str, float]] = lambda: ours.train(**request)  # noqa: E731
    run()
    times = [run() for _ in range(max(2, asked.repeats))]
    with FlopCounterMode(display=False) as counter:
        run()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        whole = run()
    shares = split(profiler.events(), vocab_size, 1e6 * whole["seconds"])
    cpu = spread([time["cpu_seconds"] for time in times])
    flops = counter.get_total_flops() + attention_flops(profiler.events())
    return {
        "objective": name,
        "seconds": spread([time["seconds"] for time in times]),
        "cpu_seconds": cpu,
        "shares": shares,
        "flop": flops,
        "flop_rate": flops / cpu["median"],
        "utilisation": flops / cpu["median"] / rate,
        "places": times[0]["places"],
    }


def prepare(objective: Objective, ours: Any) -> None:
    """What an objective does to the model before it is trained."""
    objective.prepare(ours.backbone)


def split(events: Any, vocab_size: int, total: float) -> dict[str, float]:
    """Shares of the whole step's time (microseconds) by kind; what no operation explains is Python's."""
    spent: Counter[str] = Counter()
    for event in events:
        spent[kind_of(event, vocab_size)] += event.self_cpu_time_total
    del spent[""]
    spent[KINDS[-1]] += max(0.0, total - sum(spent.values()))
    return {name: spent[name] / sum(spent.values()) for name in KINDS}


def kind_of(event: Any, vocab_size: int) -> str:
    """The kind of an operation's own time; "" for frames of the autograd engine, which are Python's and others'."""
    names = [event.name]
    parent = event.cpu_parent
    while parent is not None:
        names.append(parent.name)
        parent = parent.cpu_parent
    if any(name.startswith("Optimizer.step") for name in names):
        return "optimizer"
    if any("scaled_dot_product" in name for name in names):
        return "attention"
    if not event.name.startswith("aten::"):
        return ""
    has_vocabulary = any(vocab_size in shape for shape in event.input_shapes or [] if isinstance(shape, list))
    if event.name.startswith(LOSSES) or (has_vocabulary and "embedding" not in event.name):
        return "head and loss"
    return "matrix products" if event.name in PRODUCTS else "norms, elementwise, copies"


def attention_flops(events: Any) -> int:
    """FLOP of CPU attention, which torch's counter leaves out: 2 products forward, 5 backward (two of them anew)."""
    total = 0
    for event in events:
        if event.name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
            is_backward = event.name.endswith("backward")
            b, heads, queries, size = event.input_shapes[1 if is_backward else 0]
            keys = event.input_shapes[2 if is_backward else 1][2]
            total += (5 if is_backward else 2) * 2 * b * heads * queries * keys * size
    return total


def _cells(row: dict[str, Any]) -> list[str]:
    shares = [f"{row['shares'][name]:.0%}" for name in KINDS]
    return [
        row["objective"], f"{1000 * row['cpu_seconds']['median']:,.0f}", *shares, f"{row['flop'] / 1e9:,.1f}",
        f"{row['flop_rate'] / 1e9:,.1f}", f"{row['utilisation']:.0%}",
    ]  # fmt: skip
