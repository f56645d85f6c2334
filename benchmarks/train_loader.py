"""Whether the loader keeps up: batches a second of the ReFusion objective beside the speed of training."""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.figures import ratio, shown, spread, table
from lit_refusion.config import load_config
from lit_refusion.data.loader import DataModule, LoaderConfig
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.shards import Shards
from lit_refusion.schema import build

TARGET = 10
"""The loader should be this many times as fast as training."""


def measure(asked: argparse.Namespace, documents: Any) -> dict[str, Any]:
    """Tokens a second of the loader, and of training with the first vocabulary, by turns."""
    from benchmarks.train import folded, model_folder, step
    from benchmarks.train_worker import Ours

    size = int(asked.vocab.split(",")[0])
    ways = [(layout, workers) for layout in ("padded", "packed") for workers in (0, 2)]
    speeds: dict[Any, list[float]] = {way: [] for way in [*ways, "training"]}
    num_tokens = sum(len(ids) for item in documents for ids in item.values())
    with tempfile.TemporaryDirectory(prefix="benchmark-loader-") as folder, model_folder(asked, size) as model:
        shards = prepared(asked, Path(folder) / "data")
        ours = Ours()
        ours.load(str(model), kernel=asked.kernels.split(",")[0], checkpointing=False)
        ours.begin_training(1e-4)
        request = step(asked, "padded", folded(documents, size))
        ours.train(**request)
        for _ in range(asked.repeats):
            for layout, num_workers in ways:
                speeds[layout, num_workers].append(loading(asked, shards, layout, num_workers))
            speeds["training"].append(num_tokens / ours.train(**request)["seconds"])
    print(f"## Loading, micro-batches of {asked.micro_batch}; training with a vocabulary of {size:,}\n")
    rows = [
        {"layout": layout, "workers": workers, "tokens_per_second": spread(speeds[layout, workers]),
         "ratio": ratio(speeds[layout, workers], speeds["training"])}
        for layout, workers in ways
    ]  # fmt: skip
    cells = [
        [f"{row['layout']}, {row['workers']} workers", shown(row["tokens_per_second"]), shown(row["ratio"], ".0f")]
        for row in rows
    ]
    trained = spread(speeds["training"])
    print(table(("", "tokens/s", f"times training (should be {TARGET})"), [*cells, ["training", shown(trained), "1"]]))
    return {"loading": rows, "training": trained}


def prepared(asked: argparse.Namespace, folder: Path) -> Shards:
    """The records as a data set."""
    overrides = [f"data.sources.0.files=[{asked.data}]", f"data.tokenizer={asked.tokenizer}", f"data.folder={folder}"]
    config = load_config("prepare", ["data=files", *overrides])
    prepare(build(config["data"], PrepareConfig, key="data"), num_workers=0)
    return Shards(folder)


def loading(asked: argparse.Namespace, shards: Shards, layout: str, num_workers: int) -> float:
    """Tokens a second, from the second batch on, over 100 micro-batches."""
    config = build(load_config("train", [f"loader={layout}"])["loader"], LoaderConfig, key="loader")
    data = DataModule(
        shards,
        _objective(),
        config=replace(
            config,
            micro_batch_size=asked.micro_batch,
            max_row_length=asked.row_length,
            num_workers=num_workers,
            validation_fraction=0.0,
        ),
        mask_token_id=0,
        seed=0,
        global_batch_size=asked.documents,
    )
    num_steps = max(2, 800 // asked.documents)
    data.trainer = SimpleNamespace(world_size=1, global_rank=0, global_step=0, max_steps=num_steps)  # type: ignore[assignment]
    batches = iter(data.train_dataloader())
    next(batches)  # the workers have started
    start, tokens = time.perf_counter(), 0
    for batch in batches:
        tokens += int((batch.segment_ids > 0).sum())
    seconds = time.perf_counter() - start
    data.release_workers()
    return tokens / seconds


def _objective() -> Any:
    from benchmarks.train_worker import load_objective

    return load_objective("refusion")
