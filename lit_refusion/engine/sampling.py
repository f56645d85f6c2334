"""Drawing tokens. Shapes: m rows, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_refusion.engine.request import Sampling


def draw_tokens(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """[m] tokens from [m, V] fp32 logits by the Gumbel trick in float64.

    Float64 because uniform noise in fp32 has too few values near 0 to reach the rare tokens (arXiv 2409.02908).
    """
    logits = filter_logits(logits, top_k=sampling.top_k, top_p=sampling.top_p, temperature=sampling.temperature)
    uniform = torch.rand(logits.shape, dtype=torch.float64, device=logits.device, generator=generator)
    tiny = torch.finfo(torch.float64).tiny
    gumbel = -(-uniform.clamp(min=tiny).log()).log()
    return (logits.double() / sampling.temperature + gumbel).argmax(-1)


def filter_logits(logits: Tensor, *, top_k: int, top_p: float, temperature: float) -> Tensor:
    """Logits with everything outside top-k and top-p at -inf; top-p is measured at the given temperature."""
    if top_k:
        kept = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kept, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = (ordered / temperature).softmax(-1)
        drop = p.cumsum(-1) - p >= top_p  # what stands before a token already reaches top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    return logits
