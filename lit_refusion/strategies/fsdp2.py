"""FSDP2: parameters, gradients and optimizer states in shares, gathered layer by layer (torch fully_shard)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies.model_parallel import _METADATA_FILENAME
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from lit_refusion.backbone import Backbone
from lit_refusion.memory import Placement
from lit_refusion.sharded_checkpoint import replacing
from lit_refusion.sharded_loading import materialise, stream_weights
from lit_refusion.strategy import Layout, StrategyConfig, check_timeout


@dataclass(frozen=True, kw_only=True)
class FSDP2(StrategyConfig):
    """torch's fully_shard over all devices; bf16 computes in bf16 on fp32 shares and reduces in fp32.

    Args:
        reshard_after_forward: give a layer's parameters back after its forward pass and gather them again for the
            backward pass: less memory, more traffic.
        timeout_minutes: how long a rank waits for the others before it gives up.
    """

    reshard_after_forward: bool
    timeout_minutes: float

    def __post_init__(self) -> None:
        check_timeout(self.timeout_minutes)

    @property
    def shards_checkpoints(self) -> bool:
        """Yes (torch distributed checkpoint)."""
        return True

    @property
    def shards_parameters(self) -> bool:
        """Yes."""
        return True

    def lightning_precision(self, precision: str) -> Any:
        """None: `fully_shard` casts."""
        return "32-true"

    def placement(self, world_size: int) -> Placement:
        """Everything is shared."""
        return Placement(optimizer_shares=world_size, gradient_shares=world_size, parameter_shares=world_size)

    def make(self, layout: Layout) -> Strategy | str:
        """Lightning's strategy for parallel models, with data parallelism only."""
        return FullyShard(
            reshard_after_forward=self.reshard_after_forward,
            is_bf16=layout.precision == "bf16-mixed",
            data_parallel_size=layout.world_size,
            tensor_parallel_size=1,
            process_group_backend=layout.backend,
            timeout=timedelta(minutes=self.timeout_minutes),
        )


def _scatter(parameter: nn.Parameter, tensor: Tensor | None) -> None:
    """A whole tensor of rank 0 into the shares of all ranks."""
    shares: Any = parameter.data
    device = shares.to_local().device
    whole = torch.empty(shares.shape, dtype=shares.dtype, device=device) if tensor is None else tensor.to(device)
    shares.copy_(distribute_tensor(whole, shares.device_mesh, shares.placements))


def _own_state(module: Any, **options: Any) -> dict[str, Any]:
    """The state of the parameters that train; torch's own choice forgets the second name of a tied one."""
    state = get_model_state_dict(module, options=StateDictOptions(ignore_frozen_params=True, **options))
    parameters = dict(module.named_parameters())
    if all(parameter.requires_grad for parameter in parameters.values()):
        return state
    return {name: value for name, value in state.items() if name in parameters and parameters[name].requires_grad}


class FullyShard(ModelParallelStrategy):
    """Lightning's strategy that shards a backbone, and replaces a checkpoint in one rename."""

    def __init__(self, *, reshard_after_forward: bool, is_bf16: bool, **options: Any) -> None:
        super().__init__(**options)
        self._reshard_after_forward, self._is_bf16 = reshard_after_forward, is_bf16

    def shard(self, backbone: Backbone) -> None:
        """Share out each decoder layer, and the rest (embeddings, head, final norm) with the backbone itself.

        The head belongs to the backbone's own group, which stays gathered from the forward pass to the end of the
        backward pass, so that the loss can call it; a tied head is the embedding.
        """
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if self._is_bf16
            else MixedPrecisionPolicy()
        )
        mesh, shared = self.device_mesh["data_parallel"], dict[int, nn.Parameter]()
        for layer in backbone.layers:
            materialise(layer, device=self.root_device, shared=shared)
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=self._reshard_after_forward)
            shared.clear()  # layers tie nothing; the whole layer can go
        materialise(backbone, device=self.root_device, shared=shared)
        fully_shard(backbone, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        if backbone.weight_files:
            stream_weights(
                backbone.model, backbone.weight_files, _scatter, copies=backbone.copies, is_reader=self.is_global_zero
            )

    @contextmanager
    def decoding(self, backbone: Any) -> Iterator[bool]:
        """Embeddings and head whole for a while; layers are gathered as they run, so ranks must run the same passes."""
        backbone.unshard()
        try:
            yield True
        finally:
            backbone.reshard()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The parameters that train, in shares; frozen ones are their model's."""
        return _own_state(self.model, cpu_offload=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The same parameters and the optimizers' states, on any number of ranks."""
        path = Path(self.broadcast(checkpoint_path))
        module: Any = self.model
        state = {"state_dict": _own_state(module)}
        dcp.load(state, checkpoint_id=path)
        module.load_state_dict(state["state_dict"], strict=False)
        for number, optimizer in enumerate(self.optimizers):
            key = f"optimizer_{number}"
            states = {key: get_optimizer_state_dict(module, optimizer)}
            dcp.load(states, checkpoint_id=path)
            options = StateDictOptions(cpu_offload=True)
            set_optimizer_state_dict(module, optimizer, optim_state_dict=states[key], options=options)
        return torch.load(path / _METADATA_FILENAME, weights_only=weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Every rank writes its share beside the target; rank 0 renames the folder when all are done."""
        with replacing(Path(self.broadcast(filepath)), self, saved=checkpoint) as folder:
            super().save_checkpoint(checkpoint, folder, storage_options)
