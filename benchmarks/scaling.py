"""Step time, traffic and memory of every strategy on the CPUs of one machine: `python -m benchmarks.scaling`.

Trains a model of 27 M parameters on the demo's data with 1, 2 and 4 processes; prints a Markdown table, draws a plot.
All processes share the machine's cores, so more of them are not faster here: look at traffic and memory, and compare
times of equal numbers of processes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.data import status
from lit_refusion.cli import main as command
from lit_refusion.config import load_config
from lit_refusion.memory import Shape, estimate
from lit_refusion.module import TrainingModule
from lit_refusion.schema import build
from lit_refusion.strategy import StrategyConfig

MODEL = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 1536,
}  # fmt: skip
SHARDED = ("fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
CASES = [("single", 1), *((name, ranks) for ranks in (2, 4) for name in ("ddp", *SHARDED))]
WARMUP, TIMED = 2, 4
PROFILED = WARMUP + TIMED + 1
MIB = 2**20


def main() -> None:
    """All cases, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/benchmark_scaling", help="where data and runs go")
    parser.add_argument("--examples", type=int, default=8, help="examples of a step, all processes together")
    parser.add_argument("--plot", help="picture to write")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # a process of one case: its settings
    arguments = parser.parse_args()
    if arguments.case:
        measure(json.loads(arguments.case))
        return
    if arguments.examples % 4:
        parser.error(f"--examples {arguments.examples}: give a multiple of 4")
    folder = Path(arguments.folder)
    if not (folder / "data").exists():
        assert command(["demo", "until=prepare", f"folder={folder}"]) == 0
    results = [run_case(name, ranks, folder, arguments.examples) for name, ranks in CASES]
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(results))
    if arguments.plot:
        draw(results, Path(arguments.plot))


def run_case(name: str, ranks: int, folder: Path, examples: int) -> dict[str, Any]:
    """Train with a strategy; the figures of rank 0, and the largest peak and state of all ranks."""
    run = folder / f"{name}-{ranks}-{time.time_ns()}"
    settings = [
        "train", "objective=refusion", "data=prepared", f"data.folder={folder}/data", f"run={run}", f"strategy={name}",
        *(f"++backbone.architecture.{key}={value}" for key, value in MODEL.items()),
        f"trainer.global_batch_size={examples}", f"loader.micro_batch_size={examples // 4}", "trainer.loggers=[]",
        f"trainer.max_steps={PROFILED}", "trainer.log_every=100", "trainer.checkpoint_every=1000",
        "loader.validation_fraction=0", "trainer.accelerator=cpu", "trainer.progress=none",
        # DeepSpeed's default buckets are larger than this model.
        *([f"strategy.{kind}_bucket_size=1000000" for kind in ("reduce", "allgather")] if "zero" in name else []),
    ]  # fmt: skip
    case = json.dumps({"settings": settings, "out": str(run)})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*torchrun, "-m", "benchmarks.scaling", "--case", case], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name} on {ranks} ranks failed:\n{done.stderr[-3000:]}")
    figures = [json.loads(path.read_text()) for path in sorted(run.glob("figures-*.json"))]
    largest = {key: max(item[key] for item in figures) for key in ("peak", "state")}
    return {"strategy": name, "ranks": ranks, **figures[0], **largest, "formula": formula(name, ranks)}


def formula(name: str, ranks: int) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states by ZeRO's formulas, without activations."""
    config = load_config("train", [f"strategy={name}"])
    shape = Shape.of(model_config())
    placement = build(config["strategy"], StrategyConfig).placement(ranks)
    return estimate(shape, placement, is_bf16=False, checkpointing=False, tokens=0, supervised=0)


def model_config() -> Any:
    """The Hugging Face config of the model."""
    from lit_refusion.model_loading import fresh_config
    from lit_refusion.tokenizer import load_tokenizer

    fields = {**load_config("train", [])["backbone"]["architecture"], **MODEL}
    demo = Path(__file__).parent.parent / "lit_refusion" / "demo" / "tokenizer"
    return fresh_config(fields, load_tokenizer(demo))


@dataclass
class Watch:
    """Times the steps, notes the memory of the timed ones, and profiles the last one."""

    peak: int = 0
    state: int = 0
    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=lambda: [0] * (PROFILED + 1))
    profiler: Any = None
    seen: int = 0

    def before(self, module: TrainingModule, batch: Any) -> None:
        """Forget the peak of what came before the timed steps; start the profiler with the last step."""
        if module.global_step == WARMUP and not self.tokens[WARMUP]:
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        self.tokens[module.global_step] += int((batch.segment_ids > 0).sum())
        if module.global_step == PROFILED - 1 and self.profiler is None:
            self.profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profiler.start()

    def after(self, module: TrainingModule) -> None:
        """Note when a step ends."""
        if module.global_step > self.seen:
            self.seen = module.global_step
            self.ends.append(time.perf_counter())
            if self.seen == WARMUP + TIMED:
                self.peak, self.state = status("VmHWM") * 1024, live_tensors()
            if self.seen == PROFILED:
                self.profiler.stop()


