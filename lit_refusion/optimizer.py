"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lit_refusion.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warmup, then a cosine or a constant.

    Args:
        learning_rate: peak.
        schedule: "cosine" falls to `final_ratio` of the peak at the last step; "constant" stays.
        warmup_steps: steps of linear warmup from 0.
        final_ratio: end of the cosine, as a share of the peak.
        weight_decay: applied to matrices, not to norms and biases.
        betas: AdamW's.
        eps: AdamW's.
    """

    learning_rate: float
    schedule: Literal["cosine", "constant"]
    warmup_steps: int
    final_ratio: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise UserError(f"optimizer.learning_rate={self.learning_rate}: must be positive")
        if self.weight_decay < 0 or self.eps <= 0 or not 0 <= self.final_ratio <= 1:
            raise UserError(
                f"optimizer.weight_decay={self.weight_decay}, eps={self.eps}, final_ratio={self.final_ratio}: "
                "weight_decay must not be negative, eps must be positive, final_ratio must lie in [0, 1]"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optimizer.betas={list(self.betas)}: both must lie in [0, 1)")
        if self.warmup_steps < 0:
            raise UserError(f"optimizer.warmup_steps={self.warmup_steps}: must not be negative")

    def factor(self, step: int, *, max_steps: int) -> float:
        """Learning rate of step `step` (from 0) as a share of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        share = min(1.0, (step - self.warmup_steps) / max(1, max_steps - self.warmup_steps))
        return self.final_ratio + (1 - self.final_ratio) * 0.5 * (1 + math.cos(math.pi * share))

    def build(
        self, parameters: Iterable[nn.Parameter], *, max_steps: int
    ) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
        """Optimizer and per-step scheduler of the trainable parameters."""
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        groups = [
            {"params": [p for p in trainable if _num_dimensions(p) >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if _num_dimensions(p) < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
            fused=trainable[0].device.type in ("cpu", "cuda"),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.factor(step, max_steps=max_steps))
        return optimizer, schedule


def _num_dimensions(parameter: nn.Parameter) -> int:
    """Of the whole parameter: under ZeRO-3 a share is flat and the shape is kept aside."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
