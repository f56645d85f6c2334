"""`lit-refusion demo`: a controlled comparison on the embedded data, in minutes on a laptop CPU."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_refusion.commands import ablate, compose
from lit_refusion.config import load_config
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.data.shards import Shards
from lit_refusion.demo.word_problems import generate
from lit_refusion.errors import UserError
from lit_refusion.new_file import write_file
from lit_refusion.schema import build


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The demo.

    Args:
        folder: where everything goes.
        until: last stage: "prepare" writes the data only.
        num_train: problems to train on.
        num_heldout: others, for evaluation.
        ablate: settings of `lit-refusion ablate`.
    """

    folder: str
    until: Literal["prepare", "compare"]
    num_train: int
    num_heldout: int
    ablate: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("num_train", "num_heldout"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")


def run(arguments: argparse.Namespace) -> int:
    """Prepare the data, then run the ablation; what an earlier call finished is kept."""
    config = compose(arguments)
    if config is None:
        return 0
    settings = build(config, DemoConfig)
    start = time.perf_counter()
    _prepare(settings)
    if settings.until == "prepare":
        return 0
    code = ablate.start([*settings.ablate, f"out={settings.folder}"], config_dir=arguments.config_dir)
    print(f"{time.perf_counter() - start:.0f} s; everything is in {settings.folder}")
    return code


def _prepare(settings: DemoConfig) -> None:
    """Write the problems and prepare those to train on."""
    data, records = Path(settings.folder, "data"), Path(settings.folder, "records")
    heldout = [
        {"question": problem["query"], "answer": problem["answer"]}
        for problem in generate(settings.num_heldout, seed=1, held_out=True)
    ]
    _write(records / "heldout.jsonl", heldout)
    if not data.exists():
        _write(records / "train.jsonl", generate(settings.num_train, seed=0))
        overrides = ["data=demo", f"data.folder={data}", f"data.sources.0.files=[{records / 'train.jsonl'}]"]
        prepare(build(load_config("prepare", overrides)["data"], PrepareConfig, key="data"))
    manifest = Shards(data).manifest
    print(
        f"{manifest.num_examples:,} word problems to train on, longest {manifest.longest} tokens; {len(heldout)} "
        "others held out"
    )


def _write(path: Path, lines: list[dict[str, str]]) -> None:
    write_file(path, "".join(json.dumps(line) + "\n" for line in lines), name="folder=")