def measure(case: dict[str, Any]) -> None:
    """One process of a case: train under a watch, and write the figures down."""
    if "deepspeed" in " ".join(case["settings"]):
        import deepspeed  # noqa: F401  before the memory is first looked at
    watch, rank = Watch(), int(os.environ["RANK"])
    ended = TrainingModule.on_train_batch_end

    def on_train_batch_end(self: TrainingModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        ended(self, outputs, batch, batch_idx)
        watch.after(self)

    TrainingModule.on_train_batch_start = lambda self, batch, batch_idx: watch.before(self, batch)  # type: ignore[method-assign,assignment]
    TrainingModule.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]
    before = status("VmRSS")
    assert command(case["settings"]) == 0
    steps = sorted(end - start for start, end in zip(watch.ends[WARMUP - 1 :], watch.ends[WARMUP : WARMUP + TIMED]))
    figures = {
        "seconds": steps[len(steps) // 2],
        "tokens": sum(watch.tokens[WARMUP : WARMUP + TIMED]) / TIMED,
        "sent": payloads(watch.profiler),
        "peak": watch.peak - before * 1024,
        "state": watch.state,
    }
    Path(case["out"], f"figures-{rank}.json").write_text(json.dumps(figures), encoding="utf-8")


def payloads(profiler: Any) -> dict[str, int]:
    """Bytes (fp32) of the whole tensors that one step reduces, scatters and gathers, by kind of collective."""
    sizes: Counter[str] = Counter()
    for event in profiler.events():
        shapes = [shape for shape in event.input_shapes or [] if shape]
        if not shapes or not event.name.startswith(("gloo:", "c10d::_")):
            continue
        numbers = [4 * int(torch.Size(shape).numel()) for shape in shapes]
        if event.name == "c10d::_reduce_scatter_base_":
            sizes["reduce-scatter"] += max(numbers)
            sizes["all-reduce"] -= max(numbers)  # gloo makes it of an all-reduce, which is seen as well
        elif event.name == "c10d::_allgather_base_":
            sizes["all-gather"] += max(numbers)
        elif event.name in ("gloo:all_reduce", "gloo:reduce", "gloo:broadcast"):
            sizes[event.name.removeprefix("gloo:").replace("_", "-")] += sum(numbers)
    return {name: size for name, size in sizes.items() if size > 0}


def live_tensors() -> int:
    """Bytes of all tensors that are there between two steps: weights, gradients, optimizer states, buffers."""
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors}.values())


def sent(payload: dict[str, int], ranks: int) -> float:
    """Bytes that a rank sends by ring algorithms."""
    share = (ranks - 1) / ranks
    return sum(size * share * (2 if kind == "all-reduce" else 1) for kind, size in payload.items())


def table(results: list[dict[str, Any]]) -> str:
    """Markdown."""
    parameters = 4 * Shape.of(model_config()).parameters
    lines = [
        "| strategy | ranks | s a step | tokens/s | sent a rank and step, in model sizes | collectives (MiB) "
        "| kept between steps (MiB) | by formula (MiB) | peak in a step (MiB) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for item in results:
        kinds = ", ".join(f"{kind} {size / MIB:.0f}" for kind, size in sorted(item["sent"].items())) or "none"
        speed = item["tokens"] * item["ranks"] / item["seconds"]
        traffic = sent(item["sent"], item["ranks"]) / parameters
        lines.append(
            f"| {item['strategy']} | {item['ranks']} | {item['seconds']:.2f} | {speed:,.0f} | {traffic:.2f} | {kinds} "
            f"| {item['state'] / MIB:,.0f} | {item['formula']['total'] / MIB:,.0f} | {item['peak'] / MIB:,.0f} |"
        )
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Memory of a rank, measured and by formula."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [f"{item['strategy'].replace('deepspeed_', '')}\n{item['ranks']}" for item in results]
    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    axes.bar(names, [item["peak"] / MIB for item in results], color="#deebf7", label="peak in a step, measured")
    axes.bar(names, [item["state"] / MIB for item in results], color="#9ecae1", label="kept between steps, measured")
    bottom = [0.0] * len(results)
    for part, colour in (("weights", "#08519c"), ("gradients", "#3182bd"), ("optimizer", "#fd8d3c")):
        heights = [item["formula"][part] / MIB for item in results]
        axes.bar(names, heights, width=0.4, bottom=bottom, color=colour, label=f"{part}, by formula")
        bottom = [below + height for below, height in zip(bottom, heights)]
    axes.set_ylabel("MiB a rank")
    axes.set_title("Memory of a rank (strategy, ranks)")
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])
    axes.legend(ncols=3, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
