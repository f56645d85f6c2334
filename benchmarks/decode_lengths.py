"""What a pass costs by the length of the prompt and the number of selected slots, ours beside the official code's.

All slots of a block are selected and none of their tokens passes its test, so every block takes the same passes: one to
select, one to verify, then slot_size - 1 pairs that complete the slots. The official code copies the whole cache for
every selected slot to do that. The prompt's own pass is taken out: a response of five blocks less one of one block.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks import reference
from benchmarks.figures import ratio, shown, spread, table, turns
from benchmarks.reference import Measured, Setting
from benchmarks.worker import Clock
from lit_refusion.backbone import Backbone
from lit_refusion.tokenizer import load_tokenizer

SLOT_SIZE, NUM_BLOCKS = 4, 4
SELECTED = (1, 4, 16)
NEVER = 10**9
"""An end-of-sequence id that no model says."""

Timed = Callable[[Setting, list[int]], Measured]


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Every length with every number of slots."""
    backbone = Backbone.from_pretrained(asked.model, tokenizer=load_tokenizer(asked.model))
    backbone._eos_token_id = NEVER
    worker = reference.start(asked, asked.model)
    contenders: dict[str, Timed] = {}
    if worker:
        contenders["reference"] = lambda setting, prompt: reference.decode(
            worker, setting, [prompt], eos_token_id=NEVER
        )
    for forward in asked.forwards.split(","):
        contenders[f"ours, {forward}"] = partial(_ours, backbone, forward)
    rng = np.random.default_rng(0)
    rows = []
    for length in map(int, asked.prompt_lengths.split(",")):
        prompt = rng.integers(10, backbone.vocab_size, length).tolist()
        for selected in SELECTED:
            size = selected * SLOT_SIZE
            rows += compare(Setting(SLOT_SIZE, size, 0.0, 1.0, size), prompt, contenders, asked.repeats)
    if worker:
        worker.close()
    first = next(iter(contenders))
    print(f"## By length of the prompt and selected slots\n\nSlots of {SLOT_SIZE} tokens, {NUM_BLOCKS} blocks.\n")
    titles = ("contender", "prompt", "selected slots", "ms a pass", "ms a token", f"time, as a share of {first}'s")
    print(table(titles, [_cells(row) for row in rows]), flush=True)
    return {"lengths": rows}


def compare(setting: Setting, prompt: list[int], contenders: dict[str, Timed], repeats: int) -> list[dict[str, Any]]:
    """All contenders on one prompt."""
    whole = replace(setting, new_tokens=(NUM_BLOCKS + 1) * setting.block_size)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    same, passes = {}, {}
    texts = {name: contenders[name](whole, prompt).texts for name in contenders}
    first = next(iter(contenders))
    for repeat in range(repeats):
        for name in turns(list(contenders), repeat):
            one, all_blocks = contenders[name](setting, prompt), contenders[name](whole, prompt)
            seconds[name].append(max(1e-9, all_blocks.seconds - one.seconds))
            passes[name] = all_blocks.passes - one.passes
            same[name] = texts[name] == texts[first]
    num_tokens = NUM_BLOCKS * setting.block_size
    return [
        {
            "contender": name,
            "prompt": len(prompt),
            "selected_slots": setting.block_size // setting.slot_size,
            "passes": passes[name],
            "seconds_a_pass": spread([value / passes[name] for value in seconds[name]]),
            "seconds_a_token": spread([value / num_tokens for value in seconds[name]]),
            "ratio": ratio(seconds[name], seconds[first]),
            "same_tokens": same[name],
        }
        for name in contenders
    ]


def _ours(backbone: Backbone, forward: Any, setting: Setting, prompt: list[int]) -> Measured:
    decoder = replace(setting.decoder(batch_size=1), stop_at_eos=False)
    backbone.forward_choice = forward
    clock = Clock()
    [found] = decoder.generate(backbone, [prompt])
    return Measured(**clock.read(), texts=[list(found.tokens)], passes=found.forward_passes)


def _cells(row: dict[str, Any]) -> list[str]:
    seconds = [row[name] for name in ("seconds_a_pass", "seconds_a_token")]
    times = [shown({name: 1000 * value for name, value in figures.items()}, ".2f") for figures in seconds]
    name = row["contender"] + ("" if row["same_tokens"] else " (other tokens)")
    return [name, f"{row['prompt']:,}", str(row["selected_slots"]), *times, shown(row["ratio"], ".2f")]
