"""How fast ReFusion decodes beside the official code: `python -m benchmarks.decode --model DIR --cases FILE`.

All contenders decode the same prompts greedily on one thread, in turn within each repeat; their tokens are compared.
`--prompt-lengths 50,500,2000` measures a pass by length of the prompt and number of selected slots instead, and
`--methods` the other methods beside straight implementations of them (on prompts of such a length, if it is given).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import decode_lengths, decode_methods, reference
from benchmarks.figures import environment, existing, ratio, shown, spread, table, turns, write
from benchmarks.reference import Measured, Setting
from benchmarks.worker import Clock
from lit_refusion.backbone import Backbone
from lit_refusion.tokenizer import load_tokenizer

SETTINGS = ("8,32,0.9,0.4,128", "4,64,0.95,0.9,128", "8,32,0.3,0.3,96", "4,16,1.0,0.3,64")
"""Slot size, block size, slot and token threshold, new tokens: our default, strict, loose, one slot at a time."""
REFERENCE, TRANSFORMERS = "reference", "transformers, greedy"


Contender = Callable[[Setting, list[list[int]]], Measured]


def main(arguments: list[str] | None = None) -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=existing, required=True, help="folder of a Qwen3 model trained with ReFusion, with tokenizer"
    )
    parser.add_argument("--cases", type=existing, help="JSON list of cases with prompt_ids")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), help="slot,block,slot p,token p,new tokens")
    reference.add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-sizes", default="1,8,16")
    parser.add_argument("--forwards", default="module,lean")
    parser.add_argument("--budget", type=int, default=64, help="queries for guesses; 0 to leave that contender out")
    parser.add_argument("--prompt-lengths", help="as 50,500,2000")
    parser.add_argument("--methods", action="store_true")
    parser.add_argument("--new-tokens", type=int, default=64, help="of --methods")
    parser.add_argument(
        "--twins", type=existing, help="safetensors of trained Orthrus twins, for --methods; copies without it"
    )
    parser.add_argument("--out", help="JSON file to write")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started = environment()
    if asked.methods:
        results = decode_methods.measure(asked)
    elif asked.prompt_lengths:
        results = decode_lengths.measure(asked)
    elif asked.cases:
        results = measure(asked)
    else:
        parser.error("give --cases, --prompt-lengths or --methods")
    write(asked.out, results, started)


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Every contender over every setting, repeat by repeat."""
    cases = json.loads(Path(asked.cases).read_text(encoding="utf-8"))
    prompts = [list(ids) for ids in dict.fromkeys(tuple(case["prompt_ids"]) for case in cases)][: asked.num_prompts]
    settings = [Setting.read(text) for text in asked.settings]
    backbone = Backbone.from_pretrained(asked.model, tokenizer=load_tokenizer(asked.model))
    contenders: dict[str, Contender] = {}
    worker = reference.start(asked, asked.model)
    if worker:
        contenders[REFERENCE] = partial(reference.decode, worker, eos_token_id=backbone.eos_token_id)
    contenders.update(our_contenders(asked, backbone))
    lengths: dict[Setting, list[int]] = {}
    contenders[TRANSFORMERS] = greedy(asked.model, backbone.eos_token_id, lengths)
    for contender in contenders.values():  # what is made once
        contender(replace(settings[0], new_tokens=settings[0].block_size), prompts[:1])
    found = {setting: rounds(setting, prompts, contenders, lengths, asked.repeats) for setting in settings}
    if worker:
        worker.close()
    return report(found, prompts)


