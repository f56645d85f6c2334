"""How fast data is prepared and loaded: `python -m benchmarks.data --records FILE.jsonl --tokenizer FOLDER`.

Prints Markdown tables. Each figure is of one run; comparisons are made within one call, and given as ratios too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from benchmarks import synthetic_data
from benchmarks.worker import status
from lit_refusion.config import load_config
from lit_refusion.data.loader import DataModule, LoaderConfig
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.shards import Shards
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.tokenizer import load_tokenizer

GLOBAL_BATCH, MICRO_BATCH = 512, 16


def main() -> None:
    """Run all three measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", required=True, help="JSONL with query and response")
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--folder", default="runs/benchmark_data", help="where data sets go; they are kept")
    parser.add_argument("--repeat", type=int, default=4, help="times that the records are repeated for `prepare`")
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 120_000, 3_700_000])
    parser.add_argument("--start", help=argparse.SUPPRESS)  # child process: measure one start
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(measure_start(arguments.start)))
        return
    folder = Path(arguments.folder)
    real = preparing(arguments, folder)
    loading(real)
    starting(real, folder, arguments.sizes, arguments)


def preparing(arguments: argparse.Namespace, folder: Path) -> Shards:
    """Prepare against a plain loop over the same tokenizer; returns the data."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line for line in Path(arguments.records).read_text(encoding="utf-8").split("\n") if line]
    records = folder / "records.jsonl"
    records.write_text("".join(line + "\n" for _ in range(arguments.repeat) for line in lines), encoding="utf-8")
    num_records = arguments.repeat * len(lines)
    print(f"## Preparing {num_records:,} records\n\n| way | records/s | ratio |\n|---|---|---|")
    plain = num_records / _seconds(lambda: plain_loop(records, arguments.tokenizer))
    print(f"| plain loop, one record after another | {plain:,.0f} | 1.00 |")
    for num_workers in (0, 1, 2):
        settings = _prepare_settings(records, arguments.tokenizer, folder / "real")
        shutil.rmtree(folder / "real", ignore_errors=True)
        speed = num_records / _seconds(lambda: prepare(settings, num_workers=num_workers))  # noqa: B023
        print(f"| prepare, {num_workers} workers | {speed:,.0f} | {speed / plain:.2f} |")
    return Shards(folder / "real")


def plain_loop(records: Path, tokenizer_path: str) -> None:
    """What a training script does at its start: read, apply the template, tokenise, keep in memory."""
    tokenizer = load_tokenizer(tokenizer_path)
    kept = []
    with records.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            messages = [{"role": "user", "content": record["query"]}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompt_ids = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
            response_ids = tokenizer(record["response"], add_special_tokens=False, verbose=False)["input_ids"]
            kept.append((prompt_ids, [*response_ids, tokenizer.eos_token_id]))


def loading(shards: Shards) -> None:
    """Batches without a model, one objective, padded and packed."""
    print(f"\n## Loading, {len(shards):,} examples, micro-batches of {MICRO_BATCH}, objective refusion\n")
    print("| layout | workers | examples/s | tokens/s | padding |\n|---|---|---|---|---|")
    for layout in ("padded", "packed"):
        for num_workers in (0, 1, 2):
            data = _data_module(shards, layout=layout, num_workers=num_workers, steps=20)
            batches = iter(data.train_dataloader())
            next(batches)  # the workers have started
            start, examples, tokens, places = time.perf_counter(), 0, 0, 0
            for batch in batches:
                examples += MICRO_BATCH
                tokens += int((batch.segment_ids > 0).sum())
                places += batch.segment_ids.numel()
            seconds = time.perf_counter() - start
            figures = f"{examples / seconds:,.0f} | {tokens / seconds:,.0f} | {1 - tokens / places:.1%}"
            print(f"| {layout} | {num_workers} | {figures} |")


def starting(real: Shards, folder: Path, sizes: list[int], arguments: argparse.Namespace) -> None:
    """From nothing to the first batch, in a fresh process, by number of examples."""
    print(f"\n## Start, synthetic sets with the lengths of {arguments.records}\n")
    print("| examples | disk | open | plan | first batch | memory for all three |\n|---|---|---|---|---|---|")
    for size in sizes:
        path = folder / f"synthetic-{size}"
        if not path.exists():
            synthetic_data.write(path, real, num_examples=size)
        command = [sys.executable, "-m", "benchmarks.data", "--start", str(path), "--records", "-", "--tokenizer", "-"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e9
        times = " | ".join(f"{found[name] * 1000:.0f} ms" for name in ("open", "plan", "batch"))
        print(f"| {size:,} | {disk:.2f} GB | {times} | {found['memory']:.1f} MB |")


def measure_start(path: str) -> dict[str, float]:
    """Seconds to open a data set, to make its plan and to get a batch; MB that the peak memory rose by."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = status("VmRSS")
    moments = [time.perf_counter()]
    shards = Shards(path)
    moments.append(time.perf_counter())
    data = _data_module(shards, layout="padded", num_workers=0, steps=1000)
    moments.append(time.perf_counter())
    next(iter(data.train_dataloader()))
    moments.append(time.perf_counter())
    memory = (status("VmHWM") - before) / 1024
    names = ("open", "plan", "batch")
    return {**{n: end - start for n, start, end in zip(names, moments, moments[1:])}, "memory": memory}


def _data_module(shards: Shards, *, layout: str, num_workers: int, steps: int) -> DataModule:
    config = load_config(
        "train", [f"loader={layout}", f"loader.num_workers={num_workers}", f"loader.micro_batch_size={MICRO_BATCH}"]
    )
    data = DataModule(
        shards,
        build(config["objective"], Objective, key="objective"),
        config=build(config["loader"], LoaderConfig, key="loader"),
        mask_token_id=4,
        seed=0,
        global_batch_size=GLOBAL_BATCH,
    )
    data.trainer = SimpleNamespace(world_size=1, global_rank=0, global_step=0, max_steps=steps)  # type: ignore[assignment]
    return data


def _prepare_settings(records: Path, tokenizer: str, folder: Path) -> PrepareConfig:
    overrides = [f"data.sources.0.files=[{records}]", f"data.tokenizer={tokenizer}", f"data.folder={folder}"]
    return build(load_config("prepare", ["data=files", *overrides])["data"], PrepareConfig, key="data")


def _seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
