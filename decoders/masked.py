"""Decoding for full-attention masked diffusion: LLaDA, Dream, and Fast-dLLM's training-free accelerations.

Shapes: P prompt tokens, L response positions (the canvas), r candidates of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from lit_refusion import reveal
from lit_refusion.decoder import Decoder, agree
from lit_refusion.engine.request import Reply, Request, Row, Sampling, visible
from lit_refusion.errors import UserError
from lit_refusion.generation import Step
from lit_refusion.reveal import Ranking
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import MASK


@dataclass(frozen=True, kw_only=True)
class MaskedDecoder(Decoder):
    """The whole response starts hidden; every pass reveals the most certain tokens of the current block.

    LLaDA (arXiv 2502.09992): blocks left to right, an equal quota per step. Dream (arXiv 2508.15487): one block, a
    quota from a time grid, shifted logits. Fast-dLLM (arXiv 2505.22618): `threshold` or `factor` in place of the
    quota, and approximate caches that are refreshed at every block.

    Differs from Dream's released sampler in two ways: scores come from the probabilities at temperature 1, not from
    the tempered and filtered ones, and a step of the time schedule reveals at least one token. Differs from
    Fast-dLLM for Dream, which fills a block's first position from the block's first pass: here the row before the
    block is run with it in every pass.

    Args:
        block_size: tokens of a block; null for the whole canvas.
        steps: passes over the whole response without a parallel rule, spread evenly over the blocks.
        schedule: quota of a step: "equal" (LLaDA) or "time" (Dream).
        ranking: confidence, margin, entropy or random.
        ranking_temperature: above 0 draw positions from softmax(score / temperature) (Dream's alg_temp).
        threshold: reveal all candidates whose score reaches it; null for the quota.
        factor: Fast-dLLM's factor rule; null for the quota.
        entropy_bound: EB-Sampler's gamma (arXiv 2505.24857); null for the quota.
        temperature: of the candidate tokens; 0 for argmax.
        top_p: candidates come from the likeliest tokens up to this probability; 1 for all.
        guidance: classifier-free guidance scale with a hidden prompt; 0 for none.
        cache: "none" runs everything in every pass; "prefix" keeps the keys of what stands before the block from the
            block's first pass; "dual" also those behind it.
        shift: whether a token is predicted by the row before it; null takes the model's convention.
        as_released: with a cache, run one pass more for a block that its first pass completed, as the released
            Fast-dLLM decoder does; it changes no token.
        stop_at_eos: stop once an end-of-sequence token is revealed with nothing hidden before it, and cut behind it.
    """

    objectives: ClassVar[frozenset[str]] = frozenset({"llada", "dream"})

    block_size: int | None
    steps: int
    schedule: Literal["equal", "time"]
    ranking: Ranking
    ranking_temperature: float
    threshold: float | None
    factor: float | None
    entropy_bound: float | None
    temperature: float
    top_p: float
    guidance: float
    cache: Literal["none", "prefix", "dual"]
    shift: bool | None
    as_released: bool
    stop_at_eos: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = {name: getattr(self, name) for name in ("threshold", "factor", "entropy_bound")}
        if sum(value is not None for value in rules.values()) > 1:
            raise UserError(f"decoder: at most one of {rules} may be set; set the others to null")
        if self.steps < 1 or (self.block_size is not None and self.block_size < 1):
            raise UserError(f"decoder.steps={self.steps}, block_size={self.block_size}: must be at least 1")
        if min(self.temperature, self.ranking_temperature, self.guidance) < 0 or not 0 < self.top_p <= 1:
            raise UserError(
                f"decoder.temperature={self.temperature}, ranking_temperature={self.ranking_temperature}, guidance="
                f"{self.guidance}, top_p={self.top_p}: the first three must not be negative, top_p must lie in (0, 1]"
            )
        reveal.check_threshold(self.threshold, self.ranking)
        if self.factor is not None and not (self.factor > 0 and self.ranking == "confidence"):
            raise UserError(
                f"decoder.factor={self.factor}: must be positive, with ranking=confidence, not {self.ranking}"
            )
        if self.entropy_bound is not None and self.entropy_bound < 0:
            raise UserError(f"decoder.entropy_bound={self.entropy_bound}: must not be negative")
        if self.guidance and self.cache != "none":
            raise UserError(f"decoder.guidance={self.guidance} needs decoder.cache=none, found {self.cache}")

    def fit_to(self, spec: DiffusionSpec, *, force: bool = False) -> Decoder:
        """Takes the shift from the model where it is left open."""
        super().fit_to(spec, force=force)
        return replace(self, shift=agree("shift", self.shift, spec.shift == "all", force=force))

    def capacity(self, longest_prompt: int) -> int:
        """Prompt and canvas, twice with guidance."""
        return (longest_prompt + self.max_new_tokens) * (2 if self.guidance else 1)

    def row(self, prompt: np.ndarray, eos_token_id: int, rng: np.random.Generator) -> Row:
        """Block by block, pass by pass."""
        if self.shift is None:
            raise UserError("decoder.shift=null: fit the decoder to a model (fit_to), or set true or false")
        return _Response(self, prompt, eos_token_id, rng).decode()


@dataclass
class _Response:
    """The state of one row. Places in the buffer are positions: the canvas never moves."""

    settings: MaskedDecoder
    prompt: np.ndarray  # [P]
    eos: int
    rng: np.random.Generator
    response: np.ndarray = field(init=False)  # [L] token, or MASK
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.response = np.full(self.settings.max_new_tokens, MASK, np.int64)

    def decode(self) -> Row:
        """Reveal block after block; stop at a finished end-of-sequence token."""
        length, size = len(self.response), self.settings.block_size or len(self.response)
        starts = range(0, length, size)
        steps_per_block = max(1, self.settings.steps // len(starts))
        end = None
        for start in starts:
            stop = min(start + size, length)
            quotas = reveal.quotas(stop - start, steps_per_block)
            step = 0
            while end is None and (hidden := start + np.flatnonzero(self.response[start:stop] == MASK)).size:
                reply = yield self._request(hidden, start=start, stop=stop, is_first=step == 0)
                chosen = self._choose(reply, step, steps_per_block, quotas)
                places, tokens = hidden[chosen], reply.tokens[chosen]
                self.response[places] = tokens
                self.steps.append(Step("reveal", tuple(places.tolist()), tuple(tokens.tolist())))
                step += 1
                if self.settings.stop_at_eos:
                    end = reveal.ended_at(self.response, self.eos, MASK)
            if step == 1 and self.settings.as_released and self.settings.cache != "none":
                yield self._request(np.zeros(0, np.int64), start=start, stop=stop, is_first=False)
                self.steps.append(Step("idle", (), ()))
            if end is not None:
                break
        return reveal.finish(self.response, end, self.steps, hidden=MASK)

    def _choose(self, reply: Reply, step: int, num_steps: int, quotas: np.ndarray) -> np.ndarray:
        """[r] bool: the candidates to reveal."""
        settings = self.settings
        score = reveal.rank(reply, settings.ranking, self.rng)
        if settings.threshold is not None:
            return reveal.reveal_threshold(score, settings.threshold)
        if settings.factor is not None:
            return reveal.reveal_factor(score, settings.factor)
        if settings.entropy_bound is not None:
            return reveal.reveal_entropy_bound(score, reply.entropy, settings.entropy_bound)
        if settings.schedule == "time":
            count = reveal.time_quota(len(score), step, num_steps)
        else:
            count = int(quotas[min(step, len(quotas) - 1)])
        return reveal.reveal_quota(reveal.perturb(score, settings.ranking_temperature, self.rng), count)

    def _request(self, hidden: np.ndarray, *, start: int, stop: int, is_first: bool) -> Request:
        """Everything, or the part whose keys are not kept; the rows that predict `hidden` are answered."""
        settings, num_prompt = self.settings, len(self.prompt)
        text = np.concatenate([self.prompt, self.response])
        shift = int(bool(settings.shift))
        first, last = 0, len(text)
        if not is_first and settings.cache != "none":
            first = num_prompt + start - shift
            last = len(text) if settings.cache == "prefix" else num_prompt + stop
        fed = np.arange(first, last)
        answered = num_prompt + hidden - shift
        fed = np.concatenate([np.setdiff1d(fed, answered), answered])
        request = Request(
            tokens=text[fed],
            positions=fed,
            places=fed,
            intervals=visible((0, np.full(len(fed), len(text)))),
            num_replies=len(answered),
            sampling=Sampling(temperature=settings.temperature, top_p=settings.top_p),
            entropy=settings.ranking == "entropy" or settings.entropy_bound is not None,
            margin=settings.ranking == "margin",
            steps=self.steps,
        )
        return self._with_guidance(request) if settings.guidance else request

    def _with_guidance(self, request: Request) -> Request:
        """Add the same text with a hidden prompt in the second half of the buffer, in front of the answered rows."""
        length, count = len(request.tokens), request.num_replies
        tokens = np.where(request.positions < len(self.prompt), MASK, request.tokens)
        order = np.concatenate(
            [np.arange(length - count), length + np.arange(length), np.arange(length - count, length)]
        )
        join = lambda one, two: np.concatenate([one, two])[order]  # noqa: E731
        return replace(
            request,
            tokens=join(request.tokens, tokens),
            positions=join(request.positions, request.positions),
            places=join(request.places, length + request.places),
            intervals=join(request.intervals, visible((length, np.full(length, 2 * length)))),
            guidance=self.settings.guidance,
            unconditional=(length - count) + np.arange(length - count, length),
        )
