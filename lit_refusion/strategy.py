"""The seam between a run and its devices: which Lightning strategy trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy

from lit_refusion.errors import UserError
from lit_refusion.memory import Placement


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a strategy is made for.

    Args:
        world_size: processes, one a device.
        on_cuda: whether the devices are GPUs.
        precision: "32-true" or "bf16-mixed".
        micro_batch_size: examples per forward pass and device.
        resume_from: the checkpoint to go on from.
    """

    world_size: int
    on_cuda: bool
    precision: str
    micro_batch_size: int
    resume_from: Path | None

    @property
    def backend(self) -> str:
        """The process group's."""
        return "nccl" if self.on_cuda else "gloo"


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(ABC):
    """How parameters, gradients and optimizer states lie on the devices, and how these talk to each other."""

    @abstractmethod
    def make(self, layout: Layout) -> Strategy | str:
        """Lightning's strategy, or its name.

        Raises:
            UserError: the layout does not suit it.
        """

    @abstractmethod
    def placement(self, world_size: int) -> Placement:
        """What is shared by how many processes, for the estimate of memory."""

    @property
    def shards_checkpoints(self) -> bool:
        """Whether every rank writes its share of a checkpoint, into a folder."""
        return False

    @property
    def shards_parameters(self) -> bool:
        """Whether no device holds the whole model: a trained one is then loaded in shares."""
        return False

    def lightning_precision(self, precision: str) -> Any:
        """The precision that Lightning is told; a strategy that casts by itself asks for none."""
        return precision


def check_timeout(minutes: float) -> None:
    """Refuse a timeout that ends before it begins."""
    if minutes <= 0:
        raise UserError(f"strategy.timeout_minutes={minutes}: must be positive")
