"""The seam of a decoding method: tokens in, tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.spec import DiffusionSpec


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


@dataclass(frozen=True, kw_only=True)
class Decoder(ABC):
    """A decoding method: a frozen dataclass of settings, without defaults.

    Args:
        max_new_tokens: budget per prompt.
        batch_size: rows decoded together; finished rows are replaced by waiting prompts.
    """

    objectives: ClassVar[frozenset[str]]
    """Objectives whose models this decoder fits."""

    max_new_tokens: int
    batch_size: int

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"decoder.{name}={getattr(self, name)}: must be at least 1")

    @abstractmethod
    def generate(
        self,
        backbone: Backbone,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        indices: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Decode prompts of any lengths.

        Args:
            backbone: the model.
            prompts: token ids of each prompt.
            seed: seed of the sampling noise.
            indices: number of each prompt in its data set (default 0, 1, ...). Noise is keyed by (seed, index), so
                a prompt's result depends neither on its neighbours nor on the batch size.
        """

    def check_fits(self, spec: DiffusionSpec, *, force: bool = False) -> None:
        """Refuse a model that was trained for another way of decoding."""
        if spec.objective not in self.objectives and not force:
            raise UserError(
                f"decoder {type(self).__name__} decodes models trained with {sorted(self.objectives)}, but this model "
                f"was trained with '{spec.objective}'; choose another decoder, or pass force=true"
            )
