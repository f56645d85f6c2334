"""DeepSpeed's ZeRO, on GPUs and, for tests, on the CPU over gloo."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy

from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.memory import Placement
from lit_refusion.sharded_checkpoint import ZERO_TAG, replacing
from lit_refusion.sharded_loading import is_skeleton, materialise_own, stream_weights
from lit_refusion.strategy import Layout, StrategyConfig, check_timeout

DECODING = -1
"""Stands for a module that uses parameters, among the numbers that DeepSpeed gives them."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeed(StrategyConfig):
    """ZeRO (Rajbhandari et al., arXiv 1910.02054): optimizer states, gradients and parameters in shares.

    bf16 keeps fp32 master weights in the shares.

    Args:
        stage: 1 shares the optimizer states, 2 the gradients as well, 3 the parameters as well.
        offload_optimizer: keep the optimizer states in the CPU's memory.
        offload_parameters: keep the parameters there (stage 3 only).
        reduce_bucket_size: elements that are reduced at a time.
        allgather_bucket_size: elements that are gathered at a time.
        overlap_comm: reduce while the backward pass goes on.
        contiguous_gradients: copy gradients into one buffer as they appear.
        timeout_minutes: how long a rank waits for the others before it gives up.
    """

    stage: Literal[1, 2, 3]
    offload_optimizer: bool
    offload_parameters: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    overlap_comm: bool
    contiguous_gradients: bool
    timeout_minutes: float

    def __post_init__(self) -> None:
        check_timeout(self.timeout_minutes)
        if self.offload_parameters and self.stage != 3:
            raise UserError(f"strategy.offload_parameters=true: needs stage 3, not strategy.stage={self.stage}")
        for name in ("reduce_bucket_size", "allgather_bucket_size"):
            if getattr(self, name) < 1:
                raise UserError(f"strategy.{name}={getattr(self, name)}: must be at least 1")

    @property
    def shards_checkpoints(self) -> bool:
        """Yes, at every stage."""
        return True

    @property
    def shards_parameters(self) -> bool:
        """At stage 3."""
        return self.stage == 3

    def placement(self, world_size: int) -> Placement:
        """By stage."""
        return Placement(
            optimizer_shares=world_size,
            gradient_shares=world_size if self.stage >= 2 else 1,
            parameter_shares=world_size if self.stage == 3 else 1,
            casts_weights=True,
            offloads_optimizer=self.offload_optimizer,
            offloads_parameters=self.offload_parameters,
        )

    def make(self, layout: Layout) -> Strategy | str:
        """Lightning's strategy with this ZeRO config."""
        if importlib.util.find_spec("deepspeed") is None:
            raise UserError("strategy=deepspeed_...: needs an extra: pip install 'lit-refusion[deepspeed]'")
        if not layout.on_cuda:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
        return ZeRO(
            self.config(layout),
            on_cuda=layout.on_cuda,
            process_group_backend=layout.backend,
            timeout=timedelta(minutes=self.timeout_minutes),
        )

    def config(self, layout: Layout) -> dict[str, Any]:
        """DeepSpeed's config; Lightning adds batch sizes, precision and clipping."""
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": self.reduce_bucket_size,
            "allgather_bucket_size": self.allgather_bucket_size,
            "overlap_comm": self.overlap_comm,
            "contiguous_gradients": self.contiguous_gradients,
        }
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": layout.on_cuda}
        if self.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": layout.on_cuda}
        return {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        }


