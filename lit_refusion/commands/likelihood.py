"""`lit-refusion likelihood`: how likely a model finds the responses of prepared data."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lit_refusion.commands import compose, counting
from lit_refusion.data import split
from lit_refusion.data.remote import CacheConfig
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError
from lit_refusion.evaluation.likelihood import Likelihood, check_conventions, figures, negative_log_likelihood
from lit_refusion.examples import Example
from lit_refusion.export import DType, LoadedModel, load_model
from lit_refusion.fitting import check_tokenizer
from lit_refusion.new_folder import new_folder
from lit_refusion.objective import Objective
from lit_refusion.schema import build

RECORDS, RESULT = "records.jsonl", "result.json"


@dataclass(frozen=True, kw_only=True)
class LikelihoodConfig:
    """What to measure.

    Args:
        model: exported folder, or any Hugging Face causal LM.
        base: where the base model of an adapter is; null for where it was in training.
        objective: what the model was trained with.
        data: folder of prepared data, or a URL of one.
        cache: where the files of a URL are kept.
        split: "train" or "validation".
        validation_fraction: share of the examples that training held out, by hash of their text.
        limit: the examples with the smallest hashes of their text only; null for all.
        num_draws: rows of each example, where the likelihood is a bound.
        max_tokens_per_batch: tokens of a forward pass, padding included.
        seed: of the draws.
        out: folder to write; must not exist.
        device: auto, cpu, cuda, ...
        dtype: auto, float32 or bfloat16.
        trust_remote_code: run code that comes with the model.
    """

    model: str
    base: str | None
    objective: Objective | None
    data: str
    cache: CacheConfig
    split: Literal["train", "validation"]
    validation_fraction: float
    limit: int | None
    num_draws: int
    max_tokens_per_batch: int
    seed: int
    out: str
    device: str
    dtype: DType
    trust_remote_code: bool

    def __post_init__(self) -> None:
        for name in ("limit", "num_draws", "max_tokens_per_batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.seed < 0:
            raise UserError(f"seed={self.seed}: must not be negative")
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"validation_fraction={self.validation_fraction}: must lie in [0, 1)")
        if self.objective is None:
            raise UserError("objective: missing; give the one that the model was trained with, objective=NAME")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and write a record of each example and the result."""
    config = compose(arguments)
    if config is None:
        return 0
    settings = build({"objective": None, **config, "data": config["data"]["folder"]}, LikelihoodConfig)
    assert settings.objective is not None
    shards = Shards(settings.data, cache=settings.cache)
    examples = _examples(shards, settings)
    model = load_model(
        settings.model,
        objective=settings.objective,
        base=settings.base,
        device=settings.device,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
    )
    check_conventions(settings.objective, model.spec, model=settings.model)
    check_tokenizer(shards, model, data=settings.data, path=settings.model)
    identity = _identity(settings, config, model, shards)
    with new_folder(Path(settings.out), setting="out") as folder:
        with counting("likelihood", len(examples)) as on_progress:
            found = negative_log_likelihood(
                model.backbone,
                settings.objective,
                examples,
                num_draws=settings.num_draws,
                seed=settings.seed,
                max_tokens_per_batch=settings.max_tokens_per_batch,
                on_progress=on_progress,
            )
        result = {**identity, "num_draws": found[0].num_draws, "figures": _plain(figures(found))}
        (folder / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        _write_records(folder / RECORDS, found, examples)
    print(_summary(figures(found), kind=result["likelihood"]["kind"]))
    print(f"{settings.out}: result and records")
    return 0


def _examples(shards: Shards, settings: LikelihoodConfig) -> list[Example]:
    """The examples of the split, as training divides them."""
    parts = dict(zip(("train", "validation"), split.split(shards, settings.validation_fraction), strict=True))
    numbers = split.numbers(split.smallest_keys(shards, parts[settings.split], settings.limit))
    if not len(numbers):
        raise UserError(
            f"split={settings.split}: no examples with validation_fraction={settings.validation_fraction}; choose the "
            "other split or another fraction"
        )
    return [shards[int(number)] for number in numbers]


def _identity(settings: LikelihoodConfig, config: dict[str, Any], model: LoadedModel, shards: Shards) -> dict[str, Any]:
    """What the result says of its origin."""
    assert settings.objective is not None
    return {
        **model.identity(settings.model),
        "objective": config["objective"],
        "likelihood": {"kind": settings.objective.likelihood_kind, "is": settings.objective.likelihood_meaning},
        "data": settings.data,
        "data_fingerprint": shards.manifest.content_fingerprint,
        "split": settings.split,
        "validation_fraction": settings.validation_fraction,
        "limit": settings.limit,
        "seed": settings.seed,
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def _write_records(path: Path, found: Sequence[Likelihood], examples: Sequence[Example]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for likelihood, example in zip(found, examples, strict=True):
            record = {**asdict(likelihood), "source": example.source}
            del record["is_greedy"]
            file.write(json.dumps(_plain(record)) + "\n")


def _summary(found: dict[str, float], *, kind: str) -> str:
    error = "" if kind == "exact" else f" +- {found['bits_per_token_error']:.4f}"
    bound = "" if kind == "exact" else "at most "
    return (
        f"{found['examples']} examples, {found['tokens']} response tokens: {bound}{found['bits_per_token']:.4f}{error} "
        f"bits per token, perplexity {found['perplexity']:.4g}"
    )
