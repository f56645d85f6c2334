"""What decoding a prompt gives: tokens, forward passes, and the story of how they came about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Step:
    """One forward pass of one row.

    Args:
        kind: what the pass was for, in the method's own words.
        committed: positions in the response whose tokens became final in this pass.
        tokens: those tokens.
    """

    kind: str
    committed: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The decoded response of one prompt.

    Args:
        tokens: kept tokens in reading order, cut after the first end-of-sequence token unless asked otherwise.
        uncut_tokens: everything that was decoded, in reading order.
        forward_passes: forward passes that this row took part in, the prompt's included.
        stop: "eos", or "length" where the budget ran out first.
        steps: one entry per forward pass.
        statistics: figures of the method under their own names.
    """

    tokens: tuple[int, ...]
    uncut_tokens: tuple[int, ...]
    forward_passes: int
    stop: Literal["eos", "length"]
    steps: tuple[Step, ...] = ()
    statistics: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens kept / forward passes."""
        return len(self.tokens) / max(1, self.forward_passes)
