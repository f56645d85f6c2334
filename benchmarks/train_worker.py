"""Our training step, asked over JSON lines by `benchmarks.train` in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.worker import Clock, Memory, serve
from lit_refusion.backbone import Backbone
from lit_refusion.config import load_config
from lit_refusion.data.loader import LoaderConfig, TrainBatches, ViewMaker
from lit_refusion.data.plan import Visit
from lit_refusion.examples import Example
from lit_refusion.noise import Stream
from lit_refusion.objective import Objective
from lit_refusion.optimizer import OptimizerConfig
from lit_refusion.schema import build
from lit_refusion.views import IGNORE, Batch


class Documents:
    """Examples in memory, with what the loader asks of prepared data."""

    def __init__(self, documents: list[dict[str, list[int]]]) -> None:
        self.examples = [
            Example(index=i, **{name: np.array(ids) for name, ids in item.items()}) for i, item in enumerate(documents)
        ]

    def __getitem__(self, number: int) -> Example:
        return self.examples[number]

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of each."""
        return np.array([len(self.examples[i]) for i in numbers])

    def response_lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Response tokens of each."""
        return np.array([len(self.examples[i].response_ids) for i in numbers])


def load_backbone(path: str | Path, *, kernel: Any = "chunked", checkpointing: bool = False) -> Backbone:
    """A model folder without a tokenizer."""
    backbone = Backbone.from_pretrained(path)
    backbone.loss_kernel = kernel
    if checkpointing:
        backbone.enable_gradient_checkpointing()
    return backbone


def load_objective(name: str) -> Objective:
    """With its default settings."""
    return build(load_config("train", [f"objective={name}"])["objective"], Objective, key="objective")


def begin(backbone: Backbone) -> Any:
    """The default optimizer of the parameters that train."""
    backbone.train()
    config = load_config("train", [])["optimizer"]
    return build(config, OptimizerConfig, key="optimizer").build(backbone.parameters(), max_steps=1000)[0]


class Ours:
    """The model, the data and what is done with them."""

    def load(self, path: str, *, kernel: str, checkpointing: bool) -> dict[str, Any]:
        """Read a model in fp32."""
        torch.set_num_threads(1)
        self.backbone = load_backbone(path, kernel=kernel, checkpointing=checkpointing)
        self.objective = load_objective("refusion")
        self.memory = Memory()
        return {"torch": torch.__version__}

    def begin_training(self, learning_rate: float) -> None:
        """Our default optimizer."""
        self.optimizer = begin(self.backbone)

    def train(
        self, documents: list[dict[str, list[int]]], *, loader: dict[str, Any], is_dealt: bool, seed: int
    ) -> dict[str, Any]:
        """One optimizer step over the documents; making the rows is part of the time.

        Args:
            documents: of the step.
            loader: settings that differ from the defaults.
            is_dealt: to micro-batches as the loader deals them; otherwise in the given order.
            seed: of the noise.
        """
        clock, total, places = Clock(), 0.0, 0
        for batch in self._batches(documents, loader, is_dealt, seed):
            loss = self.objective.loss(self.backbone, batch, step=0).total / batch.num_examples
            loss.backward()
            total += loss.item()
            places += batch.input_ids.numel()
            del loss
        torch.nn.utils.clip_grad_norm_(self.backbone.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {**clock.read(), "loss": total, "places": places}

    def _batches(self, documents: list[dict[str, list[int]]], loader: dict[str, Any], is_dealt: bool, seed: int) -> Any:
        """Micro-batches by the loader's own code."""
        data, size = Documents(documents), loader["micro_batch_size"]
        maker = ViewMaker(
            shards=data,  # type: ignore[arg-type]
            objective=self.objective,
            config=build({**load_config("train", [])["loader"], **loader}, LoaderConfig, key="loader"),
            mask_token_id=self.backbone.mask_token_id,
            seed=seed,
            stream=Stream.TRAIN_NOISE,
        )
        visits = [Visit(i, 0) for i in range(len(documents))]
        count = len(documents) // size
        if is_dealt:
            plan: Any = SimpleNamespace(step=lambda _: visits, global_batch_size=len(documents))
            dealt = TrainBatches(maker, plan, num_micro_batches=count, rank=0, world_size=1)
            return (dealt[number] for number in range(count))
        hands = [visits[i * size : (i + 1) * size] for i in range(count)]
        return (maker.batch(hand, num_examples=len(documents), num_response_tokens=1) for hand in hands)

    def forget_peak(self) -> None:
        """Count memory from here on."""
        self.memory = Memory()

    def extra_memory(self) -> int:
        """Bytes that the process has had at most above those at `forget_peak`."""
        return self.memory.extra()

    def loss_of_rows(self, path: str) -> dict[str, float]:
        """Loss and gradient norm of the official code's own rows, by our model and loss."""
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
        loss = self.objective.loss(self.backbone, official_batch(rows), step=0).total
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.backbone.parameters(), float("inf"))
        self.backbone.zero_grad()
        return {"loss": loss.item(), "gradient_norm": norm.item()}


def official_batch(rows: dict[str, Any]) -> Batch:
    """The official rows with the official weights: AR a mean over the micro-batch, MDM over p times the length."""
    ids, labels, places = (torch.tensor(rows[name]) for name in ("input_ids", "labels", "position_ids"))  # [B, T]
    is_masked, p_mask, lengths = (torch.tensor(rows[name]) for name in ("is_masked", "p_mask", "response_length"))
    is_supervised = labels != IGNORE
    is_ar = is_supervised & ~is_masked
    weights = torch.where(is_ar, 1 / is_ar.sum(), is_masked / (p_mask * lengths * len(ids)))
    row_lengths = torch.tensor(rows["lengths"])[:, None]
    return Batch(
        input_ids=ids,
        position_ids=places,
        targets=labels,
        weights=weights.float(),
        term=torch.where(is_masked, 1, torch.where(is_ar, 0, -1)),
        block=torch.zeros_like(ids),
        noisy=torch.zeros_like(ids, dtype=torch.bool),
        mask_rate=p_mask,
        segment_ids=(torch.arange(ids.shape[1]) < row_lengths).long(),
        num_examples=1,
        num_response_tokens=1,
    )


if __name__ == "__main__":
    ours = Ours()
    serve({name: getattr(ours, name) for name in vars(Ours) if not name.startswith("_")})
