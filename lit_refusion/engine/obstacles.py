"""What keeps the lean forward from a model: whatever its module would do besides.

A hook, another kind of layer, weights that are shared out among ranks: all that the lean forward knows nothing of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lit_refusion.backbone import Backbone

FAMILIES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}
"""Model types with these layers: RMS norms before attention and MLP, RoPE, grouped heads, gated SiLU."""

FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies do not depend on the length of the text."""

PARTS = ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
"""Classes of a family, behind its name."""

OTHER_PARTS = {
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.sparse.Embedding",
    "torch.nn.modules.container.ModuleList",
    "torch.nn.modules.activation.SiLU",
    "transformers.activations.SiLUActivation",
}
"""Classes that do just what their name says."""


def obstacle(backbone: Backbone, *, adapted: bool = False) -> str | None:
    """Why the lean forward would not do what the module does in plain or adapted passes, or None."""
    config, base = backbone.model.config, backbone.model.base_model
    if config.model_type not in FAMILIES:
        return f"model type '{config.model_type}' is none of {', '.join(FAMILIES)}"
    if other := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"it has layers of type '{other.pop()}'"
    place = f"transformers.models.{config.model_type}.modeling_{config.model_type}.{FAMILIES[config.model_type]}"
    known = {f"{place}{part}" for part in PARTS} | OTHER_PARTS
    for name, module in _modules_of_pass(base, "", adapted=adapted):
        if adapted and "twin" in module._modules and not name.endswith(".self_attn"):
            return f"{name} has a twin, which only attention may have"
        if reason := _oddity(module, known, backbone):
            return f"{name or 'the model'} {reason}"
    rotary: Any = base.rotary_emb
    if rotary.rope_type not in FIXED_ROPE:
        return f"its RoPE is of type '{rotary.rope_type}', not {', '.join(FIXED_ROPE)}"
    if 2 * rotary.inv_freq.numel() != base.layers[0].self_attn.head_dim:  # type: ignore[union-attr, index]
        return "its RoPE turns a part of each head only"
    return None


def _modules_of_pass(module: nn.Module, name: str, *, adapted: bool) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a pass runs: of a module that has a twin, itself and in adapted passes that, else all others."""
    yield name, module
    has_twin = "twin" in module._modules
    for own, child in module.named_children():
        if not has_twin or (own == "twin") == adapted:
            yield from _modules_of_pass(child, f"{name}.{own}".removeprefix("."), adapted=adapted)


def _oddity(module: nn.Module, known: set[str], backbone: Backbone) -> str | None:
    """What the lean forward would miss of a module."""
    # The class of a layer that has a twin is derived from its own, whose forward plain passes still take.
    kinds = type(module).__mro__ if "twin" in module._modules else (type(module),)
    if known.isdisjoint(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds):
        return f"is a {type(module).__name__}"
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return "has a hook"
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter or hasattr(parameter, "ds_id") or not parameter.numel():
            return "has weights that are shared out, or in a form of their own"
        if parameter.dtype != backbone.model.dtype or parameter.device != backbone.device:
            return f"has weights in {parameter.dtype} on {parameter.device}, unlike others"
    return None
