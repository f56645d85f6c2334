"""Responses written anew by a model: `prepare ... regenerate_responses=true`.

Distillation wants answers that the model itself would give. They take the place of the chosen examples' responses,
token for token, between the two passes of `prepare`; what identifies an example, and so the split, stays.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.progress import Progress
from transformers import AutoConfig

from lit_refusion.backbone import Backbone
from lit_refusion.data.parts import PART_DTYPE, Part, read_report, write_part
from lit_refusion.data.shard_writing import gather
from lit_refusion.decoder import Decoder
from lit_refusion.errors import UserError, first_line
from lit_refusion.examples import token_digest
from lit_refusion.processes import in_order
from lit_refusion.schema import build
from lit_refusion.spec import DiffusionSpec
from lit_refusion.tokenizer import load_tokenizer, num_token_ids, tokenizer_fingerprint

ANSWERED_TOGETHER = 256
"""Examples of a part; lost work is bounded by it."""


@dataclass(frozen=True, kw_only=True)
class Answering:
    """Who answers, and how.

    Args:
        model: folder or hub id.
        tokenizer: the data's; the model must have the same.
        decoder: settings of the decoder, greedy as a rule.
        max_length: longest prompt and response; an answer is cut there, as it is at the decoder's budget, and has no
            end-of-sequence token then.
        token_dtype: type of the stored tokens.
        device: every GPU has a process of its own.
        weights: what tells the model's files from later ones at the same place.
        dtype: of the weights; "auto" is fp32 on CPU and bf16 on CUDA.
        seed: seed of a decoder that samples.
    """

    model: str
    tokenizer: str
    decoder: dict[str, Any]
    max_length: int
    token_dtype: str
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16"]
    seed: int
    weights: str

    @property
    def on_cuda(self) -> bool:
        """Whether GPUs answer."""
        return self.device != "cpu" and torch.cuda.is_available()

    @property
    def num_workers(self) -> int:
        """Processes beside this one."""
        return torch.cuda.device_count() if self.on_cuda and torch.cuda.device_count() > 1 else 0


def answer_all(
    examples: np.ndarray,
    keys: np.ndarray,
    paths: Sequence[Path],
    settings: Answering,
    folder: Path,
    *,
    progress: Progress | None,
) -> list[Part]:
    """Parts with the answers to the prompts of all examples, in order.

    Args:
        examples: [N] EXAMPLE_DTYPE.
        keys: [N] what identifies each.
        paths: token files of the parts that the examples lie in.
        settings: who answers.
        folder: of the new parts.
        progress: shows how far it is.
    """
    starts = range(0, len(examples), ANSWERED_TOGETHER)

    def tasks() -> Iterator[tuple[list[np.ndarray], np.ndarray, int, Answering, str]]:
        for first in starts:
            chosen = slice(first, first + ANSWERED_TOGETHER)
            tokens = gather(examples[chosen], paths, np.dtype(settings.token_dtype))
            prompts = [ids[:length] for ids, length in zip(tokens, examples["prompt_length"][chosen], strict=True)]
            yield prompts, keys[chosen], first, settings, str(folder)

    task = progress.add_task("answer", total=len(starts)) if progress else None
    parts = []
    for part in in_order(make_answers, tasks(), num_workers=settings.num_workers, preload=__name__):
        parts.append(part)
        if progress and task is not None:
            progress.advance(task)
    return parts


def make_answers(prompts: Sequence[np.ndarray], keys: np.ndarray, first: int, settings: Answering, folder: str) -> Part:
    """The part with the answers to some prompts, from an earlier run where that finished it: the work of a process.

    Args:
        prompts: token ids of each.
        keys: what identifies each example.
        first: number of the first example, which keys the noise.
        settings: who answers.
        folder: of the parts.
    """
    identity = hashlib.blake2b(json.dumps([first, asdict(settings)], sort_keys=True).encode(), digest_size=12)
    for prompt in prompts:
        identity.update(len(prompt).to_bytes(8, "little") + prompt.astype(np.uint32).tobytes())
    name = identity.hexdigest()
    report = Path(folder) / f"{name}.json"
    if report.is_file():
        return Part(folder=folder, name=name, **read_report(report))
    backbone, decoder = _answerer(settings)
    decoder = _within(decoder, settings, prompts, backbone.max_length)
    numbers = range(first, first + len(prompts))
    answers = decoder.generate(backbone, [prompt.tolist() for prompt in prompts], seed=settings.seed, indices=numbers)
    arrays, entries = [], []
    num_ids = num_token_ids(load_tokenizer(settings.tokenizer))
    for key, prompt, answer in zip(keys, prompts, answers, strict=True):
        response = answer.tokens[: settings.max_length - len(prompt)]
        if max(response) >= num_ids:
            raise UserError(
                f"model={settings.model}: it answers with token id {max(response)}, and its tokenizer ends at "
                f"{num_ids - 1}; it seems to be untrained, choose another model"
            )
        tokens = np.array([*prompt, *response], np.uint32)
        arrays.append(tokens.astype(settings.token_dtype))
        entries.append((key, token_digest(tokens, len(prompt)), len(prompt), len(tokens)))
    figures = {"read": len(prompts), "bad": 0, "errors": []}
    return write_part(Path(folder), name, arrays, np.array(entries, PART_DTYPE), figures)


def weights_state(model: str) -> str:
    """A digest of names, sizes and times of a local model's files; empty for a hub id, whose files do not change."""
    files = sorted(path for path in Path(model).glob("*") if path.is_file())
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()[:24] if files else ""


