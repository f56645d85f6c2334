"""The engine under the other methods, beside straight implementations of them that keep no keys (or transformers' way).

The straight ones are the slow references of the tests: written to be read, not to be fast. So the time that they spend
in the model's forward alone is given as well: no implementation that runs those passes could be faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.figures import ratio, shown, spread, table, turns
from benchmarks.reference import Measured
from benchmarks.worker import Clock
from lit_refusion.backbone import Backbone
from lit_refusion.config import load_config
from lit_refusion.decoder import Decoder
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.tokenizer import load_tokenizer

Prompts = list[list[int]]
Contender = Callable[[Prompts], Measured]
BLOCK_SIZE = 16
TITLES = ("method", "contender", "tokens/s", "ratio to the first", "by CPU time", "passes a prompt", "same")


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """All methods, one after another."""
    backbone = Backbone.from_pretrained(asked.model, tokenizer=load_tokenizer(asked.model))
    prompts = read_prompts(asked, backbone.vocab_size)
    sizes = [int(size) for size in asked.batch_sizes.split(",")]
    rows = []
    for name, contenders in methods(asked, backbone, sizes).items():
        rows += compare(name, contenders, prompts, asked.repeats)
    print(f"## Methods, {len(prompts)} prompts, {asked.new_tokens} new tokens\n")
    print(table(TITLES, [_cells(row) for row in rows]), flush=True)
    return {"methods": rows}


def read_prompts(asked: argparse.Namespace, vocab_size: int) -> Prompts:
    """Those of the cases, behind other cases and their answers up to the (first) length asked for; or random ones."""
    length = int((asked.prompt_lengths or "40").split(",")[0])
    if not asked.cases:
        return np.random.default_rng(0).integers(10, vocab_size, (asked.num_prompts, length)).tolist()
    cases = json.loads(Path(asked.cases).read_text(encoding="utf-8"))
    prompts = []
    for number in range(min(asked.num_prompts, len(cases))):
        prompt, shot = list(cases[number]["prompt_ids"]), number
        while asked.prompt_lengths and len(prompt) < length:
            shot = (shot + 1) % len(cases)
            prompt = [*cases[shot]["prompt_ids"], *cases[shot]["corrected"]["response_ids_to_eos"], *prompt]
        prompts.append(prompt)
    return prompts


def methods(asked: argparse.Namespace, backbone: Backbone, sizes: list[int]) -> dict[str, dict[str, Contender]]:
    """The contenders of each method; the first is what the others are compared with."""
    try:
        from tests.decoders import test_block, test_masked
        from tests.reference import orthrus
    except ImportError as error:
        raise SystemExit(f"--methods needs the tests and what they import, from a checkout ({error})") from error
    length, forwards = asked.new_tokens, asked.forwards.split(",")
    common = {"max_new_tokens": length, "stop_at_eos": False, "temperature": 0.0}
    block = decoder("bd3", **common, block_size=BLOCK_SIZE, block_origin="sequence", shift=False, ranking="confidence",
                    threshold=0.9)  # fmt: skip
    masked = decoder("llada", **common, block_size=BLOCK_SIZE, shift=False, threshold=0.9)
    found = {
        "BD3-LM": {
            **straight(backbone, lambda prompt: test_block.slow(backbone, prompt, block)),
            **ours(backbone, block, forwards, sizes),
        },
        "LLaDA, no cache": {
            **straight(backbone, lambda prompt: test_masked.slow(backbone, prompt, masked)),
            **ours(backbone, masked, forwards, sizes),
        },
    }
    for cache in ("prefix", "dual"):
        cached = replace(masked, cache=cache)  # type: ignore[call-arg]
        kept = partial(_kept, test_masked.slow_cached, backbone, cached)
        found[f"Fast-dLLM, {cache} cache"] = {
            **straight(
                backbone, lambda prompt: test_masked.slow(backbone, prompt, masked), name="straight, uncached (exact)"
            ),
            **straight(backbone, kept, name="transformers' DynamicCache"),
            **ours(backbone, cached, forwards, sizes),
        }
    twins, drafted = with_twins(asked), decoder("orthrus", **common, block_size=8)
    slow = partial(orthrus.decode, twins.model, block_size=8, max_new_tokens=length, mask_id=twins.mask_token_id,
                   eos_id=None)  # fmt: skip
    found["Orthrus"] = {
        "transformers, greedy": partial(greedy, AutoModelForCausalLM.from_pretrained(asked.model).eval(), length),
        "straight, uncached": partial(_each, lambda prompt: _orthrus(slow(prompt))),
        **{
            f"left to right, {name}": contender
            for name, contender in ours(twins, decoder("ar", **common), forwards, sizes).items()
        },
        **ours(twins, drafted, forwards, sizes),
    }
    return found


def decoder(name: str, **changes: Any) -> Decoder:
    """One of conf/decoder, changed."""
    config = load_config("generate", ["model=m", "prompt=p", f"decoder={name}"])["decoder"]
    return build({**config, **changes}, Decoder, key="decoder")


def with_twins(asked: argparse.Namespace) -> Backbone:
    """The model with twins: copies of its own projections, or those of a file in the official release's names."""
    backbone = Backbone.from_pretrained(asked.model, tokenizer=load_tokenizer(asked.model))
    build(load_config("train", ["objective=orthrus"])["objective"], Objective, key="objective").prepare(backbone)
    parameters = dict(backbone.model.named_parameters())
    with torch.no_grad():
        for name, weight in (load_file(asked.twins) if asked.twins else {}).items():
            parameters[name.replace("self_attn.", "self_attn.twin.").replace("_diff", "")].copy_(weight)
    return backbone


