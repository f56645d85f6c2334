"""Lossless decoding with a frozen model and its parallel view (arXiv 2605.12825).

Shapes: P prompt tokens, n tokens of a block.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from lit_refusion import reveal
from lit_refusion.decoder import Decoder, agree, check_sampling
from lit_refusion.engine.request import Reply, Request, Row, Sampling, visible
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation, Step
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import MASK


@dataclass(frozen=True, kw_only=True)
class OrthrusDecoder(Decoder):
    """The twins draft a block in one pass, the frozen model verifies it in another; both read one cache.

    A cycle starts from the last token, the anchor. Block pass: [anchor, [MASK] x (n - 1)] through the twins, which see
    the cache and each other. Verify pass: [anchor, drafts] through the frozen model, causally; its keys replace those
    of the block. Greedy: the drafts that the frozen model would have said itself are kept, up to the first that it
    would not, and its own next token. With a temperature: each draft is kept with probability min(1, p / q), and the
    first refused one is replaced by a draw from what p has over q (arXiv 2211.17192). Either way the text is
    distributed as the frozen model's own; in fp32 a greedy one is equal to it, token for token.

    A cycle costs two passes and gives 1 to n tokens. `acceptance_length` is the mean number of drafts in a cycle that
    the frozen model agrees with, those behind an end of sequence included.

    Args:
        block_size: n, the anchor and n - 1 drafts; null takes the model's. It shrinks at the end of the budget.
        num_steps: block passes of a cycle: after each the likeliest of the hidden drafts are fixed, an equal share in
            each (Table 3). More than 1 needs temperature 0.
        temperature: 0 for greedy.
        top_k: draft and verify among the k likeliest tokens; 0 for all.
        top_p: the same for the likeliest tokens up to this probability; 1 for all.
        stop_at_eos: end a row at its first end-of-sequence token.
    """

    objectives: ClassVar[frozenset[str]] = frozenset({"orthrus"})

    block_size: int | None
    num_steps: int
    temperature: float
    top_k: int
    top_p: float
    stop_at_eos: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size is not None and self.block_size < 2:
            raise UserError(f"decoder.block_size={self.block_size}: must be at least 2, an anchor and a draft")
        check_sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        if self.num_steps < 1 or (self.num_steps > 1 and self.temperature > 0):
            raise UserError(
                f"decoder.num_steps={self.num_steps}, temperature={self.temperature}: must be at least 1, and 1 with a "
                "temperature: drafts that depend on later drafts cannot be verified one by one"
            )

    def fit_to(self, spec: DiffusionSpec, *, force: bool = False) -> Decoder:
        """Takes the block size from the model where it is left open."""
        super().fit_to(spec, force=force)
        return replace(self, block_size=agree("block_size", self.block_size, spec.block_size, force=force))

    def row(self, prompt: np.ndarray, eos_token_id: int, rng: np.random.Generator) -> Row:
        """Cycle by cycle."""
        if self.block_size is None:
            raise UserError(
                "decoder.block_size=null: fit the decoder to a model trained with Orthrus (fit_to), or set it"
            )
        return _Response(self, prompt, eos_token_id, rng).decode(self.block_size)


@dataclass
class _Response:
    """The state of one row. Places in the buffer are positions; those before the anchor hold the frozen view's keys."""

    settings: OrthrusDecoder
    prompt: np.ndarray  # [P]
    eos: int
    rng: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)  # drafts kept, of each cycle

    @property
    def sampling(self) -> Sampling:
        settings = self.settings
        return Sampling(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)

    def decode(self, block_size: int) -> Row:
        """Read the prompt, then draft and verify."""
        places = np.arange(len(self.prompt))
        reply = yield self._request(self.prompt, places, (0, places + 1), num_replies=1)
        is_over = self._commit([int(reply.tokens[0])], "prefill")
        while not is_over:
            anchor = len(self.prompt) + len(self.tokens) - 1  # its place
            length = min(block_size, self.settings.max_new_tokens - len(self.tokens) + 1)
            drafts = yield from self._draft(anchor, length)
            kept = yield from self._verify(anchor, drafts)
            is_over = self._commit(kept, "verify")
        cycles = max(1, len(self.num_accepted))
        return Generation(
            tokens=tuple(self.tokens),
            uncut_tokens=tuple(self.tokens),
            forward_passes=len(self.steps),
            stop="eos" if self._has_ended() else "length",
            steps=tuple(self.steps),
            statistics={"acceptance_length": sum(self.num_accepted) / cycles},
        )

    def _draft(self, anchor: int, length: int) -> Generator[Request, Reply, np.ndarray]:
        """[n - 1] drafts for the places behind the anchor."""
        places = anchor + np.arange(length)
        # The last row predicts a token behind the block: it goes first, where replies are not given.
        order = np.concatenate([[length - 1], np.arange(length - 1)])
        drafts = np.full(length - 1, MASK)
        for quota in reveal.quotas(length - 1, min(self.settings.num_steps, length - 1)):
            block = np.concatenate([[self.tokens[-1]], drafts])
            seen = (0, anchor + length)
            reply = yield self._request(block[order], places[order], seen, num_replies=length - 1, drafts="propose")
            self.steps.append(Step("block", (), ()))
            score = np.where(drafts == MASK, reply.p_token, -np.inf)
            chosen = reveal.reveal_quota(score, int(quota))
            drafts = np.where(chosen, reply.tokens, drafts)
        return drafts

    def _verify(self, anchor: int, drafts: np.ndarray) -> Generator[Request, Reply, list[int]]:
        """The drafts that the frozen model agrees with, and its own next token."""
        fed = np.concatenate([[self.tokens[-1]], drafts])
        places = anchor + np.arange(len(fed))
        targets = np.concatenate([drafts, [0]])
        reply = yield self._request(
            fed, places, (0, places + 1), num_replies=len(fed), drafts="verify", targets=targets
        )
        if self.settings.temperature > 0:
            is_kept = self.rng.random(len(drafts)) < reply.acceptance[:-1]
        else:
            is_kept = reply.tokens[:-1] == drafts
        count = reveal.leading(is_kept)
        self.num_accepted.append(count)
        return [*drafts[:count].tolist(), int(reply.tokens[count])]

    def _request(
        self,
        tokens: np.ndarray,
        places: np.ndarray,
        seen: tuple[int, np.ndarray | int],
        *,
        num_replies: int,
        drafts: Literal["propose", "verify"] | None = None,
        targets: np.ndarray | None = None,
    ) -> Request:
        return Request(
            tokens=tokens,
            positions=places,
            places=places,
            intervals=np.broadcast_to(visible(seen), (len(tokens), *visible((0, 0)).shape[1:])),
            num_replies=num_replies,
            targets=np.zeros(0, np.int64) if targets is None else targets,
            sampling=self.sampling,
            adapted=drafts == "propose",
            drafts=drafts if self.settings.temperature > 0 else None,
            steps=self.steps,
        )

    def _commit(self, tokens: list[int], kind: str) -> bool:
        """Keep tokens up to the end of the sequence or of the budget; returns whether the response is over."""
        tokens = tokens[: self.settings.max_new_tokens - len(self.tokens)]
        if self.settings.stop_at_eos and self.eos in tokens:
            tokens = tokens[: tokens.index(self.eos) + 1]
        first = len(self.tokens)
        self.tokens.extend(tokens)
        self.steps.append(Step(kind, tuple(range(first, len(self.tokens))), tuple(tokens)))
        return self._has_ended() or len(self.tokens) == self.settings.max_new_tokens

    def _has_ended(self) -> bool:
        return self.settings.stop_at_eos and self.tokens[-1] == self.eos
