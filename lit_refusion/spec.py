"""The DiffusionSpec: the conventions of a trained model, saved with it so that nobody has to guess."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from lit_refusion.errors import UserError
from lit_refusion.schema import build

Shift = Literal["none", "all", "clean"]


@dataclass(frozen=True, kw_only=True)
class DiffusionSpec:
    """Conventions that a decoder must share with the training objective.

    Args:
        objective: name of the objective.
        mask_token_id: id of [MASK]; None for objectives that use none.
        shift: which inputs predict the next token: "none", "all", or "clean" ([MASK] inputs predict themselves).
        attention: name of the attention rule in training.
        slot_sizes: slot sizes seen in training, in tokens; empty where there are none.
        block_size: block size in tokens; None where there are no blocks.
        block_origin: where blocks are counted from: "sequence" (its first token) or "response"; None without blocks.
        pad_policy: "none"; "eos" where padding is supervised as end-of-sequence; "mask" where [MASK]s without loss
            fill the last block.
    """

    objective: str
    mask_token_id: int | None
    shift: Shift
    attention: str
    slot_sizes: tuple[int, ...] = ()
    block_size: int | None = None
    block_origin: Literal["sequence", "response"] | None = None
    pad_policy: Literal["none", "eos", "mask"] = "none"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON and checkpoints."""
        return {**asdict(self), "slot_sizes": list(self.slot_sizes)}

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, origin: str) -> DiffusionSpec:
        """Read it back; `origin` names the file in errors."""
        try:
            return build(data, cls, key="diffusion_spec")
        except UserError as error:
            raise UserError(f"{origin}: {error}; export the model again with this version") from error
