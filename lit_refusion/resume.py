"""Whether a run may go on from a checkpoint: what differs between the two."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHAPE_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
)
"""Fields of a model's config that tell two models apart before their weights fail to load."""

FIXED_SETTINGS = (
    "seed",
    "objective",
    "optimizer",
    "trainer.global_batch_size",
    "trainer.gradient_clip",
    "loader.validation_fraction",
    "loader.max_training_examples",
    "loader.mixture",
    "loader.mask_rates",
)
"""Settings that a resumed run must share with its checkpoint; the others change speed, logging or length."""


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a checkpoint's record and a run's record do not share: name -> (checkpoint's, run's).

    Args:
        saved: the record in the checkpoint.
        own: the record of the run.
    """
    pairs = {name: (saved[name], own[name]) for name in ("data_fingerprint", "tokenizer_fingerprint")}
    for key in FIXED_SETTINGS:
        theirs, ours = flat(key, _setting(saved["config"], key)), flat(key, _setting(own["config"], key))
        pairs |= {name: (theirs.get(name), ours.get(name)) for name in {**theirs, **ours}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def model_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The same for the model's shape, and for the weights of one that is frozen: the trained ones would not fit."""
    theirs, ours = saved["model_config"], own["model_config"]
    pairs = {f"model's {name}": (theirs.get(name), ours.get(name)) for name in SHAPE_FIELDS}
    bases = [(record.get("base") or {}).get("fingerprint") for record in (saved, own)]
    pairs["base model's fingerprint"] = (bases[0], bases[1])
    if "trained_shapes" in saved:
        pairs["trained parameters' fingerprint"] = (saved["trained_shapes"], own["trained_shapes"])
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def relocate(states: Mapping[str, dict[str, Any]], folder: Path) -> None:
    """Let the callbacks' states in a checkpoint, which name files, speak of the folder that the run is in now."""
    for state in states.values():
        old = state.get("dirpath")
        if old is not None and old != str(folder):
            for name, value in state.items():
                if isinstance(value, str):
                    state[name] = value.replace(old, str(folder), 1)
                elif isinstance(value, dict):
                    state[name] = {str(key).replace(old, str(folder), 1): item for key, item in value.items()}


def describe(found: Mapping[str, tuple[Any, Any]], theirs: str = "was", own: str = "is") -> str:
    """The differences in one line."""
    return "; ".join(f"{name} {theirs} {values[0]!r}, {own} {values[1]!r}" for name, values in found.items())


def _setting(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def flat(key: str, value: Any) -> dict[str, Any]:
    """A group of settings below `key` as dotted keys."""
    if not isinstance(value, Mapping):
        return {key: value}
    return {name: item for part, inner in value.items() for name, item in flat(f"{key}.{part}", inner).items()}