def rounds(
    setting: Setting,
    prompts: list[list[int]],
    contenders: dict[str, Contender],
    lengths: dict[Setting, list[int]],
    repeats: int,
) -> dict[str, list[Measured]]:
    """The repeats of one setting."""
    first = next(iter(contenders))
    lengths[setting] = [len(text) for text in contenders[first](setting, prompts).texts]
    found: dict[str, list[Measured]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name in turns(list(contenders), repeat):
            found[name].append(contenders[name](setting, prompts))
    return found


def our_contenders(asked: argparse.Namespace, backbone: Backbone) -> dict[str, Contender]:
    """By forward, batch size and budget for guesses."""
    sizes = [int(size) for size in asked.batch_sizes.split(",")]
    forwards = asked.forwards.split(",")
    found = {
        f"ours, {forward}, batch {size}": ours(backbone, forward, batch_size=size)
        for forward in forwards
        for size in sizes
    }
    if asked.budget:
        for size in sizes:
            name = f"ours, {forwards[-1]}, batch {size}, {asked.budget} guesses"
            found[name] = ours(backbone, forwards[-1], batch_size=size, budget=asked.budget)
    return found


def ours(backbone: Backbone, forward: Any, *, batch_size: int, budget: int = 0) -> Contender:
    """This package's decoder."""

    def decode(setting: Setting, prompts: list[list[int]]) -> Measured:
        decoder = setting.decoder(batch_size=batch_size, budget=budget)
        backbone.forward_choice = forward
        clock = Clock()
        found = decoder.generate(backbone, prompts)
        return Measured(
            **clock.read(),
            texts=[list(generation.tokens) for generation in found],
            passes=sum(generation.forward_passes for generation in found),
        )

    return decode


def greedy(path: str, eos_token_id: int, lengths: dict[Setting, list[int]]) -> Contender:
    """Left to right by transformers' own `generate`, for as many tokens as the first contender gave, or to the end."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def decode(setting: Setting, prompts: list[list[int]]) -> Measured:
        texts, wanted, clock = [], lengths.get(setting, [2] * len(prompts)), Clock()
        for prompt, length in zip(prompts, wanted, strict=True):
            found = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                max_new_tokens=length, eos_token_id=eos_token_id, pad_token_id=eos_token_id,
            )  # fmt: skip
            texts.append(found[0, len(prompt) :].tolist())
        return Measured(**clock.read(), texts=texts, passes=sum(map(len, texts)))

    return decode


def report(found: dict[Setting, dict[str, list[Measured]]], prompts: list[list[int]]) -> dict[str, Any]:
    """Print a table for each setting and one for all; returns the figures."""
    results = []
    for setting, runs in found.items():
        print(
            f"\n## Slots of {setting.slot_size}, blocks of {setting.block_size}, thresholds {setting.slot_threshold} "
            f"and {setting.token_threshold}, up to {setting.new_tokens} tokens, {len(prompts)} prompts\n"
        )
        results.append({"setting": vars(setting), "contenders": rows_of({setting: runs})})
    print("\n## All settings together\n")
    return {"settings": results, "all": rows_of(found)}


def rows_of(found: dict[Setting, dict[str, list[Measured]]]) -> list[dict[str, Any]]:
    """Figures of each contender over some settings together, which are printed as well."""
    names = list(next(iter(found.values())))
    first = names[0]
    speeds, per_cpu = ({name: rates(found, name, kind) for name in names} for kind in ("seconds", "cpu_seconds"))
    rows = []
    for name in names:
        once = [runs[name][0] for runs in found.values()]
        pairs = [pair for runs in found.values() for pair in zip(runs[name][0].texts, runs[first][0].texts)]
        num_tokens, passes = sum(run.num_tokens for run in once), sum(run.passes for run in once)
        rows.append(
            {
                "contender": name,
                "tokens_per_second": spread(speeds[name]),
                "tokens_per_cpu_second": spread(per_cpu[name]),
                "ratio": ratio(speeds[name], speeds[first]),
                "cpu_ratio": ratio(per_cpu[name], per_cpu[first]),
                "tokens": num_tokens,
                "passes": passes,
                "tokens_per_pass": num_tokens / passes,
                "same_tokens": sum(a == b for a, b in pairs),
                "prompts": len(pairs),
            }
        )
    titles = ("contender", "tokens/s", f"ratio to {first}", "by CPU time", "passes a prompt", "tokens a pass", "same")
    print(table(titles, [_cells(row) for row in rows]), flush=True)
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    is_other_text = row["contender"] == TRANSFORMERS
    return [
        row["contender"], shown(row["tokens_per_second"]), shown(row["ratio"], ".2f"), shown(row["cpu_ratio"], ".2f"),
        f"{row['passes'] / row['prompts']:.1f}", f"{row['tokens_per_pass']:.2f}",
        "" if is_other_text else f"{row['same_tokens']}/{row['prompts']}",
    ]  # fmt: skip


def rates(found: dict[Setting, dict[str, list[Measured]]], name: str, kind: str) -> list[float]:
    """Tokens a second (of `kind`) of each repeat, over all settings together."""
    by_repeat = zip(*(runs[name] for runs in found.values()))
    return [sum(run.num_tokens for run in runs) / sum(getattr(run, kind) for run in runs) for runs in by_repeat]


if __name__ == "__main__":
    main()
