"""Joining the requests of all live rows into forward passes. Shapes: b live rows, Q queries, S places, R replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_refusion.backbone import Backbone
from lit_refusion.engine.cache import BufferCache
from lit_refusion.engine.replies import Live, answer
from lit_refusion.engine.request import Reply, Request, Row, visible
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation, Step
from lit_refusion.views import MASK


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
            dtype=_compute_dtype(backbone),
            device=backbone.device,
        )
        self.live: list[Live] = []
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
            self.live.append(Live(number, row, next(row), generator))

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

    def _tell(self, live: Live, steps: Sequence[Step]) -> None:
        if self.watch.on_step is not None:
            for step in steps[live.num_told :]:
                self.watch.on_step(live.number, step)
            live.num_told = max(live.num_told, len(steps))

    def _forward(self, lives: list[Live], rows: list[int]) -> list[Reply]:
        """One forward pass for these rows of the cache."""
        return answer(self.backbone, self._hidden([live.request for live in lives], rows), lives)

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


def _compute_dtype(backbone: Backbone) -> torch.dtype:
    """What keys and values are computed in: the weights' dtype, or autocast's."""
    kind = backbone.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else backbone.model.dtype


def interval_mask(intervals: Tensor, visible: int) -> Tensor:
    """[b, 1, Q, visible] bool from [b, Q, 6] interval bounds: a key is seen where any interval holds its place."""
    key = torch.arange(visible, device=intervals.device)
    bounds = intervals[..., None]  # [b, Q, 6, 1]
    inside = [(key >= bounds[:, :, i]) & (key < bounds[:, :, i + 1]) for i in (0, 2, 4)]  # [b, Q, visible] each
    return (inside[0] | inside[1] | inside[2])[:, None]