class ZeRO(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy that also runs on the CPU, and replaces a checkpoint in one rename."""

    def __init__(self, config: dict[str, Any], *, on_cuda: bool, **options: Any) -> None:
        super().__init__(config=config, exclude_frozen_parameters=True, **options)
        self._on_cuda = on_cuda

    def setup_environment(self) -> None:
        """As Lightning's, without its refusal of the CPU."""
        if self._on_cuda:
            super().setup_environment()
        else:
            DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """As Lightning's; CPU devices have no index to check."""
        if self._on_cuda:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        """`deepspeed.initialize`, which refuses a device rank on the CPU."""
        if self._on_cuda:
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        import deepspeed

        engine, sharded_optimizer, _, _ = deepspeed.initialize(
            config=self.config,
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, sharded_optimizer

    def shard(self, backbone: Backbone) -> None:
        """Share out a model without storage, module by module, and read its weights; others DeepSpeed shares out."""
        if not is_skeleton(backbone):
            return
        import deepspeed

        self._init_config_if_needed()
        shared: dict[int, torch.nn.Parameter] = {}
        for module in backbone.modules():
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                leaf = torch.nn.Module()  # the module's own parameters, without those of its children
                materialise_own(module, device=self.root_device, shared=shared)
                leaf._parameters = module._parameters
                deepspeed.zero.Init(module=leaf, config_dict_or_path=self.config)

        def assign(parameter: torch.nn.Parameter, tensor: torch.Tensor | None) -> None:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if tensor is not None:
                    parameter.data.copy_(tensor)

        stream_weights(
            backbone.model, backbone.weight_files, assign, copies=backbone.copies, is_reader=self.is_global_zero
        )

    @contextlib.contextmanager
    def decoding(self, backbone: Backbone) -> Iterator[bool]:
        """At stage 3: embeddings and head whole for a while; layers are gathered as they run, by all ranks.

        DeepSpeed gives a parameter back behind its module's forward pass, unless another module is using it, and it
        fetches ahead by the order of training, which is another one.
        """
        if self.config["zero_optimization"]["stage"] < 3:  # type: ignore[index]
            yield False
            return
        import deepspeed

        inside = {id(parameter) for layer in backbone.layers for parameter in layer.parameters()}
        outside: list[Any] = [parameter for parameter in backbone.parameters() if id(parameter) not in inside]
        engine: Any = self.deepspeed_engine
        coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        with deepspeed.zero.GatheredParameters(outside):
            for parameter in outside:
                parameter.ds_active_sub_modules.add(DECODING)
            try:
                yield True
            finally:
                for parameter in outside:
                    parameter.ds_active_sub_modules.discard(DECODING)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Every rank writes its share beside the target; rank 0 renames the folder when all are done."""
        with (
            replacing(Path(self.broadcast(filepath)), self, saved=checkpoint) as folder,
            self._without_frozen_parameters(),
        ):
            super().save_checkpoint(checkpoint, folder, storage_options)

    @contextlib.contextmanager
    def _without_frozen_parameters(self) -> Iterator[None]:
        """DeepSpeed leaves them out by their first name only, so that a tied one is saved under its second."""
        engine: Any = self.deepspeed_engine
        parameters = dict(engine.module.named_parameters())
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        whole_state = engine.module_state_dict
        if len(trained) < len(parameters):
            engine.module_state_dict = lambda *args, **options: {
                name: tensor for name, tensor in whole_state(*args, **options).items() if name in trained
            }
        try:
            yield
        finally:
            engine.module_state_dict = whole_state

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """As Lightning's; a checkpoint of another number of ranks goes through DeepSpeed's universal format."""
        path = Path(self.broadcast(checkpoint_path))
        num_ranks = len(list((path / ZERO_TAG).glob("*_optim_states.pt")))
        if num_ranks == self.world_size:
            return super().load_checkpoint(path, weights_only)
        universal = path.with_name(f".{path.name}.universal")
        if self.is_global_zero:
            print(f"{path}: of {num_ranks} ranks, this run has {self.world_size}; resharding it", flush=True)
            _convert_to_universal(path / ZERO_TAG, universal / ZERO_TAG)
        self.barrier()
        with self._loading_universal():
            state = super().load_checkpoint(universal, weights_only)
        self.barrier()
        if self.is_global_zero:
            shutil.rmtree(universal)
        return state

    @contextlib.contextmanager
    def _loading_universal(self) -> Iterator[None]:
        """Load DeepSpeed's universal format, and mend what it gets wrong at stage 3 (seen with 0.19.8).

        It gives all parameter groups the settings of the first, weight decay included, and one step counter, which
        every group would then count up.
        """
        engine: Any = self.deepspeed_engine
        optimizer = engine.optimizer.optimizer
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        engine._config.load_universal_checkpoint = True
        try:
            yield
        finally:
            engine._config.load_universal_checkpoint = False
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        for state in optimizer.state.values():
            state["step"] = state["step"].clone()


def _convert_to_universal(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target, ignore_errors=True)
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        ds_to_universal.main(arguments)
