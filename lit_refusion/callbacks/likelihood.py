"""The likelihood of held-out responses along training: one figure that all objectives share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Callback

from lit_refusion.data.loader import DataModule
from lit_refusion.errors import UserError
from lit_refusion.evaluation.likelihood import figures, negative_log_likelihood

MAX_TOKENS = 16384
"""Tokens of a forward pass."""


@dataclass(frozen=True, kw_only=True)
class LikelihoodConfig:
    """How much is measured at every validation.

    Args:
        num_examples: the first held-out examples; 0 for none.
        num_draws: draws of each, where the likelihood is a bound.
    """

    num_examples: int
    num_draws: int

    def __post_init__(self) -> None:
        if self.num_examples < 0 or self.num_draws < 1:
            raise UserError(
                f"likelihood.num_examples={self.num_examples}, num_draws={self.num_draws}: num_examples must not be "
                "negative, num_draws must be at least 1"
            )


class LikelihoodCallback(Callback):
    """Logs `val/nelbo`, the negative evidence lower bound in nats per response token (exact where it can be).

    Every rank measures the same examples: where ranks share a model out, they run the same forward passes.

    Args:
        config: how much.
        data: its held-out examples are measured, always with the same noise.
    """

    def __init__(self, config: LikelihoodConfig, data: DataModule) -> None:
        self.config, self.data = config, data

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure and log."""
        module: Any = pl_module
        numbers: np.ndarray = self.data.validation_indices[: self.config.num_examples]
        with trainer.precision_plugin.forward_context():
            found = negative_log_likelihood(
                module.backbone,
                module.objective,
                [self.data.shards[int(number)] for number in numbers],
                num_draws=self.config.num_draws,
                seed=self.data.seed,
                max_tokens_per_batch=MAX_TOKENS,
            )
        module.log_measured({"val/nelbo": figures(found)["nats_per_token"]})


def likelihood_callbacks(config: LikelihoodConfig, data: DataModule) -> list[Callback]:
    """The callback, where something is to be measured.

    Raises:
        UserError: nothing is held out, or the objective has no likelihood.
    """
    if not config.num_examples:
        return []
    given = f"likelihood.num_examples={config.num_examples}"
    if not len(data.validation_indices):
        raise UserError(f"{given}: no example is held out; raise loader.validation_fraction, or give 0")
    if data.objective.likelihood_kind is None:
        raise UserError(f"{given}: objective={data.objective.name} has no likelihood; give 0")
    return [LikelihoodCallback(config, data)]
