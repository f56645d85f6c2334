"""`lit-refusion preview`: what an objective makes of one example."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lit_refusion.commands import compose
from lit_refusion.data.remote import CacheConfig
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError
from lit_refusion.noise import Stream, noise
from lit_refusion.objective import Objective
from lit_refusion.preview import MAX_PICTURE, draw_mask, show_view
from lit_refusion.schema import build
from lit_refusion.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class PreviewConfig:
    """What to show.

    Args:
        data: folder of prepared data, or a URL of one.
        cache: where the files of a URL are kept.
        objective: the training method.
        example: number of the example.
        epoch: epoch whose noise is shown.
        seed: seed of the noise.
        step: optimizer step whose attention is drawn (schedules).
        out: folder for the pictures of the attention masks.
    """

    data: str
    cache: CacheConfig
    objective: Objective
    example: int
    epoch: int
    seed: int
    step: int
    out: str

    def __post_init__(self) -> None:
        for name in ("epoch", "seed", "step"):
            if not 0 <= getattr(self, name) < 2**63:
                raise UserError(f"{name}={getattr(self, name)}: must not be negative, and fit into 63 bits")


def run(arguments: argparse.Namespace) -> int:
    """Show the rows of one example as training makes them (with independent mask rates)."""
    config = compose(arguments)
    if config is None:
        return 0
    settings = build({**config, "data": config["data"]["folder"]}, PreviewConfig)
    shards = Shards(settings.data, cache=settings.cache)
    if not 0 <= settings.example < len(shards):
        raise UserError(f"example={settings.example}: {settings.data} has examples 0 to {len(shards) - 1}")
    tokenizer = load_tokenizer(shards.folder / "tokenizer")
    example = shards[settings.example]
    rng = noise(settings.seed, index=example.index, epoch=settings.epoch, stream=Stream.TRAIN_NOISE)
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    spec = settings.objective.spec(None).to_dict()
    console.print("conventions: " + ", ".join(f"{name} {value}" for name, value in spec.items()), markup=False)
    for number, view in enumerate(settings.objective.views(example, rng)):
        show_view(view, example, settings.objective, tokenizer, console)
        if len(view) > MAX_PICTURE:
            console.print(f"the row has {len(view)} tokens; masks are drawn up to {MAX_PICTURE}")
            continue
        choice = next((text[10:] for text in arguments.overrides if text.startswith("objective=")), "default")
        path = Path(settings.out) / f"{choice}-{example.index}-{number}.png"
        try:
            draw_mask(view, settings.objective, path, step=settings.step)
            console.print(f"attention mask: {path}", markup=False)
        except ImportError:
            console.print(
                "the picture of the attention mask needs an extra: pip install 'lit-refusion[plots]'", markup=False
            )
    return 0
