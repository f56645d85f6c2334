"""What a decoding row asks of a forward pass, and what it gets. Shapes: Q queries, r replies."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from lit_refusion.generation import Generation, Step

NUM_INTERVALS = 3
"""Visible intervals of the buffer per query: enough for prefixes, slots, blocks and dual caches."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a reply's token is drawn: argmax of logits + temperature x Gumbel noise, over what top-k and top-p leave.

    Args:
        temperature: 0 for argmax.
        top_k: keep the k likeliest tokens; 0 for all.
        top_p: keep the likeliest tokens up to this probability; 1 for all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """Tokens to run through the model at chosen places of the row's buffer.

    Args:
        tokens: [Q] ids; `views.MASK` stands for [MASK].
        positions: [Q] position ids (RoPE).
        places: [Q] where the tokens' keys and values go in the buffer.
        intervals: [Q, 3, 2] half-open intervals of the buffer that each query sees; unused ones are empty. A query
            sees keys that this very pass writes, so [0, place + 1) is causal attention.
        num_replies: the last r queries are answered.
        targets: [r] tokens whose probability is wanted; empty where none are.
        sampling: how reply tokens are drawn.
        entropy: whether replies carry the entropy.
        margin: whether replies carry the margin.
        guidance: classifier-free guidance scale s; logits become u + (s + 1)(c - u), c those of the answered query
            and u those of its unconditional partner (the convention of arXiv 2502.09992).
        unconditional: [r] queries that are the partners; empty without guidance.
        adapted: whether the pass goes through the parameters that were trained beside a frozen model.
        drafts: speculative sampling (arXiv 2211.17192, 2302.01318). "propose": the distributions that this request's
            reply tokens are drawn from are kept for the next request that verifies. "verify": the targets, all replies
            but the last having one, are tokens drawn so. Both need a temperature.
        steps: the row's passes so far, for those who watch it; a row that leaves them out is seen at its end.
    """

    tokens: np.ndarray
    positions: np.ndarray
    places: np.ndarray
    intervals: np.ndarray
    num_replies: int
    targets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    sampling: Sampling = Sampling()
    entropy: bool = False
    margin: bool = False
    guidance: float = 0.0
    unconditional: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    adapted: bool = False
    drafts: Literal["propose", "verify"] | None = None
    steps: Sequence[Step] = ()


@dataclass(frozen=True)
class Reply:
    """Answers to the last r queries of a request; probabilities are softmax at temperature 1, in fp32.

    Args:
        tokens: [r] argmax, or the sampled token.
        p_token: [r] probability of that token.
        p_target: [r] probability of the target (of token 0 where no targets were given).
        entropy: [r] in nats; zeros where it was not asked for.
        margin: [r] largest less second largest probability; zeros where it was not asked for.
        acceptance: [r] min(1, p / q) of the targets that are verified, p and q being what top-k and top-p leave at the
            temperature; the token is then drawn from what p has over q, which follows a refusal. Else zeros.
    """

    tokens: np.ndarray
    p_token: np.ndarray
    p_target: np.ndarray
    entropy: np.ndarray
    margin: np.ndarray
    acceptance: np.ndarray


FIGURES = tuple(Reply.__dataclass_fields__)
"""Names of the columns of a reply."""

Row: TypeAlias = Generator[Request, Reply, Generation]
"""A decoding method for one prompt: straight-line code that yields requests and knows nothing of batching."""


def visible(*intervals: tuple[np.ndarray | int, np.ndarray | int]) -> np.ndarray:
    """[Q, 3, 2] intervals from (start, stop) pairs, each an integer or [Q]."""
    assert len(intervals) <= NUM_INTERVALS, f"{len(intervals)} intervals"
    length = max(np.size(bound) for pair in intervals for bound in pair)
    table = np.zeros((length, NUM_INTERVALS, 2), np.int64)
    for number, (start, stop) in enumerate(intervals):
        table[:, number, 0], table[:, number, 1] = start, stop
    return table