def _within(decoder: Decoder, settings: Answering, prompts: Sequence[np.ndarray], window: int | None) -> Decoder:
    """The decoder with no larger budget than the shortest prompt leaves."""
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    decoder = replace(decoder, max_new_tokens=min(decoder.max_new_tokens, max(1, settings.max_length - shortest)))
    if window is not None and longest + decoder.canvas > window:
        raise UserError(
            f"model={settings.model}: a prompt of {longest} tokens and decoder.max_new_tokens={decoder.max_new_tokens} "
            f"exceed its window of {window}; lower decoder.max_new_tokens or data.max_length"
        )
    return decoder


def check_answering(settings: Answering) -> None:
    """Refuse a model with another tokenizer, or a decoder that does not fit it, before anything is read.

    Raises:
        UserError: as it says.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: not available here; use device=auto")
    theirs, ours = (tokenizer_fingerprint(load_tokenizer(path)) for path in (settings.model, settings.tokenizer))
    if theirs != ours:
        raise UserError(
            f"model={settings.model}: its tokenizer (fingerprint {theirs}) is not data.tokenizer={settings.tokenizer} "
            f"({ours}); regenerate responses with a model of the same tokenizer"
        )
    try:
        spec = getattr(AutoConfig.from_pretrained(settings.model), "diffusion_spec", None)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model={settings.model}: cannot read its config: {first_line(error)}") from error
    if spec is not None:
        found = DiffusionSpec.from_dict(spec, origin=f"{settings.model}/config.json")
        build(settings.decoder, Decoder, key="decoder").fit_to(found)


@lru_cache(maxsize=1)
def _load(model: str, tokenizer: str, device: str, dtype: str) -> Backbone:
    return Backbone.from_pretrained(
        model, tokenizer=load_tokenizer(tokenizer), dtype=getattr(torch, dtype), device=device
    )


def _answerer(settings: Answering) -> tuple[Backbone, Decoder]:
    """The model and its decoder, loaded once a process."""
    device, dtype = "cpu", settings.dtype
    if settings.on_cuda:
        number = (multiprocessing.current_process()._identity or (1,))[-1] - 1  # the workers count from 1
        device = f"cuda:{number % torch.cuda.device_count()}"
    if dtype == "auto":
        dtype = "bfloat16" if settings.on_cuda else "float32"
    backbone = _load(settings.model, settings.tokenizer, device, dtype)
    decoder = build(settings.decoder, Decoder, key="decoder")
    spec = backbone.saved_spec(origin=f"{settings.model}/config.json")
    return backbone, decoder if spec is None else decoder.fit_to(spec)