def ours(backbone: Backbone, method: Decoder, forwards: list[str], sizes: list[int]) -> dict[str, Contender]:
    """This package's decoder, by forward and batch size."""

    def decode(forward: Any, size: int, prompts: Prompts) -> Measured:
        backbone.forward_choice = forward
        clock = Clock()
        found = replace(method, batch_size=size).generate(backbone, prompts)
        texts = [list(generation.tokens) for generation in found]
        return Measured(**clock.read(), texts=texts, passes=sum(generation.forward_passes for generation in found))

    return {f"ours, {name}, batch {size}": partial(decode, name, size) for name in forwards for size in sizes}


def straight(
    backbone: Backbone,
    decode: Callable[[list[int]], tuple[list[int], int]],
    *,
    name: str = "straight, uncached",
) -> dict[str, Contender]:
    """A slow reference, prompt by prompt; and as if nothing but its forward passes took time.

    Args:
        backbone: what it runs.
        decode: from a prompt to tokens and passes.
        name: of the contender.
    """

    def forward_alone(prompts: Prompts) -> Measured:
        with watched_forward(backbone) as spent:
            found = _each(decode, prompts)
        return replace(found, seconds=spent["seconds"], cpu_seconds=spent["cpu_seconds"])

    return {name: partial(_each, decode), f"{name}, its forward passes alone": forward_alone}


@contextmanager
def watched_forward(backbone: Backbone) -> Iterator[dict[str, float]]:
    """The number of calls of the model's forward and the time spent in it."""
    spent = {"calls": 0, "seconds": 0.0, "cpu_seconds": 0.0}
    model, forward, patch = backbone.model, backbone.model.forward, vars(backbone.model).get("forward")

    def watched(*positional: Any, **named: Any) -> Any:
        clock = Clock()
        output = forward(*positional, **named)
        for kind, value in {"calls": 1, **clock.read()}.items():
            spent[kind] += value
        return output

    model.forward = watched  # type: ignore[method-assign, assignment]
    try:
        yield spent
    finally:
        del model.forward
        if patch is not None:  # another watch around this one
            model.forward = patch  # type: ignore[method-assign]


def _each(decode: Callable[[list[int]], tuple[list[int], int]], prompts: Prompts) -> Measured:
    clock = Clock()
    found = [decode(prompt) for prompt in prompts]
    return Measured(**clock.read(), texts=[text for text, _ in found], passes=sum(count for _, count in found))


def _kept(slow_cached: Any, backbone: Backbone, method: Decoder, prompt: list[int]) -> tuple[list[int], int]:
    with watched_forward(backbone) as spent:
        return slow_cached(backbone, prompt, method), int(spent["calls"])


def _orthrus(found: Any) -> tuple[list[int], int]:
    return found.tokens, len(found.kinds)


@torch.inference_mode()
def greedy(model: Any, length: int, prompts: Prompts) -> Measured:
    """Left to right by transformers' own `generate`."""
    clock, texts = Clock(), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, min_new_tokens=length,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        texts.append(found[0, len(prompt) :].tolist())
    return Measured(**clock.read(), texts=texts, passes=length * len(prompts))


def compare(name: str, contenders: dict[str, Contender], prompts: Prompts, repeats: int) -> list[dict[str, Any]]:
    """The contenders of one method in turn; tokens are compared with those of our last contender."""
    found: dict[str, list[Measured]] = {contender: [] for contender in contenders}
    for decode in contenders.values():
        decode(prompts[:1])
    for repeat in range(repeats):
        for contender in turns(list(contenders), repeat):
            found[contender].append(contenders[contender](prompts))
    first, last = next(iter(contenders)), list(contenders)[-1]
    speeds, per_cpu = (
        {key: [run.num_tokens / getattr(run, kind) for run in runs] for key, runs in found.items()}
        for kind in ("seconds", "cpu_seconds")
    )
    return [
        {
            "method": name,
            "contender": key,
            "tokens_per_second": spread(speeds[key]),
            "ratio": ratio(speeds[key], speeds[first]),
            "cpu_ratio": ratio(per_cpu[key], per_cpu[first]),
            "passes": runs[0].passes,
            "same_tokens": sum(a == b for a, b in zip(runs[0].texts, found[last][0].texts)),
            "prompts": len(prompts),
        }
        for key, runs in found.items()
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["method"], row["contender"], shown(row["tokens_per_second"]), shown(row["ratio"], ".1f"),
        shown(row["cpu_ratio"], ".1f"), f"{row['passes'] / row['prompts']:.1f}",
        f"{row['same_tokens']}/{row['prompts']}",
    ]  # fmt: skip
