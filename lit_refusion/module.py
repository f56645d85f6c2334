"""The LightningModule: one training step for every objective."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.memory import peak_memory
from lit_refusion.meter import LossMeter
from lit_refusion.objective import Loss, Objective
from lit_refusion.optimizer import OptimizerConfig
from lit_refusion.ranks import check_ranks_agree
from lit_refusion.resume import describe, differences, model_differences, relocate
from lit_refusion.run_folder import CHECKPOINTS, RECORD_KEY
from lit_refusion.views import Batch


class TrainingModule(L.LightningModule):
    """Trains a backbone with an objective.

    The loss of a micro-batch is divided by the denominator of the whole optimizer step, which the batch carries.
    So the sum over ranks and accumulated micro-batches is the step's loss, however it was cut up. Lightning
    divides by the accumulation and the strategy by the world size; both are multiplied back.

    Args:
        backbone: the model; `objective.prepare` has been called on it.
        objective: the training method.
        optimizer: AdamW and its schedule.
        max_steps: optimizer steps of the whole run.
        log_every: steps between logged figures, which are means over those steps.
        record: plain data saved in every checkpoint (resolved config, DiffusionSpec, fingerprints).
        force_resume: go on from a checkpoint of other settings or data.
    """

    def __init__(
        self,
        backbone: Backbone,
        objective: Objective,
        *,
        optimizer: OptimizerConfig,
        max_steps: int,
        log_every: int,
        record: dict[str, Any],
        force_resume: bool = False,
    ) -> None:
        super().__init__()
        self.backbone, self.objective, self.optimizer_config = backbone, objective, optimizer
        self.max_steps, self.log_every, self.record = max_steps, log_every, record
        self.force_resume = force_resume
        # Outside the module tree: strategies that cast or shard modules must not touch the sums.
        self._meters = {stage: LossMeter(objective.terms, measure=objective.measure) for stage in ("train", "val")}
        self._is_sharded = False
        self._has_frozen = not all(parameter.requires_grad for parameter in backbone.parameters())
        self.strict_loading = not self._has_frozen  # a checkpoint has only what trains
        self._logged_step = 0
        self._logged_time = self._validation_start = 0.0
        self._gradient_norm: Tensor | float | None = None
        self._learning_rate = 0.0

    def configure_model(self) -> None:
        """Share the backbone out, where the strategy does that."""
        shard = getattr(self.trainer.strategy, "shard", None)
        if shard is not None and not self._is_sharded:
            shard(self.backbone)
            self._is_sharded = True

    def on_fit_start(self) -> None:
        """See that all ranks are about the same thing; move the sums to the device."""
        check_ranks_agree(self.record)
        for meter in self._meters.values():
            meter.to(self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch, scaled so that the sums come out right."""
        loss = self.objective.loss(self.backbone, batch, step=self.global_step)
        shares = self.trainer.world_size * self.trainer.accumulate_grad_batches
        denominator = self._denominator(batch)
        self._meters["train"].update(loss, batch, denominator=denominator / shares)
        scale = shares
        if self.trainer.strategy.handles_gradient_accumulation:  # DeepSpeed divides by the accumulation once more
            scale *= self.trainer.accumulate_grad_batches
        return loss.total / denominator * scale

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add one validation batch to the sums."""
        # With the final attention, so that figures along the run can be compared whatever schedule trains.
        loss: Loss = self.objective.loss(self.backbone, batch, step=self.max_steps)
        num_batches = self.trainer.num_val_batches[0] * self.trainer.world_size
        self._meters["val"].update(loss, batch, denominator=self._denominator(batch) / num_batches)

    def on_validation_start(self) -> None:
        """Note the time: validation does not count in the training speed."""
        self._validation_start = time.perf_counter()

    def on_validation_end(self) -> None:
        """Take validation out of the clock."""
        self._logged_time += time.perf_counter() - self._validation_start

    def on_validation_epoch_end(self) -> None:
        """Log the validation figures."""
        figures = self._meters["val"].compute()
        self._meters["val"].reset()
        self._log("val", {k: v for k, v in figures.items() if k not in ("tokens", "supervised_tokens", "padding")})

    def on_train_start(self) -> None:
        """Start the clock, on all ranks at the same step."""
        check_ranks_agree({"step to go on from": self.global_step})
        self._logged_step, self._logged_time = self.global_step, time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the training figures every `log_every` steps, as means over them."""
        steps = self.global_step - self._logged_step
        if not steps or (self.global_step % self.log_every and self.global_step < self.max_steps):
            return
        figures = self._meters["train"].compute()
        self._meters["train"].reset()
        now = time.perf_counter()
        figures["steps"] = steps  # behind an interruption, those since the checkpoint
        figures["seconds"] = now - self._logged_time
        figures["tokens_per_second"] = figures["tokens"] / figures["seconds"]
        figures["peak_memory_gb"] = peak_memory(self.device) / 1e9
        figures["learning_rate"] = self._learning_rate
        if self.trainer.strategy.handles_gradient_accumulation:
            engine: Any = self.trainer.model
            self._gradient_norm = engine.get_global_grad_norm()
        if self._gradient_norm is not None:
            figures["gradient_norm"] = float(self._gradient_norm)
        if not math.isfinite(figures["loss"]):
            raise UserError(
                f"the training loss is {figures['loss']} at step {self.global_step}; lower optimizer.learning_rate or "
                "look at the data, and continue from the last checkpoint with resume=auto"
            )
        self._logged_step, self._logged_time = self.global_step, now
        self._log("train", figures)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the learning rate in use."""
        self._learning_rate = optimizer.param_groups[0]["lr"]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by total norm and keep the norm.

        Lightning's mixed-precision plugin refuses to clip for a fused optimizer, because of fp16 loss scaling; bf16
        has none.
        """
        if self.trainer.strategy.handles_gradient_accumulation:  # DeepSpeed clips by its own config, as it steps
            return
        gradients = [p for p in self.parameters() if p.grad is not None]
        if gradients:
            limit = float("inf") if gradient_clip_val is None else gradient_clip_val
            norm = torch.nn.utils.clip_grad_norm_(gradients, limit)
            self._gradient_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def configure_optimizers(self) -> Any:
        """AdamW with a per-step schedule over the explicit `max_steps`."""
        optimizer, schedule = self.optimizer_config.build(self.parameters(), max_steps=self.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the record; leave out what does not train, since it is the base model's."""
        checkpoint[RECORD_KEY] = self.record
        if self._has_frozen and "state_dict" in checkpoint:
            names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: tensor for name, tensor in state.items() if name in names}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another objective's checkpoint, and set the loop's counters to the optimizer step.

        Lightning counts micro-batches; the plan counts steps. Rewriting the counters makes a run resume at a step
        boundary, also where accumulation or the number of devices has changed.
        """
        self._check_record(checkpoint.get(RECORD_KEY))
        relocate(checkpoint.get("callbacks", {}), Path(self.trainer.default_root_dir).resolve() / CHECKPOINTS)
        loops = checkpoint.get("loops", {}).get("fit_loop")
        if loops is not None:
            step = checkpoint["global_step"]
            done = step * self.trainer.accumulate_grad_batches
            for counts in loops["epoch_loop.batch_progress"].values():
                if isinstance(counts, dict):
                    counts.update(dict.fromkeys(counts, done))
            loops["epoch_loop.batch_progress"]["is_last_batch"] = False
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step

    def _check_record(self, saved: dict[str, Any] | None) -> None:
        """Refuse to go on from another objective's, data set's or model's checkpoint."""
        if saved is None:
            raise UserError(f"resume: the checkpoint has no '{RECORD_KEY}' record; choose another run folder")
        found = differences(saved, self.record)
        if misfits := model_differences(saved, self.record):
            raise UserError(
                f"resume: the checkpoint's weights do not fit ({describe({**misfits, **found})}); choose another run "
                "folder"
            )
        if found and not self.force_resume:
            raise UserError(
                f"resume: the run has changed: {describe(found)}; choose another run folder, or go on all the same "
                "with resume=force"
            )
        if found and self.trainer.is_global_zero:
            print(f"resume=force, although {describe(found)}", flush=True)

    def log_measured(self, figures: dict[str, float]) -> None:
        """Log what a callback has measured behind a validation: to the loggers, and for the best checkpoint."""
        for logger in self.loggers:
            logger.log_metrics(figures, step=self.global_step)
        for name, value in figures.items():
            self.log(name, value, logger=False, sync_dist=False)

    def _denominator(self, batch: Batch) -> int:
        by_examples = self.objective.normalizer == "examples"
        return batch.num_examples if by_examples else batch.num_response_tokens

    def _log(self, stage: str, figures: dict[str, float]) -> None:
        """To the loggers once, under the optimizer step; to the progress bar and the callbacks."""
        named = {f"{stage}/{name}": value for name, value in figures.items()}
        for logger in self.loggers:
            logger.log_metrics(named, step=self.global_step)
            logger.save()
        for name in self.shown_figures(self.objective):
            if f"{stage}/{name}" in named:
                self.log(f"{stage}/{name}", named[f"{stage}/{name}"], prog_bar=True, logger=False, sync_dist=False)

    @staticmethod
    def shown_figures(objective: Objective) -> tuple[str, ...]:
        """Names of the figures for a progress display."""
        return ("loss", *(f"{objective.measure}/{term}" for term in objective.terms), "tokens_per_second")
