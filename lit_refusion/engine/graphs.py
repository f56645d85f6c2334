"""The lean forward as CUDA graphs: one launch a pass instead of some hundreds. Shapes: b rows, Q queries, D width.

A graph replays kernels with the shapes and addresses that it was captured with. So queries and visible keys are padded
to sizes that come back, and each such size has its graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_refusion.engine.lean import LeanForward, Sight
from lit_refusion.engine.queries import INTERVALS, PLACE, POSITION, Queries, starts_of

CAPTURE_AFTER = 16
"""Passes of one size before it is captured, which costs about as much."""

MAX_QUERIES = 1024
"""Queries, with padding, of the largest size: longer passes keep the device busy without a graph."""

VISIBLE_STEP = 256
"""Visible keys are rounded up to a multiple."""

TOLERANCE = 0.02
"""Largest difference of a replay from the pass that it was captured from, of the largest value."""

Pass = Callable[[], Tensor]
Key = tuple[int, int, int]


class GraphedForward:
    """The lean forward, replayed where a size has come often enough.

    Args:
        lean: the forward.
        capture: makes a pass out of one that always reads and writes the same memory; tests give others than graphs.
    """

    def __init__(self, lean: LeanForward, *, capture: Callable[[Pass], Pass] | None = None) -> None:
        self.lean = lean
        self.capture = capture or partial(capture_graph, pool=torch.cuda.graph_pool_handle())
        self.seen: dict[Key, int] = {}
        self.graphs: dict[Key, tuple[Tensor, Pass]] = {}  # the table that is read, [b, Q, 9], and the pass

    def __call__(self, queries: Queries, rows: list[int]) -> tuple[Tensor, np.ndarray]:
        """One forward pass for these rows of the buffer; see `LeanForward`, except that padding is run as well."""
        key = self._size(queries)
        self.seen[key] = self.seen.get(key, 0) + 1
        is_first_rows = rows == list(range(len(rows)))
        is_long = queries.table[:, :, POSITION].max() >= len(self.lean.rotations)
        is_large = key[0] * key[1] > MAX_QUERIES
        if not is_first_rows or is_long or is_large or self.seen[key] <= CAPTURE_AFTER:
            return self.lean(queries, rows)
        table = torch.from_numpy(queries.padded(key[1], trash=self.lean.cache.trash))
        if key not in self.graphs:
            static = table.to(self.lean.embedding.device)
            self.graphs[key] = static, self.capture(lambda: self._pass(static, visible=key[2]))
        static, replay = self.graphs[key]
        static.copy_(table)
        return replay(), starts_of(np.full(*key[:2]))

    def _size(self, queries: Queries) -> Key:
        """Rows, queries and visible keys after padding."""
        b, length = queries.table.shape[:2]
        visible = -(-queries.visible // VISIBLE_STEP) * VISIBLE_STEP
        return b, 1 << (length - 1).bit_length(), min(visible, self.lean.cache.trash + 1)

    def _pass(self, table: Tensor, *, visible: int) -> Tensor:
        """[b x Q, D] hidden states; nothing in here may depend on the values of the table but on the device."""
        self.lean.cache.aim(table[:, :, PLACE], rows=list(range(len(table))), visible=visible)
        mask = self.lean.additive_mask(table[:, :, INTERVALS], visible)
        return self.lean.run(table, [Sight(None, None, visible, mask, False)], slots=None)


def capture_graph(step: Pass, *, pool: Any) -> Pass:
    """A CUDA graph of a pass, or the pass itself where it cannot be captured.

    The pass is run first on a stream of its own, since libraries set themselves up in their first call, and the replay
    is compared with it.

    Args:
        step: always reads and writes the same memory.
        pool: memory of all graphs; a replay's result stays until the next.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            hidden = step()
        graph.replay()
        difference = (hidden - expected).abs().max() / expected.abs().max()
        if not difference <= TOLERANCE:
            raise RuntimeError(f"a replay differs by {difference:.3g}")
    except RuntimeError as error:
        logging.getLogger(__name__).warning("decoding goes on without a CUDA graph: %s", error)
        return step

    def replay() -> Tensor:
        graph.replay()
        return hidden

    return replay
