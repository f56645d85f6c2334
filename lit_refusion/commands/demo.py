"""`lit-refusion demo`: prepare, train, decode and compare on the embedded data, in minutes on a laptop CPU."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from lit_refusion.commands import compose
from lit_refusion.config import load_config
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.shards import Shards
from lit_refusion.decoder import Decoder
from lit_refusion.demo.comparison import Score, plot_losses, score, table
from lit_refusion.demo.word_problems import generate
from lit_refusion.errors import UserError
from lit_refusion.export import ExportConfig, export, load_model
from lit_refusion.schema import build


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of training and decoding; the arms differ in nothing else.

    Args:
        train: settings of `lit-refusion train`.
        generate: settings of `lit-refusion generate`.
    """

    train: tuple[str, ...]
    generate: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The demo.

    Args:
        folder: where everything goes.
        until: last stage to run.
        num_train: problems to train on.
        num_heldout: problems to decode.
        num_singles: of those, problems decoded one by one to time batch 1.
        train: settings of `lit-refusion train` for all arms.
        arms: what is compared.
    """

    folder: str
    until: Literal["prepare", "train", "decode"]
    num_train: int
    num_heldout: int
    num_singles: int
    train: tuple[str, ...]
    arms: dict[str, Arm]

    def __post_init__(self) -> None:
        for name in ("num_train", "num_heldout", "num_singles"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")


def run(arguments: argparse.Namespace) -> int:
    """Run the stages; what an earlier run finished is kept."""
    config = compose(arguments)
    if config is None:
        return 0
    settings = build(config, DemoConfig)
    folder = Path(settings.folder)
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    start = time.perf_counter()
    problems = _prepare(settings, folder, console)
    if settings.until == "prepare":
        return 0
    _train(settings, folder, console)
    if settings.until == "train":
        return 0
    scores = _decode(settings, folder, problems)
    _report(scores, problems, folder, console)
    console.print(f"done in {time.perf_counter() - start:.0f} s; everything is in {folder}", style="dim")
    return 0


def _prepare(settings: DemoConfig, folder: Path, console: Console) -> list[dict[str, str]]:
    """Write and prepare the training problems; return the held-out ones."""
    data, records = folder / "data", folder / "records" / "train.jsonl"
    heldout = generate(settings.num_heldout, seed=1, held_out=True)
    records.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"question": problem["query"], "answer": problem["answer"]} for problem in heldout]
    (records.parent / "heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if not data.exists():
        problems = generate(settings.num_train, seed=0)
        records.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")
        overrides = ["data=demo", f"data.folder={data}", f"data.sources.0.files=[{records}]"]
        prepare(build(load_config("prepare", overrides)["data"], PrepareConfig, key="data"))
    manifest = Shards(data).manifest
    console.print(
        f"[bold]data[/] {manifest.num_examples:,} word problems, longest {manifest.longest} tokens; "
        f"{len(heldout)} others held out"
    )
    return heldout


def _train(settings: DemoConfig, folder: Path, console: Console) -> None:
    """Train all arms at the same time, one thread each, from the same starting weights."""
    console.print(f"[bold]training[/] {' and '.join(settings.arms)}, one process each; loss curves end up in {folder}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    processes = {}
    for name, arm in settings.arms.items():
        command = [
            *(sys.executable, "-m", "lit_refusion.cli", "train", "data=demo", f"data.folder={folder / 'data'}"),
            *(f"run={folder / name}", "resume=auto", "trainer.progress=lines", *settings.train, *arm.train),
        ]
        processes[name] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
    threads = [threading.Thread(target=_relay, args=item, daemon=True) for item in processes.items()]
    try:
        for thread in threads:
            thread.start()
        codes = {name: process.wait() for name, process in processes.items()}
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        for process in processes.values():  # Ctrl-C reached them as well: let them save
            process.wait()
        raise
    failed = [name for name, code in codes.items() if code]
    if failed:
        raise UserError(f"training of {', '.join(failed)} failed; its messages are above")


def _relay(name: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"{name:9} | {line}", end="", flush=True)


def _decode(settings: DemoConfig, folder: Path, problems: list[dict[str, str]]) -> list[Score]:
    """Export each arm and decode the held-out problems with it."""
    scores = []
    for name, arm in settings.arms.items():
        out = folder / f"{name}-model"
        shutil.rmtree(out, ignore_errors=True)
        export(ExportConfig(run=str(folder / name), checkpoint="best", out=str(out), dtype="auto"))
        model = load_model(str(out), objective=None)
        config: dict[str, Any] = load_config("generate", [f"model={out}", "prompt=-", *arm.generate])
        decoder = build(config["decoder"], Decoder, key="decoder")
        scores.append(score(name, model, decoder, problems, num_singles=settings.num_singles))
    return scores


def _report(scores: list[Score], problems: list[dict[str, str]], folder: Path, console: Console) -> None:
    """Print the table and an example; write results and loss curves."""
    results = {"problems": problems, "scores": [item.to_dict() for item in scores]}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console.print(table(scores))
    console.print(f"[bold]problem[/] {problems[0]['query']}  (answer {problems[0]['answer']})")
    for item in scores:
        console.print(f"[bold]{item.arm}[/] ", end="")
        console.print(item.texts[0], markup=False)
    try:
        plot_losses({item.arm: folder / item.arm for item in scores}, folder / "loss.png")
        console.print(f"loss curves: {folder / 'loss.png'}")
    except ImportError:
        console.print("loss curves need an extra: pip install 'lit-refusion[plots]'")
