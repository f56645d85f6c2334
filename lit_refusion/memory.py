"""What a training step needs of each device's memory, estimated before anything is built.

Counts the tensors that the code keeps; the allocator's fragments, kernels' work space and the CUDA context (1 to 2 GB)
come on top. ZeRO's shares are those of Rajbhandari et al. (arXiv 1910.02054, section 3).
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

from lit_refusion.losses import MAX_LOGITS

FP32, BF16 = 4, 2
ADAM_STATES = 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Numbers of a decoder-only model with gated MLPs.

    Args:
        layers: decoder layers.
        width: D, hidden size.
        heads_width: query heads x head size.
        kv_width: key heads x head size.
        intermediate: width of the MLP.
        vocabulary: V, rows of the embedding table.
        is_tied: whether the head is the embedding table.
        has_head_norms: whether queries and keys are normalised head by head (Qwen3).
    """

    layers: int
    width: int
    heads_width: int
    kv_width: int
    intermediate: int
    vocabulary: int
    is_tied: bool
    has_head_norms: bool = False

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a Hugging Face config."""
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            heads_width=heads * size,
            kv_width=(getattr(config, "num_key_value_heads", None) or heads) * size,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            is_tied=config.tie_word_embeddings,
            has_head_norms=config.model_type.startswith("qwen3"),
        )

    @property
    def layer_parameters(self) -> int:
        """Matrices of one layer; norms and biases do not matter."""
        return self.width * (2 * self.heads_width + 2 * self.kv_width + 3 * self.intermediate)

    @property
    def parameters(self) -> int:
        """All matrices."""
        tables = 1 if self.is_tied else 2
        return self.layers * self.layer_parameters + tables * self.vocabulary * self.width

    @property
    def layer_activations(self) -> int:
        """Elements that one layer keeps for its backward pass, per token.

        Inputs of two norms and of their scalings, of four projections (shared where the input is), rotated queries and
        keys, values, the attention's output, and gate, its activation, up and product of the MLP; with norms of the
        heads, their inputs and those of their scalings.
        """
        norms = 2 * (self.heads_width + self.kv_width) if self.has_head_norms else 0
        return 6 * self.width + 3 * self.heads_width + 3 * self.kv_width + 4 * self.intermediate + norms


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How many processes share what; 1 where each has its own.

    Args:
        optimizer_shares: processes that share the optimizer states (and master weights).
        gradient_shares: the same for gradients.
        parameter_shares: the same for parameters.
        casts_weights: whether bf16 training keeps bf16 weights and gradients beside fp32 master weights (DeepSpeed).
        offloads_optimizer: whether the optimizer states are in the CPU's memory.
        offloads_parameters: whether the shares of the parameters are there.
    """

    optimizer_shares: int = 1
    gradient_shares: int = 1
    parameter_shares: int = 1
    casts_weights: bool = False
    offloads_optimizer: bool = False
    offloads_parameters: bool = False


def estimate(
    shape: Shape,
    placement: Placement,
    *,
    is_bf16: bool,
    checkpointing: bool,
    tokens: int,
    supervised: int,
    added: int = 0,
    trainable: int | None = None,
) -> dict[str, int]:
    """Bytes per device by what they are for, and in all.

    Args:
        shape: the model.
        placement: the strategy.
        is_bf16: whether training computes in bf16.
        checkpointing: whether layers keep only their input.
        tokens: places in the rows of one micro-batch.
        supervised: rows with a loss among them.
        added: parameters that the objective puts beside the model's.
        trainable: parameters that train; None for all.
    """
    parameters = shape.parameters + added
    trainable = parameters if trainable is None else trainable
    compute = BF16 if is_bf16 else FP32
    kept = BF16 if is_bf16 and placement.casts_weights else FP32
    states = ADAM_STATES * FP32 + (FP32 if placement.casts_weights else 0)  # DeepSpeed steps on a master copy
    gathered = 2 * shape.layer_parameters + shape.vocabulary * shape.width if placement.parameter_shares > 1 else 0
    layer = shape.layer_activations * compute
    activations = shape.layers * (shape.width * compute if checkpointing else layer) + (layer if checkpointing else 0)
    shares = 0 if placement.offloads_parameters else parameters * kept // placement.parameter_shares
    chunk = min(supervised, max(1, MAX_LOGITS // shape.vocabulary))
    parts = {
        "weights": shares + gathered * compute,
        "gradients": trainable * kept // placement.gradient_shares,
        "optimizer": 0 if placement.offloads_optimizer else trainable * states // placement.optimizer_shares,
        "activations": tokens * activations,
        "logits": chunk * shape.vocabulary * (2 * FP32 + (compute if is_bf16 else 0)),
    }
    return {**parts, "total": sum(parts.values())}


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has used at most: of the GPU, or on the CPU of main memory, libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
