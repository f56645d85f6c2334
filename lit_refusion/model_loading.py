"""Loading or making Hugging Face models, refusing what this project would silently run wrong."""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_refusion.errors import UserError, first_line
from lit_refusion.mask_token import TABLE_MULTIPLE
from lit_refusion.tokenizer import num_token_ids

_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def load_pretrained(path_or_id: str, *, dtype: torch.dtype, attention: str, **options: Any) -> PreTrainedModel:
    """A trained model from a folder or the hub; every weight must be in its files.

    Raises:
        UserError: no such model, damaged or missing weights, a kernel that is not installed, an unsupported model.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path_or_id, dtype=dtype, attn_implementation=attention, output_loading_info=True, **options
        )
        model, report = loaded
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        _explain_kernel(error, attention)
        raise UserError(f"backbone.path={path_or_id}: cannot load the model: {first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise UserError(
            f"backbone.path={path_or_id}: {len(missing)} weights are not in its files ({missing[0]}, ...); "
            "they would start at random, so fetch the model again"
        )
    check_architecture(model.config)
    return model


def make_fresh(
    architecture: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, attention: str, seed: int
) -> PreTrainedModel:
    """A model with random weights, a function of `seed` alone, its vocabulary sized to the tokenizer.

    Raises:
        UserError: unknown or wrong fields, or an unsupported model.
    """
    config = fresh_config(architecture, tokenizer)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, ImportError, RuntimeError, StrictDataclassError) as error:
        _explain_kernel(error, attention)
        raise UserError(f"backbone.architecture={architecture}: {first_line(error)}") from error


def fresh_config(architecture: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> PretrainedConfig:
    """The config of a fresh model, its vocabulary sized to the tokenizer where there is one.

    Raises:
        UserError: unknown or wrong fields, or an unsupported model.
    """
    num_tokens = 0 if tokenizer is None else num_token_ids(tokenizer)
    fields = dict(architecture)
    if tokenizer is not None:
        fields = {"vocab_size": -(-num_tokens // TABLE_MULTIPLE) * TABLE_MULTIPLE, **fields}
        for name in ("bos", "eos", "pad"):
            fields[f"{name}_token_id"] = getattr(tokenizer, f"{name}_token_id")
    try:
        config = AutoConfig.for_model(**fields)
        _check_fields(architecture, config, num_tokens=num_tokens)
        return config
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, ImportError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"backbone.architecture={architecture}: {first_line(error)}") from error


def check_architecture(config: PretrainedConfig) -> None:
    """Refuse models that explicit masks, reordered positions or a bare output head would run wrong."""
    kind = f"backbone: model type '{config.model_type}'"
    if getattr(config, "rope_parameters", None) is None:
        raise UserError(
            f"{kind} has no rotary position embedding; the methods here reorder tokens and need RoPE "
            "(Qwen3, Qwen2.5, Llama, SmolLM2, ...)"
        )
    layers = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    is_short = window is not None and not layers and window < getattr(config, "max_position_embeddings", window)
    if is_short or any(layer != "full_attention" for layer in layers):
        raise UserError(
            f"{kind} has sliding-window or linear-attention layers, which the explicit attention masks here cannot "
            "express; use a model with full attention in every layer"
        )
    for name in _LOGIT_TRANSFORMS:
        if getattr(config, name, None) is not None:
            raise UserError(f"{kind} transforms its logits ({name}), which is not supported; use another model")


def _explain_kernel(error: Exception, attention: str) -> None:
    """Say it plainly where the trouble is a kernel that is not installed."""
    if attention != "sdpa" and isinstance(error, ImportError):
        raise UserError(
            f"backbone.attention={attention}: not available ({first_line(error)}); install it or use sdpa"
        ) from error


def _check_fields(architecture: dict[str, Any], config: PretrainedConfig, *, num_tokens: int) -> None:
    """Refuse misspelt fields, which transformers would keep as unused attributes, and sizes that do not fit."""
    check_architecture(config)
    defaults = type(config)()
    unknown = [name for name in architecture if not hasattr(defaults, name)]
    if unknown:
        raise UserError(
            f"backbone.architecture.{unknown[0]}={architecture[unknown[0]]}: no such field of model type "
            f"'{config.model_type}'; the fields are those of its transformers config"
        )
    if config.vocab_size < num_tokens:
        raise UserError(
            f"backbone.architecture.vocab_size={config.vocab_size}: the tokenizer has {num_tokens} tokens; "
            "leave the field out to have it sized"
        )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        if getattr(config, name) < 1:
            raise UserError(f"backbone.architecture.{name}={getattr(config, name)}: must be at least 1")
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if groups and heads % groups:
        raise UserError(
            f"backbone.architecture.num_attention_heads={heads}: not a multiple of num_key_value_heads={groups}"
        )
