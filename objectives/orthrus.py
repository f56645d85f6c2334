"""Orthrus: a second, parallel view of a frozen autoregressive model (arXiv 2605.12825).

Shapes: P prompt tokens, R response tokens, N = P + R, A anchors, K tokens of a block, M supervised rows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lit_refusion.attention import BLOCK, BLOCK_CAUSAL, CAUSAL, Attention
from lit_refusion.backbone import Backbone
from lit_refusion.context import Context
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.losses import token_divergence
from lit_refusion.objective import Loss, Objective, supervised_rows
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import IGNORE, MASK, Batch, View

TWINS = {"qkvo": ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"), "qkv": ("q_proj", "k_proj", "v_proj")}
"""Modules of an attention layer that get a twin; models without norms of the heads have the others."""


@dataclass(frozen=True, kw_only=True)
class Orthrus(Objective):
    """Teaches twins of the attention projections to draft what the frozen model would say next, K - 1 tokens at once.

    The row is [prompt and response, clean ; A blocks of K tokens: an anchor of the response, then K - 1 [MASK]s], all
    at their true positions. Clean tokens are causal and go through the frozen model, once and without gradient. A
    block at anchor a goes through the twins: it sees the frozen keys of the tokens before a, and itself in both
    directions. Its row i (0 <= i <= K - 2) predicts token a + i + 1, the target being the frozen view's distribution:

        L = mean over supervised rows of  KL( p_frozen(. | x_<= a+i) || p_twins(. | x_< a, block)_i )        (Eq. 7)

    Args:
        block_size: K.
        num_anchors: blocks of an example, or of every `per_tokens` tokens of it.
        per_tokens: null for `num_anchors` an example; the paper has 256 in every 2,048 tokens.
        twins: "qkvo" for all four projections and the norms of the heads, as the released models have; "qkv" for the
            three that the paper's text names.
        loss_type: "kl", or "ce" for the cross-entropy against the data's token (the paper's Table 5).
        mask_share: share of a block's K - 1 tokens that is hidden, at random, at least one; 1 hides them all. Only
            rows that predict a hidden token are supervised. Less than 1 trains for drafts in several steps (Table 3).
        complementary: make two rows, the second hiding what the first shows; needs `mask_share` below 1.

    Differs from the paper in that the mean is taken over an example's rows and then over examples, as all objectives
    here do in a comparison, and in that documents of a packed row do not see each other.
    """

    name: ClassVar[str] = "orthrus"
    terms: ClassVar[tuple[str, ...]] = ("draft",)
    needs_mask_token: ClassVar[bool] = True

    block_size: int
    num_anchors: int
    per_tokens: int | None
    twins: Literal["qkvo", "qkv"]
    loss_type: Literal["kl", "ce"]
    mask_share: float
    complementary: bool

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise UserError(f"objective.block_size={self.block_size}: must be at least 2, an anchor and a draft")
        for name in ("num_anchors", "per_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"objective.{name}={value}: must be at least 1")
        if not 0 < self.mask_share <= 1:
            raise UserError(f"objective.mask_share={self.mask_share}: must lie in (0, 1]")
        if self.complementary and self.num_hidden == self.block_size - 1:
            raise UserError(
                f"objective.complementary=true: with mask_share={self.mask_share} and block_size={self.block_size} "
                "nothing is left for the second row; lower mask_share"
            )

    @property
    def num_hidden(self) -> int:
        """Hidden tokens of a block."""
        return max(1, round(self.mask_share * (self.block_size - 1)))

    @property
    def measure(self) -> str:
        """The divergence or the cross-entropy of a draft."""
        return self.loss_type

    def view(self, example: Example, rng: np.random.Generator) -> View:
        """The first of `views`."""
        return self.views(example, rng)[0]

    def views(self, example: Example, rng: np.random.Generator) -> list[View]:
        """One row, or two that complement each other."""
        anchors = self.draw_anchors(example, rng)
        num_drafts = self.block_size - 1
        if self.mask_share == 1:
            return [self.arrange(example, anchors, is_masked=np.ones((len(anchors), num_drafts), bool))]
        order = rng.permuted(np.tile(np.arange(num_drafts), (len(anchors), 1)), axis=1)
        is_masked = order < self.num_hidden
        choices = [is_masked, ~is_masked] if self.complementary else [is_masked]
        count = sum(int(self._is_supervised(example, anchors, masked).sum()) for masked in choices)
        return [self.arrange(example, anchors, is_masked=masked, num_supervised=count) for masked in choices]

    def draw_anchors(self, example: Example, rng: np.random.Generator) -> np.ndarray:
        """[A] places in prompt + response, in order: response tokens that another one follows, each at most once."""
        num_prompt, length = len(example.prompt_ids), len(example)
        count = self.num_anchors
        if self.per_tokens is not None:
            count = -(-self.num_anchors * length // self.per_tokens)
        places = rng.permutation(np.arange(num_prompt, length - 1))[:count]
        return np.sort(places)

    def arrange(
        self, example: Example, anchors: np.ndarray, *, is_masked: np.ndarray, num_supervised: int | None = None
    ) -> View:
        """The row for given choices; pure.

        Args:
            example: prompt and response.
            anchors: [A] places in prompt + response, each once.
            is_masked: [A, K - 1] bool, the tokens behind each anchor that are hidden; those behind the end always are.
            num_supervised: rows that share the example's loss; None for those of this row.
        """
        ids = np.concatenate([example.prompt_ids, example.response_ids])
        length, size = len(ids), self.block_size
        anchors = np.asarray(anchors, np.int64)
        positions = anchors[:, None] + np.arange(size)  # [A, K]
        padded = np.concatenate([ids, np.full(size, MASK)])
        is_hidden = np.concatenate([np.zeros((len(anchors), 1), bool), is_masked], axis=1)
        is_supervised = self._is_supervised(example, anchors, is_masked)  # [A, K]
        following = np.where(is_supervised, padded[positions + 1], IGNORE)
        targets = np.concatenate([np.full(length, IGNORE), following.ravel()])
        count = is_supervised.sum() if num_supervised is None else num_supervised
        return View(
            input_ids=np.concatenate([ids, np.where(is_hidden, MASK, padded[positions]).ravel()]),
            position_ids=np.concatenate([np.arange(length), positions.ravel()]),
            targets=targets,
            weights=np.where(targets == IGNORE, 0, 1 / max(1, count)).astype(np.float32),
            term=np.where(targets == IGNORE, -1, 0),
            # A clean token is a block of its own: so the block-causal rule is causal for it, and lets a block see
            # what stands before its anchor.
            block=np.concatenate([np.arange(length), np.repeat(anchors, size)]),
            noisy=np.arange(len(targets)) >= length,
        )

    def _is_supervised(self, example: Example, anchors: np.ndarray, is_masked: np.ndarray) -> np.ndarray:
        """[A, K] bool: rows whose next token is in the block, hidden, and not behind the end."""
        follows = anchors[:, None] + np.arange(1, self.block_size) < len(example)
        return np.concatenate([is_masked & follows, np.zeros((len(anchors), 1), bool)], axis=1)

    @property
    def likelihood_kind(self) -> Literal["exact", "bound"]:
        """The frozen model's chain rule."""
        return "exact"

    @property
    def likelihood_meaning(self) -> str:
        """The frozen model's chain rule; what decoding is lossless of."""
        return "-log p(response | prompt) of the frozen model, by the chain rule; the twins have no part in it"

    def likelihood_views(self, example: Example, u: float, rng: np.random.Generator) -> list[View]:
        """The clean row alone, each response token predicted by the row before it."""
        length, num_prompt = len(example), len(example.prompt_ids)
        targets = np.full(length, IGNORE, np.int64)
        targets[num_prompt - 1 : length - 1] = example.response_ids
        return [
            View(
                input_ids=np.concatenate([example.prompt_ids, example.response_ids]),
                position_ids=np.arange(length),
                targets=targets,
                weights=(targets != IGNORE).astype(np.float32),
                term=np.where(targets == IGNORE, -1, 0),
            )
        ]

    def likelihood_attention(self) -> Attention:
        """Causal, as the frozen model is."""
        return CAUSAL

    def attention(self, step: int) -> Attention:
        """Block-causal over clean tokens and blocks (M_diff)."""
        return BLOCK_CAUSAL

    def spec(self, mask_token_id: int | None) -> DiffusionSpec:
        """Every token is predicted by the row before it, in both views."""
        return DiffusionSpec(
            objective=self.name,
            mask_token_id=mask_token_id,
            shift="all",
            attention=BLOCK_CAUSAL.name,
            block_size=self.block_size,
        )

    def prepare(self, backbone: Backbone) -> None:
        """Freeze the model, and put twins beside its projections that start as copies.

        Raises:
            UserError: a model whose attention layers are built in another way.
        """
        backbone.requires_grad_(False)
        names = {id(module): name for name, module in backbone.model.named_modules()}
        for layer in backbone.layers:
            attention = getattr(layer, "self_attn", None)
            if attention is None or not all(hasattr(attention, name) for name in TWINS["qkvo"][:4]):
                raise UserError(
                    f"objective=orthrus: {type(layer).__name__} has no self_attn with q_proj, k_proj, v_proj and "
                    "o_proj; use a model of the Qwen3, Qwen2 or Llama family"
                )
            add_twin(attention, TWINS[self.twins])
            path = names[id(attention)]
            for name, parameter in attention.twin.named_parameters():
                if parameter.requires_grad:
                    backbone.copies[f"{path}.twin.{name}"] = f"{path}.{name}"

    def loss(self, backbone: Backbone, batch: Batch, *, step: int) -> Loss:
        """Divergence or cross-entropy of the block rows; the clean pass has no gradient."""
        multiple = BLOCK if backbone.attention_backend == "flex_attention" else 1
        clean = batch.take((batch.segment_ids > 0) & ~batch.noisy, pad_to_multiple=multiple)
        blocks = batch.take((batch.segment_ids > 0) & batch.noisy, pad_to_multiple=multiple)
        context = Context(clean)
        with torch.no_grad():
            teacher = backbone(clean, CAUSAL, record=context)  # [B, C, D]
        hidden = backbone(blocks, self.attention(step), context=context, adapted=True)  # [B, T, D]
        is_supervised = supervised_rows(blocks)
        rows = hidden[is_supervised]
        if self.loss_type == "ce":
            token_loss = backbone.token_cross_entropy(rows, blocks.targets[is_supervised].clamp(min=0))
        else:
            head: Any = backbone.model.get_output_embeddings()
            teacher_of = _same_places(blocks, clean)[is_supervised]
            token_loss = token_divergence(head, rows, teacher.flatten(0, 1), teacher_of)
        return Loss.of(blocks, is_supervised, token_loss)


