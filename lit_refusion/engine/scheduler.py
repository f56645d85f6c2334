"""Joining the requests of all live rows into forward passes. Shapes: b live rows, Q queries, S places, R replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lit_refusion.backbone import Backbone
from lit_refusion.engine.cache import BufferCache
from lit_refusion.engine.request import Reply, Request, Row, visible
from lit_refusion.engine.sampling import distribution, draw_residual, draw_tokens
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation, Step
from lit_refusion.losses import MAX_LOGITS
from lit_refusion.views import MASK


@dataclass
class _Live:
    """A row under way: its generator, the request that waits, its own source of noise, and drafts to be verified."""

    number: int
    row: Row
    request: Request
    generator: torch.Generator
    proposed: list[Tensor] = field(default_factory=list)  # [r, V] in all, the distributions they were drawn from
    num_told: int = 0  # steps that the watcher knows of


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a caller of `decode` may follow and decide while it goes on.

    Args:
        on_done: called with the number and the Generation of each row that ends.
        on_step: called with the number of a row and each Step that it has made, before `on_done`.
        goes_on: asked before a row is started; once it says no, the rest are left out.
        agree: where ranks share a model out and have to run the same passes: takes the number of this rank's rows that
            wait for a plain and for an adapted pass, and says which pass all ranks run next (whether it is adapted),
            or None when no rank has a row left. A rank without such a row runs an empty pass.
    """

    on_done: Callable[[int, Generation], None] | None = None
    on_step: Callable[[int, Step], None] | None = None
    goes_on: Callable[[], bool] | None = None
    agree: Callable[[tuple[int, int]], bool | None] | None = None


def decode(
    backbone: Backbone,
    rows: Sequence[Row],
    *,
    batch_size: int,
    capacity: int,
    seeds: Sequence[int],
    watch: Watch | None = None,
) -> list[Generation]:
    """Run every row to its end; a finished row's place goes to the next one that waits (continuous batching).

    Rows do not depend on each other: neither keys nor noise are shared.

    Args:
        backbone: the model.
        rows: one generator per prompt.
        batch_size: rows under way at a time.
        capacity: S, places of a row's buffer.
        seeds: seed of each row's sampling noise.
        watch: what to follow and decide while it goes on.

    Returns:
        One Generation per row, in the order of `rows`; those that were left out are missing.
    """
    watch = watch or Watch()
    was_training = backbone.training
    backbone.eval()
    # Parameters that are gathered while ranks decode together are used in training as well.
    is_alone = watch.agree is None
    try:
        with torch.inference_mode(is_alone), torch.no_grad(), backbone.using_sdpa():
            scheduler = _Scheduler(backbone, rows, batch_size=batch_size, capacity=capacity, seeds=seeds, watch=watch)
            return scheduler.run()
    finally:
        backbone.train(was_training)


