"""Joining the requests of all live rows into forward passes. Shapes: b live rows, Q queries, S places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_refusion.backbone import Backbone
from lit_refusion.engine.cache import BufferCache
from lit_refusion.engine.forward import Forward, fastest_forward
from lit_refusion.engine.queries import Queries
from lit_refusion.engine.replies import Live, answer
from lit_refusion.engine.request import Reply, Request, Row, visible
from lit_refusion.generation import Generation, Step


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
        self.forwards: dict[bool, Forward] = {}  # by whether passes are adapted
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
        hidden, starts = self._hidden([live.request for live in lives], rows)
        return answer(self.backbone, hidden, starts, lives)

    def _hidden(self, requests: list[Request], rows: list[int]) -> tuple[Tensor, np.ndarray]:
        """[M, D] final hidden states of the queries, and [b] where each row's begin."""
        adapted = requests[0].adapted
        if adapted not in self.forwards:
            self.forwards[adapted] = fastest_forward(
                self.backbone, self.cache, is_shared=self.watch.agree is not None, adapted=adapted
            )
        return self.forwards[adapted](self._table(requests), rows)

    def _table(self, requests: list[Request]) -> Queries:
        return Queries.joined(requests, mask_token_id=self.backbone.mask_token_id, capacity=self.capacity)


def _compute_dtype(backbone: Backbone) -> torch.dtype:
    """What keys and values are computed in: the weights' dtype, or autocast's."""
    kind = backbone.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else backbone.model.dtype
