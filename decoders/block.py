"""Decoding for block diffusion: BD3-LM, SDAR, Fast-dLLM v2. Shapes: P prompt tokens, B tokens of a block."""

from __future__ import annotations

from collections.abc import Generator
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
class BlockDecoder(Decoder):
    """Blocks left to right, each denoised in place given the exact keys of all finished ones.

    A finished block is run once more as clean text to get its keys; that rides on the first pass of the next block,
    so it costs no pass of its own (SDAR and Fast-dLLM v2 count one per block).

    BD3-LM (arXiv 2503.09573): `ranking: random`, one token a pass (first-hitting sampling). SDAR: quota per step
    (static), or all above `threshold` but at least the quota (dynamic). Fast-dLLM v2 (arXiv 2509.26328): shift,
    threshold, sub-blocks; the first token of a block comes from the last row of the one before.

    Args:
        block_size: B; null takes the model's. Boundaries are those of training.
        block_origin: "sequence" or "response"; null takes the model's.
        steps_per_block: passes over a block, its tokens split evenly over them; null for one token a pass.
        ranking: confidence, margin, entropy or random.
        threshold: reveal all candidates whose score exceeds it, at least the quota; null for the quota alone.
        sub_block_size: reveal inside sub-blocks of this size, left to right; null for the whole block.
        temperature: of the candidate tokens; 0 for argmax.
        top_p: candidates come from the likeliest tokens up to this probability; 1 for all.
        shift: whether a token is predicted by the row before it; null takes the model's convention.
        stop_at_eos: stop once an end-of-sequence token is revealed with nothing hidden before it, and cut behind it.
    """

    objectives: ClassVar[frozenset[str]] = frozenset({"bd3"})

    block_size: int | None
    block_origin: Literal["sequence", "response"] | None
    steps_per_block: int | None
    ranking: Ranking
    threshold: float | None
    sub_block_size: int | None
    temperature: float
    top_p: float
    shift: bool | None
    stop_at_eos: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("block_size", "steps_per_block", "sub_block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"decoder.{name}={value}: must be at least 1")
        reveal.check_threshold(self.threshold, self.ranking)
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise UserError(
                f"decoder.temperature={self.temperature}, top_p={self.top_p}: temperature must not be negative, top_p "
                "must lie in (0, 1]"
            )

    def fit_to(self, spec: DiffusionSpec, *, force: bool = False) -> Decoder:
        """Takes block size, origin and shift from the model where they are left open."""
        super().fit_to(spec, force=force)
        return replace(
            self,
            block_size=agree("block_size", self.block_size, spec.block_size, force=force),
            block_origin=agree("block_origin", self.block_origin, spec.block_origin, force=force),
            shift=agree("shift", self.shift, spec.shift == "all", force=force),
        )

    def row(self, prompt: np.ndarray, eos_token_id: int, rng: np.random.Generator) -> Row:
        """Block by block."""
        if self.block_size is None or self.block_origin is None or self.shift is None:
            raise UserError(
                f"decoder.block_size={self.block_size}, block_origin={self.block_origin}, shift={self.shift}: fit the "
                "decoder to a block-diffusion model (fit_to), or set them"
            )
        return _Response(self, prompt, eos_token_id, rng).decode()


@dataclass
class _Response:
    """The state of one row. Places in the buffer are positions; `num_keyed` of them hold final keys."""

    settings: BlockDecoder
    prompt: np.ndarray  # [P]
    eos: int
    rng: np.random.Generator
    num_keyed: int = 0
    text: np.ndarray = field(init=False)  # [P + max_new_tokens] token, or MASK
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text = np.concatenate([self.prompt, np.full(self.settings.max_new_tokens, MASK)])

    def decode(self) -> Row:
        """Denoise the blocks that hold response tokens."""
        end = None
        for start, stop in self._blocks():
            end = yield from self._denoise(start, stop)
            if end is not None:
                break
        return reveal.finish(self.text[len(self.prompt) :], end, self.steps, hidden=MASK)

    def _blocks(self) -> list[tuple[int, int]]:
        """(start, stop) of every block that holds response tokens; the first may begin inside the prompt."""
        assert self.settings.block_size is not None
        size, length = self.settings.block_size, len(self.prompt)
        first = length // size * size if self.settings.block_origin == "sequence" else length
        return [(start, min(start + size, len(self.text))) for start in range(first, len(self.text), size)]

    def _denoise(self, start: int, stop: int) -> Generator[Request, Reply, int | None]:
        """Reveal one block; returns where the response ended, if it did."""
        settings, num_prompt = self.settings, len(self.prompt)
        num_hidden = int((self.text[start:stop] == MASK).sum())
        quotas = reveal.quotas(num_hidden, settings.steps_per_block or num_hidden)
        step = 0
        while (hidden := start + np.flatnonzero(self.text[start:stop] == MASK)).size:
            is_opening = bool(settings.shift) and step == 0 and hidden[0] == start
            candidates = self._candidates(hidden, start)
            reply = yield self._request(candidates, start=start, stop=stop)
            self.num_keyed = start
            # In the opening pass the clean row before the block gives its first token; the others then see it.
            quota = int(quotas[min(step, len(quotas) - 1)])
            chosen = candidates == start if is_opening else self._choose(reply, quota)
            step += 1
            revealed = candidates[chosen]
            self.text[revealed] = reply.tokens[chosen]
            places = tuple((revealed - num_prompt).tolist())
            self.steps.append(Step("reveal", places, tuple(reply.tokens[chosen].tolist())))
            if settings.stop_at_eos:
                end = reveal.ended_at(self.text[num_prompt:], self.eos, MASK)
                if end is not None:
                    return end
        return None

    def _candidates(self, hidden: np.ndarray, start: int) -> np.ndarray:
        """The hidden positions that may be revealed now: those of the first sub-block that has any."""
        size = self.settings.sub_block_size
        if size is None:
            return hidden
        number = (hidden - start) // size
        return hidden[number == number[0]]

    def _choose(self, reply: Reply, quota: int) -> np.ndarray:
        score = reveal.rank(reply, self.settings.ranking, self.rng)
        if self.settings.threshold is not None:
            return reveal.reveal_threshold(score, self.settings.threshold, minimum=quota, strict=True)
        return reveal.reveal_quota(score, quota)

    def _request(self, candidates: np.ndarray, *, start: int, stop: int) -> Request:
        """Clean text whose keys are missing, then the block; the rows that predict the candidates are answered."""
        settings = self.settings
        fed = np.arange(self.num_keyed, stop)
        answered = candidates - int(bool(settings.shift))
        assert answered[0] >= self.num_keyed, "the block's first token is revealed in the block's first pass"
        fed = np.concatenate([np.setdiff1d(fed, answered), answered])
        return Request(
            tokens=self.text[fed],
            positions=fed,
            places=fed,
            intervals=visible((0, self._block_end(fed, start=start, stop=stop))),
            num_replies=len(answered),
            sampling=Sampling(temperature=settings.temperature, top_p=settings.top_p),
            entropy=settings.ranking == "entropy",
            margin=settings.ranking == "margin",
            steps=self.steps,
        )

    def _block_end(self, fed: np.ndarray, *, start: int, stop: int) -> np.ndarray:
        """[Q] end of each position's block: a token sees its own block and all before it."""
        assert self.settings.block_size is not None
        size, num_prompt = self.settings.block_size, len(self.prompt)
        if self.settings.block_origin == "sequence":
            ends = (fed // size + 1) * size
        else:
            ends = np.where(fed < num_prompt, num_prompt, num_prompt + ((fed - num_prompt) // size + 1) * size)
        return np.minimum(ends, np.where(fed < start, start, stop))
