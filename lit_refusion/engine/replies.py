"""From hidden states to the answers of requests. Shapes: b rows, Q queries, R replies, r of one row, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lit_refusion.backbone import Backbone
from lit_refusion.engine.request import Reply, Request, Row
from lit_refusion.engine.sampling import distribution, draw_residual, draw_tokens
from lit_refusion.losses import MAX_LOGITS


@dataclass
class Live:
    """A row under way: its generator, the request that waits, its own source of noise, and drafts to be verified."""

    number: int
    row: Row
    request: Request
    generator: torch.Generator
    proposed: list[Tensor] = field(default_factory=list)  # [r, V] in all, the distributions they were drawn from
    num_told: int = 0  # steps that the watcher knows of


def answer(backbone: Backbone, hidden: Tensor, lives: list[Live]) -> list[Reply]:
    """One reply per row: logits are reduced on the device, and [R, 6] figures come back in one transfer."""
    requests = [live.request for live in lives]
    width = hidden.shape[1]
    places, partners, targets = [], [], []
    for b, request in enumerate(requests):
        length, count = len(request.tokens), request.num_replies
        own = np.arange(length - count, length)
        places.append(b * width + own)
        partners.append(b * width + (request.unconditional if len(request.unconditional) else own))
        targets.append(request.targets if len(request.targets) else np.zeros(count, np.int64))
    columns = [np.concatenate(parts) for parts in (places, partners, targets)]
    chosen = torch.from_numpy(np.stack(columns)).to(hidden.device)  # [3, R]
    rows = hidden.flatten(0, 1)
    counts = [request.num_replies for request in requests]
    owner = np.repeat(np.arange(len(requests)), counts)

    figures = torch.zeros(len(owner), 6, dtype=torch.float64, device=hidden.device)
    for part in split_replies(counts, limit=max(1, MAX_LOGITS // backbone.vocab_size)):
        logits = _guided_logits(backbone, rows, chosen[:2, part], owner[part], requests)
        figures[part] = _figures(backbone, logits, chosen[2, part], owner[part], lives)
    table = figures.cpu().numpy()
    parts = np.split(table, np.cumsum(counts)[:-1])
    return [Reply(part[:, 0].astype(np.int64), *part[:, 1:].T) for part in parts]


def _guided_logits(
    backbone: Backbone, rows: Tensor, chosen: Tensor, owner: np.ndarray, requests: list[Request]
) -> Tensor:
    """[R, V] logits in fp32, moved away from the unconditional ones where a request asks for it."""
    logits = backbone.logits(rows[chosen[0]]).float()
    scales = np.array([request.guidance for request in requests])[owner]
    if scales.any():
        scale = torch.from_numpy(scales).to(logits)[:, None]
        without = backbone.logits(rows[chosen[1]]).float()
        logits = without + (scale + 1) * (logits - without)
    return logits


def _figures(backbone: Backbone, logits: Tensor, targets: Tensor, owner: np.ndarray, lives: list[Live]) -> Tensor:
    """[R, 6]: token, its probability, the target's, entropy, margin, acceptance. Overwrites `logits`."""
    requests = [live.request for live in lives]
    figures = torch.zeros(len(logits), 6, dtype=torch.float64, device=logits.device)
    log_total = logits.logsumexp(-1, keepdim=True)
    if any(request.entropy for request in requests):
        figures[:, 3] = torch.special.entr((logits - log_total).exp()).sum(-1).double()
    if any(request.margin for request in requests):
        best = (logits.topk(2, dim=-1).values - log_total).exp().double()
        figures[:, 4] = best[:, 0] - best[:, 1]
    logits[:, backbone.mask_token_id] = -torch.inf  # no decoder may commit [MASK]
    tokens, figures[:, 5] = _draw(logits, targets, owner, lives)
    pair = torch.stack([tokens, targets], dim=1)
    figures[:, 0] = tokens.double()
    figures[:, 1:3] = (logits.gather(1, pair) - log_total).exp().double()
    return figures


def _draw(logits: Tensor, targets: Tensor, owner: np.ndarray, lives: list[Live]) -> tuple[Tensor, Tensor]:
    """[R] tokens and [R] acceptance of the targets."""
    tokens, acceptance = logits.argmax(-1), torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for b in np.unique(owner):
        live = lives[b]
        first, last = np.searchsorted(owner, [b, b + 1])
        own = slice(int(first), int(last))
        if live.request.drafts == "verify":
            tokens[own], acceptance[own] = _verify(logits[own], targets[own], live)
        elif live.request.sampling.temperature > 0:
            tokens[own] = draw_tokens(logits[own], live.request.sampling, live.generator)
            if live.request.drafts == "propose":
                live.proposed.append(distribution(logits[own], live.request.sampling))
    return tokens, acceptance


def _verify(logits: Tensor, targets: Tensor, live: Live) -> tuple[Tensor, Tensor]:
    """[r] tokens that follow if a target is refused, and [r] its acceptance; the last reply, without one, is a draw.

    Replies may come in parts, first to last: what is proposed is used up as they do.
    """
    p = distribution(logits, live.request.sampling)
    proposed = torch.cat([*live.proposed, p.new_zeros(1, p.shape[1])])  # nothing is proposed for the last
    q, live.proposed = proposed[: len(p)], [proposed[len(p) : -1]]
    tokens = draw_residual(p, q, live.generator)
    ratio = (p.gather(1, targets[:, None]) / q.gather(1, targets[:, None])).double()[:, 0]
    return tokens, ratio.clamp(max=1).nan_to_num(nan=0.0)


def split_replies(counts: Sequence[int], *, limit: int) -> list[slice]:
    """Slices of at most `limit` replies (`counts` per row).

    Where one slice is not enough they break at the rows' borders, and within a row from its own start: how a row's
    samples are drawn must not depend on its neighbours.
    """
    total = sum(counts)
    if total <= limit:
        return [slice(0, total)] if total else []
    stops = np.cumsum(counts).tolist()
    return [
        slice(start, min(start + limit, stop))
        for stop, count in zip(stops, counts)
        for start in range(stop - count, stop, limit)
    ]
