"""From hidden states to the answers of requests. Shapes: b rows, Q queries, R replies, r of one row, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from lit_refusion.backbone import Backbone
from lit_refusion.engine.request import FIGURES, Reply, Request, Row
from lit_refusion.engine.sampling import distribution, draw_residual, draw_tokens, likeliest
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


def answer(backbone: Backbone, hidden: Tensor, starts: np.ndarray, lives: list[Live]) -> list[Reply]:
    """One reply per row: logits are reduced on the device, and [R, 6] figures come back in one transfer.

    Args:
        backbone: has the output head.
        hidden: [M, D] final hidden states.
        starts: [b] where each row's begin.
        lives: the rows.
    """
    requests = [live.request for live in lives]
    counts = [request.num_replies for request in requests]
    places, partners, targets = [], [], []
    for start, count, request in zip(starts.tolist(), counts, requests):
        length = start + len(request.tokens)
        places.append(np.arange(length - count, length))
        partners.append(start + request.unconditional if len(request.unconditional) else places[-1])
        targets.append(request.targets if len(request.targets) else np.zeros(count, np.int64))
    columns = np.concatenate([*places, *partners, *targets]).reshape(3, -1)
    chosen = torch.from_numpy(columns).to(hidden.device, non_blocking=True)  # [3, R]
    owner = np.repeat(np.arange(len(requests)), counts)

    found: list[Tensor] = []
    names: list[str] = []
    for part in split_replies(counts, limit=max(1, MAX_LOGITS // backbone.vocab_size)):
        logits = _guided_logits(backbone, hidden, chosen[:2, part], owner[part], requests)
        figures = _figures(backbone, logits, chosen[2, part], owner[part], lives)
        names = list(figures)
        found.append(torch.stack([figure.double() for figure in figures.values()]))
    table = (found[0] if len(found) == 1 else torch.cat(found, dim=1)).cpu().numpy() if found else ()
    return _dealt(dict(zip(names, table)), counts)


def _dealt(figures: dict[str, np.ndarray], counts: list[int]) -> list[Reply]:
    """The [R] figures as one reply per row, with zeros for those that nobody asked for."""
    nothing = np.zeros(sum(counts))
    columns = [figures.get(name, nothing) for name in FIGURES]
    columns[0] = columns[0].astype(np.int64)  # tokens
    return [
        Reply(*[column[stop - count : stop] for column in columns]) for count, stop in zip(counts, accumulate(counts))
    ]


def _guided_logits(
    backbone: Backbone, hidden: Tensor, chosen: Tensor, owner: np.ndarray, requests: list[Request]
) -> Tensor:
    """[R, V] logits in fp32, moved away from the unconditional ones where a request asks for it."""
    logits = backbone.logits(hidden.index_select(0, chosen[0])).float()
    if any(request.guidance for request in requests):
        scales = np.array([request.guidance for request in requests])[owner]
        scale = torch.from_numpy(scales).to(logits)[:, None]
        without = backbone.logits(hidden.index_select(0, chosen[1])).float()
        logits = without + (scale + 1) * (logits - without)
    return logits


def _figures(
    backbone: Backbone, logits: Tensor, targets: Tensor, owner: np.ndarray, lives: list[Live]
) -> dict[str, Tensor]:
    """[R] each of what some row asks for, under the names of `Reply`. Overwrites `logits`."""
    figures: dict[str, Tensor] = {}
    log_p = logits.log_softmax(-1)
    if any(live.request.entropy for live in lives):
        figures["entropy"] = torch.special.entr(log_p.exp()).sum(-1)
    if any(live.request.margin for live in lives):
        best = log_p.topk(2, dim=-1).values.exp().double()
        figures["margin"] = best[:, 0] - best[:, 1]
    logits[:, backbone.mask_token_id] = -torch.inf  # no decoder may commit [MASK]
    tokens, acceptance = _draw(logits, targets, owner, lives)
    if acceptance is not None:
        figures["acceptance"] = acceptance
    p_token, p_target = log_p.gather(1, torch.stack([tokens, targets], dim=1)).exp().unbind(1)
    return figures | {"tokens": tokens, "p_token": p_token, "p_target": p_target}


def _draw(logits: Tensor, targets: Tensor, owner: np.ndarray, lives: list[Live]) -> tuple[Tensor, Tensor | None]:
    """[R] tokens, and [R] acceptance of the targets where some are verified."""
    tokens, acceptance = likeliest(logits), None
    if any(live.request.drafts == "verify" for live in lives):
        acceptance = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for b, live in enumerate(lives):
        first, last = np.searchsorted(owner, [b, b + 1]) if live.request.sampling.temperature > 0 else (0, 0)
        if first == last:
            continue
        own = slice(int(first), int(last))
        if live.request.drafts == "verify":
            assert acceptance is not None
            tokens[own], acceptance[own] = _verify(logits[own], targets[own], live)
        else:
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
