"""Loss figures that can be compared across objectives: unweighted, per term and per mask rate."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_refusion.objective import Loss
from lit_refusion.views import Batch

NUM_BUCKETS = 4
"""Mask-rate buckets [0, 1/4), ..., [3/4, 1]; one more holds the rows that have no rate."""


class LossMeter(Metric):
    """Sums of losses over micro-batches; reduced over ranks when computed.

    A raw diffusion loss is weighted by 1/p and normalised per example, so it does not tell how well tokens are
    predicted. `compute` gives beside it, per term, the plain mean over supervised tokens of what `measure` names,
    the cross-entropy as a rule.
    """

    full_state_update = False
    denominators: Tensor
    weighted: Tensor
    losses: Tensor
    counts: Tensor
    tokens: Tensor
    places: Tensor

    def __init__(self, terms: tuple[str, ...], *, measure: str = "ce") -> None:
        super().__init__()
        self.terms, self.measure = terms, measure
        shapes: dict[str, tuple[int, ...]] = {
            "weighted": (len(terms),),
            "losses": (len(terms), NUM_BUCKETS + 1),
            "counts": (len(terms), NUM_BUCKETS + 1),
            "tokens": (),
            "places": (),
            "denominators": (),
        }
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: Loss, batch: Batch, *, denominator: float) -> None:
        """Add one micro-batch; `denominator` is its share of the step's denominator."""
        keep = loss.token_term >= 0
        term, value = loss.token_term[keep], loss.token_loss[keep].double()
        weight, rate = loss.token_weight[keep].double(), loss.token_mask_rate[keep]
        bucket = torch.where(rate.isnan(), NUM_BUCKETS, (rate.nan_to_num() * NUM_BUCKETS).clamp(max=NUM_BUCKETS - 1))
        place = term * (NUM_BUCKETS + 1) + bucket.long()
        self.weighted.index_add_(0, term, weight * value)
        self.losses.view(-1).index_add_(0, place, value)
        self.counts.view(-1).index_add_(0, place, torch.ones_like(value))
        self.tokens += (batch.segment_ids > 0).sum()
        self.places += batch.segment_ids.numel()
        self.denominators += denominator

    def compute(self) -> dict[str, float]:
        """Figures by name: `loss`, `loss/TERM`, `ce/TERM`, `ce/TERM/rate_A-B`, `supervised_tokens`, `tokens`,
        `padding` (share of the places in rows that hold no token)."""
        weighted, losses, counts = self.weighted.tolist(), self.losses.tolist(), self.counts.tolist()
        denominator = max(self.denominators.item(), 1e-12)
        figures = {"loss": sum(weighted) / denominator}
        for number, name in enumerate(self.terms):
            figures[f"loss/{name}"] = weighted[number] / denominator
            if sum(counts[number]):
                figures[f"{self.measure}/{name}"] = sum(losses[number]) / sum(counts[number])
            for bucket in range(NUM_BUCKETS):
                if counts[number][bucket]:
                    bounds = f"{bucket / NUM_BUCKETS:.2f}-{(bucket + 1) / NUM_BUCKETS:.2f}"
                    figures[f"{self.measure}/{name}/rate_{bounds}"] = losses[number][bucket] / counts[number][bucket]
        figures["supervised_tokens"] = sum(map(sum, counts))
        figures["tokens"] = self.tokens.item()
        figures["padding"] = 1 - self.tokens.item() / max(1.0, self.places.item())
        return figures