class DualAttention:
    """Mixed into the class of an attention layer: `adapted` passes go through its twin."""

    twin: nn.Module

    def forward(self, *args: Any, adapted: bool = False, **kwargs: Any) -> Any:
        """As the model's own, or the twin's."""
        return self.twin(*args, **kwargs) if adapted else super().forward(*args, **kwargs)  # type: ignore[misc]


def add_twin(attention: Any, names: tuple[str, ...]) -> None:
    """Give an attention layer a twin: copies of the modules of these names that train, and all else its own.

    The layer's class is changed to one that knows its twin, so that the names of its weights stay what they were.
    """
    twin = copy.copy(attention)
    for name, value in vars(attention).items():  # hooks, parameters and modules of its own
        if isinstance(value, dict):
            vars(twin)[name] = value.copy()
    for name in names:
        if name in twin._modules:
            twin._modules[name] = copy.deepcopy(attention._modules[name]).requires_grad_(True)
    attention.twin = twin
    attention.__class__ = type(f"Dual{type(attention).__name__}", (DualAttention, type(attention)), {})


def _same_places(blocks: Batch, clean: Batch) -> Tensor:
    """[B, T] row of the flattened clean batch that stands at the position of each block token (or the last one)."""
    longest = int(torch.maximum(blocks.position_ids.max(), clean.position_ids.max())) + 1
    last = torch.iinfo(torch.int64).max
    own = clean.segment_ids * longest + clean.position_ids  # ascends along a row: documents lie end to end
    own = own.masked_fill(clean.segment_ids == 0, last)
    place = torch.searchsorted(own, blocks.segment_ids * longest + blocks.position_ids)
    width = own.shape[1]
    return place.clamp(max=width - 1) + width * torch.arange(len(own), device=own.device)[:, None]
