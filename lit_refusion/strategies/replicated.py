"""Every device holds the whole model: one device, or DDP."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from lightning.pytorch.strategies import DDPStrategy, Strategy

from lit_refusion.errors import UserError
from lit_refusion.memory import Placement
from lit_refusion.strategy import Layout, StrategyConfig, check_timeout


@dataclass(frozen=True, kw_only=True)
class SingleDevice(StrategyConfig):
    """One process."""

    def make(self, layout: Layout) -> Strategy | str:
        """Lightning's choice for one device."""
        self.placement(layout.world_size)
        return "auto"

    def placement(self, world_size: int) -> Placement:
        """Nothing is shared."""
        if world_size > 1:
            raise UserError(f"strategy=single: {world_size} devices; use strategy=ddp, or one device")
        return Placement()


@dataclass(frozen=True, kw_only=True)
class DDP(StrategyConfig):
    """Replicas that average their gradients (torch DistributedDataParallel); one device runs without it.

    Args:
        bucket_mb: gradients are reduced in buckets of this size, while the backward pass goes on.
        timeout_minutes: how long a rank waits for the others before it gives up.
    """

    bucket_mb: float
    timeout_minutes: float

    def __post_init__(self) -> None:
        check_timeout(self.timeout_minutes)
        if self.bucket_mb <= 0:
            raise UserError(f"strategy.bucket_mb={self.bucket_mb}: must be positive")

    def placement(self, world_size: int) -> Placement:
        """Nothing is shared (the buckets are the gradients)."""
        return Placement()

    def make(self, layout: Layout) -> Strategy | str:
        """DDP where there is more than one device."""
        if layout.world_size == 1:
            return "auto"
        return DDPStrategy(
            process_group_backend=layout.backend,
            timeout=timedelta(minutes=self.timeout_minutes),
            bucket_cap_mb=self.bucket_mb,
            gradient_as_bucket_view=True,
        )
