"""The weights of a Hugging Face decoder layer, as views.

Shapes: N rows, D width, H query heads, K key heads, d head_dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Linear(NamedTuple):
    """A projection: [in, out] view of the weight, and the bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> Linear:
        """The weights of a module, not a copy."""
        return cls(module.weight.detach().t(), None if module.bias is None else module.bias.detach())

    def __call__(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """[N, in] to [N, out], written to `out` where it is given."""
        if self.bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(self.bias, x, self.weight, out=out)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """[N, out] residual + projection of x [N, in]."""
        return torch.addmm(residual if self.bias is None else residual + self.bias, x, self.weight)


class Norm(NamedTuple):
    """RMS norm over the last axis: x w / sqrt(|x|^2 / D + eps), |x| the Euclidean norm over its D entries.

    As x (w sqrt(D)) / hypot(|x|, sqrt(D eps)) it takes half the time on the CPU, where torch has no kernel of its own.
    """

    weight: Tensor  # [D], or [H + K, d]; times sqrt(D) for the second form
    eps: float
    floor: Tensor | None  # sqrt(D eps) for the second form

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> Norm:
        """From a weight, which is copied for the second form only."""
        if weight.is_cpu and weight.dtype == torch.float32:
            size = weight.shape[-1]
            return cls(weight * size**0.5, eps, torch.tensor((size * eps) ** 0.5))
        return cls(weight, eps, None)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] to the same shape."""
        if self.floor is not None:
            length = torch.linalg.vector_norm(x, 2, -1, True)
            return (x / length.hypot_(self.floor)).mul_(self.weight)
        if self.weight.dim() == 1:
            return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return torch.rms_norm(x, self.weight.shape[-1:], None, self.eps).mul_(self.weight)


class Layer(NamedTuple):
    """The weights of a decoder layer."""

    attention_norm: Norm
    query: Linear
    key: Linear
    value: Linear
    head_norm: Norm | None  # of query and key heads
    output: Linear
    mlp_norm: Norm
    gate: Linear
    up: Linear
    down: Linear

    @classmethod
    def of(cls, layer: Any, *, heads: int, key_heads: int, adapted: bool) -> Layer:
        """The weights of a module, not copies, but for those of norms; of the attention's twin for adapted passes."""
        attention, mlp = layer.self_attn, layer.mlp
        if adapted:
            attention = getattr(attention, "twin", attention)
        head_norm = None
        if hasattr(attention, "q_norm"):
            norms = ((attention.q_norm, heads), (attention.k_norm, key_heads))
            weight = torch.cat([norm.weight.detach().expand(count, -1) for norm, count in norms])
            head_norm = Norm.of(weight, attention.q_norm.variance_epsilon)
        return cls(
            attention_norm=norm_of(layer.input_layernorm),
            query=Linear.of(attention.q_proj),
            key=Linear.of(attention.k_proj),
            value=Linear.of(attention.v_proj),
            head_norm=head_norm,
            output=Linear.of(attention.o_proj),
            mlp_norm=norm_of(layer.post_attention_layernorm),
            gate=Linear.of(mlp.gate_proj),
            up=Linear.of(mlp.up_proj),
            down=Linear.of(mlp.down_proj),
        )


def norm_of(module: Any) -> Norm:
    """The norm of a module."""
    return Norm.of(module.weight.detach(), module.variance_epsilon)