class _Scheduler:
    def __init__(
        self,
        backbone: Backbone,
        rows: Sequence[Row],
        *,
        batch_size: int,
        capacity: int,
        seeds: Sequence[int],
        watch: Watch,
    ) -> None:
        self.backbone, self.rows, self.seeds, self.capacity = backbone, rows, seeds, capacity
        self.watch = watch
        self.limit = max(1, min(batch_size, len(rows)))
        self.cache = BufferCache(
            backbone.model.config,
            num_rows=self.limit,
            capacity=capacity,
            dtype=backbone.model.dtype,
            device=backbone.device,
        )
        self.live: list[_Live] = []
        self.started = 0
        self.results: dict[int, Generation] = {}

    def run(self) -> list[Generation]:
        """Forward passes until every row has returned."""
        self._refill()
        while (is_adapted := self._next_kind()) is not None:
            places = [place for place, live in enumerate(self.live) if live.request.adapted == is_adapted]
            if not places:
                self._empty_pass(is_adapted)
                continue
            replies = self._forward([self.live[place] for place in places], places)
            for place, reply in reversed(list(zip(places, replies, strict=True))):
                self._advance(place, reply)
            self._refill()
        return [self.results[number] for number in sorted(self.results)]

    def _next_kind(self) -> bool | None:
        """Whether the next forward pass is adapted; None when all rows have ended.

        Adapted passes and others cannot be joined, so the larger group goes. Rows whose passes alternate fall into
        step by it: the smaller group waits until the larger one has joined it.
        """
        num_adapted = sum(live.request.adapted for live in self.live)
        counts = (len(self.live) - num_adapted, num_adapted)
        if self.watch.agree is not None:
            return self.watch.agree(counts)
        return counts[1] > counts[0] if self.live else None

    def _empty_pass(self, is_adapted: bool) -> None:
        """Take part in a pass of the other ranks."""
        nothing = np.zeros(1, np.int64)
        places = np.full(1, self.cache.trash)
        request = Request(
            tokens=nothing, positions=nothing, places=places, intervals=visible((0, 1)), num_replies=0,
            adapted=is_adapted,
        )  # fmt: skip
        self._hidden([request], [0])

    def _refill(self) -> None:
        goes_on = self.watch.goes_on or (lambda: True)
        while len(self.live) < self.limit and self.started < len(self.rows) and goes_on():
            number, row = self.started, self.rows[self.started]
            self.started += 1
            generator = torch.Generator(self.backbone.device).manual_seed(self.seeds[number])
            self.live.append(_Live(number, row, next(row), generator))

    def _advance(self, place: int, reply: Reply) -> None:
        live = self.live[place]
        try:
            live.request = live.row.send(reply)
            self._tell(live, live.request.steps)
        except StopIteration as stop:
            self._tell(live, stop.value.steps)
            self.results[live.number] = stop.value
            if self.watch.on_done is not None:
                self.watch.on_done(live.number, stop.value)
            last = len(self.live) - 1
            if place != last:
                self.cache.move_row(last, place)
                self.live[place] = self.live[last]
            self.live.pop()

    def _tell(self, live: _Live, steps: Sequence[Step]) -> None:
        if self.watch.on_step is not None:
            for step in steps[live.num_told :]:
                self.watch.on_step(live.number, step)
            live.num_told = max(live.num_told, len(steps))

    def _forward(self, lives: list[_Live], rows: list[int]) -> list[Reply]:
        """One forward pass for these rows of the cache."""
        return self._replies(self._hidden([live.request for live in lives], rows), lives)

    def _hidden(self, requests: list[Request], rows: list[int]) -> Tensor:
        """[b, Q, D] final hidden states of the queries."""
        table, num_visible = self._table(requests)  # [b, Q, 9]
        self.cache.aim(table[:, :, 2], rows=rows, visible=num_visible)
        adapted: dict[str, bool] = {"adapted": True} if requests[0].adapted else {}
        return self.backbone.model.base_model(
            input_ids=table[:, :, 0],
            position_ids=table[:, :, 1],
            attention_mask=interval_mask(table[:, :, 3:], num_visible),
            cache=self.cache,
            use_cache=True,
            **adapted,
        ).last_hidden_state

    def _table(self, requests: list[Request]) -> tuple[Tensor, int]:
        """Tokens, positions, places and intervals of all queries in one transfer; rows are right-padded."""
        longest = max(len(request.tokens) for request in requests)
        table = np.zeros((len(requests), longest, 9), np.int64)
        table[:, :, 2] = self.cache.trash  # a padded query writes to the trash
        table[:, :, 4] = 1  # and sees place 0, so that its row of the mask is not empty
        for b, request in enumerate(requests):
            length = len(request.tokens)
            if request.places.max() >= self.capacity and request.num_replies:
                raise UserError(
                    f"a row needs place {request.places.max()} of a buffer of {self.capacity}; raise the capacity"
                )
            table[b, :length, 0] = np.where(request.tokens == MASK, self.backbone.mask_token_id, request.tokens)
            table[b, :length, 1], table[b, :length, 2] = request.positions, request.places
            table[b, :length, 3:] = request.intervals.reshape(length, 6)
        device = self.backbone.device
        return torch.from_numpy(table).to(device, non_blocking=True), int(table[:, :, 3:].max())

    def _replies(self, hidden: Tensor, lives: list[_Live]) -> list[Reply]:
        """Reduce logits on the device and bring [R, 6] figures back in one transfer."""
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
        for part in split_replies(counts, limit=max(1, MAX_LOGITS // self.backbone.vocab_size)):
            logits = self._guided_logits(rows, chosen[:2, part], owner[part], requests)
            figures[part] = self._figures(logits, chosen[2, part], owner[part], lives)
        table = figures.cpu().numpy()
        parts = np.split(table, np.cumsum(counts)[:-1])
        return [Reply(part[:, 0].astype(np.int64), *part[:, 1:].T) for part in parts]

    def _guided_logits(self, rows: Tensor, chosen: Tensor, owner: np.ndarray, requests: list[Request]) -> Tensor:
        """[R, V] logits in fp32, moved away from the unconditional ones where a request asks for it."""
        logits = self.backbone.logits(rows[chosen[0]]).float()
        scales = np.array([request.guidance for request in requests])[owner]
        if scales.any():
            scale = torch.from_numpy(scales).to(logits)[:, None]
            without = self.backbone.logits(rows[chosen[1]]).float()
            logits = without + (scale + 1) * (logits - without)
        return logits

    def _figures(self, logits: Tensor, targets: Tensor, owner: np.ndarray, lives: list[_Live]) -> Tensor:
        """[R, 6]: token, its probability, the target's, entropy, margin, acceptance. Overwrites `logits`."""
        requests = [live.request for live in lives]
        figures = torch.zeros(len(logits), 6, dtype=torch.float64, device=logits.device)
        log_total = logits.logsumexp(-1, keepdim=True)
        if any(request.entropy for request in requests):
            figures[:, 3] = torch.special.entr((logits - log_total).exp()).sum(-1).double()
        if any(request.margin for request in requests):
            best = (logits.topk(2, dim=-1).values - log_total).exp().double()
            figures[:, 4] = best[:, 0] - best[:, 1]
        logits[:, self.backbone.mask_token_id] = -torch.inf  # no decoder may commit [MASK]
        tokens, figures[:, 5] = self._draw(logits, targets, owner, lives)
        pair = torch.stack([tokens, targets], dim=1)
        figures[:, 0] = tokens.double()
        figures[:, 1:3] = (logits.gather(1, pair) - log_total).exp().double()
        return figures

    def _draw(self, logits: Tensor, targets: Tensor, owner: np.ndarray, lives: list[_Live]) -> tuple[Tensor, Tensor]:
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


def _verify(logits: Tensor, targets: Tensor, live: _Live) -> tuple[Tensor, Tensor]:
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


def interval_mask(intervals: Tensor, visible: int) -> Tensor:
    """[b, 1, Q, visible] bool from [b, Q, 6] interval bounds: a key is seen where any interval holds its place."""
    key = torch.arange(visible, device=intervals.device)
    bounds = intervals[..., None]  # [b, Q, 6, 1]
    inside = [(key >= bounds[:, :, i]) & (key < bounds[:, :, i + 1]) for i in (0, 2, 4)]  # [b, Q, visible] each
    return (inside[0] | inside[1] | inside[2])[:, None]
