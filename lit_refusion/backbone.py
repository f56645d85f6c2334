"""The causal language model under every method. Shapes: B rows, T row length, D width, V vocabulary.

The Hugging Face model is used as it is: no forked modelling file, no patched forward. Every call passes its
attention explicitly, because transformers reads non-consecutive `position_ids` as packed documents when it has
to build the mask itself (seen with 5.24 under SDPA with `use_cache=False`: logits wrong by 0.6).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_refusion.attention import Attention, AttentionBackend, kernel_arguments
from lit_refusion.context import Context, Prefix, Recording
from lit_refusion.errors import UserError
from lit_refusion.losses import LossKernel, cross_entropy
from lit_refusion.mask_token import choose_mask_token, must_grow
from lit_refusion.model_loading import load_pretrained, make_fresh
from lit_refusion.sharded_loading import skeleton, weight_files
from lit_refusion.spec import DiffusionSpec
from lit_refusion.views import Batch

ForwardChoice = Literal["auto", "lean", "module"]
"""What runs decoding. auto: lean where it does what the module does; lean: or an error; module: never lean."""


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """Where the weights come from: `path` of a trained model, or `architecture` for a fresh one.

    Args:
        path: folder or hub id of a Hugging Face causal LM; null with `architecture`.
        gguf_file: name of a GGUF file inside `path`; null for safetensors.
        architecture: Hugging Face config fields with `model_type`, to train from scratch; null with `path`.
        init_seed: seed of the fresh weights.
        mask_token_id: null to use the tokenizer's, else a spare row.
        attention: attention kernel; sdpa runs anywhere.
        cross_entropy: kernel of head and loss; chunked runs anywhere, torch needs torch 2.13, liger is an extra for
            CUDA; auto takes torch on a CPU where one chunk is not enough, else chunked.
        compile: compile the decoder layers (torch.compile) for training; costs a minute at the start.
        gradient_checkpointing: trade one more forward pass for activation memory.
        trust_remote_code: run code from the model's repository; only for repositories you trust.
    """

    path: str | None
    gguf_file: str | None
    architecture: dict[str, Any] | None
    init_seed: int
    mask_token_id: int | None
    attention: AttentionBackend
    cross_entropy: LossKernel
    compile: bool
    gradient_checkpointing: bool
    trust_remote_code: bool

    def __post_init__(self) -> None:
        if (self.path is None) == (self.architecture is None):
            raise UserError(
                "backbone: give backbone.path (a trained model) or backbone.architecture (a fresh one), not both; "
                f"found path={self.path!r}, architecture={self.architecture!r}"
            )
        if self.architecture is not None and "model_type" not in self.architecture:
            raise UserError("backbone.architecture: field 'model_type' is missing; for example model_type: qwen3")

    def load(self, tokenizer: PreTrainedTokenizerBase, *, in_shares: bool = False) -> Backbone:
        """Build the backbone this config describes.

        Args:
            tokenizer: the data's.
            in_shares: leave the weights of a trained model to the strategy, which shards it; where its embedding table
                has to grow for [MASK], or its weights are not safetensors, it is loaded whole on every process first.
        """
        backbone = (self._skeleton(tokenizer) if in_shares else None) or self._whole(tokenizer)
        if self.gradient_checkpointing:
            backbone.enable_gradient_checkpointing()
        if self.compile:
            for layer in backbone.layers:
                layer.compile()
        backbone.loss_kernel = self.cross_entropy
        return backbone

    def _whole(self, tokenizer: PreTrainedTokenizerBase) -> Backbone:
        if self.path is not None:
            return Backbone.from_pretrained(
                self.path,
                tokenizer=tokenizer,
                mask_token_id=self.mask_token_id,
                attention=self.attention,
                gguf_file=self.gguf_file,
                trust_remote_code=self.trust_remote_code,
            )
        assert self.architecture is not None
        return Backbone.from_architecture(
            self.architecture,
            tokenizer=tokenizer,
            mask_token_id=self.mask_token_id,
            attention=self.attention,
            seed=self.init_seed,
        )

    def _skeleton(self, tokenizer: PreTrainedTokenizerBase) -> Backbone | None:
        """The trained model without its weights; None where it has to be loaded whole."""
        if self.path is None or self.gguf_file or not (files := weight_files(self.path)):
            return None
        model = skeleton(self.path, attention=self.attention, trust_remote_code=self.trust_remote_code)
        if must_grow(model, tokenizer, self.mask_token_id):
            return None
        backbone = Backbone(
            model,
            mask_token_id=choose_mask_token(model, tokenizer, self.mask_token_id),
            eos_token_id=_eos_token_id(model, tokenizer),
            attention=self.attention,
        )
        backbone.weight_files = files
        return backbone


class Backbone(nn.Module):
    """An unmodified Hugging Face causal LM with RoPE, and the ids that go with it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        mask_token_id: int,
        eos_token_id: int | None,
        attention: AttentionBackend,
        num_trained_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.mask_token_id, self._eos_token_id = mask_token_id, eos_token_id
        self.attention_backend = attention
        self.loss_kernel: LossKernel = "auto"
        self.num_trained_rows = num_trained_rows or model.config.vocab_size  # before the tables grew for [MASK]
        self.weight_files: list[Path] = []  # of a model whose weights the strategy still has to read
        self.forward_choice: ForwardChoice = "auto"  # see engine/forward.py
        self.copies: dict[str, str] = {}  # added parameters that start as copies of the model's, by name

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mask_token_id: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: AttentionBackend = "sdpa",
        gguf_file: str | None = None,
        trust_remote_code: bool = False,
    ) -> Backbone:
        """Load a trained model from a folder or the hub.

        Args:
            path_or_id: folder, or hub id (network).
            tokenizer: gives the end-of-sequence id and, where none is known, a row for [MASK].
            mask_token_id: id of [MASK]; None to find one, see `choose_mask_token`.
            dtype: dtype of the weights; fp32 on CPU, where bf16 is emulated and hundreds of times slower.
            device: where the weights go.
            attention: attention kernel.
            gguf_file: name of a GGUF file inside the folder.
            trust_remote_code: run code that comes with the model.

        Raises:
            UserError: no such model, an unsupported architecture, or a mask token that clashes.
        """
        options = {"gguf_file": gguf_file} if gguf_file else {}
        model = load_pretrained(
            str(path_or_id), dtype=dtype, attention=attention, trust_remote_code=trust_remote_code, **options
        )
        num_rows = model.config.vocab_size
        mask_token_id = choose_mask_token(model, tokenizer, mask_token_id)
        model.to(device)  # type: ignore[arg-type]
        return cls(
            model,
            mask_token_id=mask_token_id,
            eos_token_id=_eos_token_id(model, tokenizer),
            attention=attention,
            num_trained_rows=num_rows,
        )

    @classmethod
    def from_architecture(
        cls,
        architecture: dict[str, Any],
        *,
        tokenizer: PreTrainedTokenizerBase,
        mask_token_id: int | None = None,
        attention: AttentionBackend = "sdpa",
        seed: int = 0,
    ) -> Backbone:
        """A model with fresh weights, a function of `seed` alone, sized to the tokenizer.

        Args:
            architecture: fields of the Hugging Face config, with `model_type`.
            tokenizer: gives the vocabulary (rounded up to a multiple of 64) and the special ids.
            mask_token_id: as in `from_pretrained`.
            attention: attention kernel.
            seed: seed of the initial weights.
        """
        model = make_fresh(architecture, tokenizer, attention=attention, seed=seed)
        return cls(
            model,
            mask_token_id=choose_mask_token(model, tokenizer, mask_token_id),
            eos_token_id=_eos_token_id(model, tokenizer),
            attention=attention,
        )

    @property
    def vocab_size(self) -> int:
        """V, rows of the embedding table."""
        return self.model.config.vocab_size

    @property
    def eos_token_id(self) -> int:
        """The end-of-sequence id that decoders stop at: the one that training appends."""
        if self._eos_token_id is None:
            raise UserError("the model's config has no eos_token_id; add it to config.json, or load with a tokenizer")
        return self._eos_token_id

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def max_length(self) -> int | None:
        """Longest row the model was made for, in tokens; None where its config does not say."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order: the blocks that Hugging Face says must not be split."""
        names = self.model._no_split_modules or []
        return [
            module for module in self.model.modules() if any(kind.__name__ in names for kind in type(module).__mro__)
        ]

    def saved_spec(self, *, origin: str) -> DiffusionSpec | None:
        """The DiffusionSpec that an exported model carries in its config, if any."""
        data = getattr(self.model.config, "diffusion_spec", None)
        return None if data is None else DiffusionSpec.from_dict(data, origin=origin)

    def enable_gradient_checkpointing(self) -> None:
        """Recompute activations in the backward pass; caches that are given with gradients are only read here."""
        layers: list[Any] = self.layers
        for layer in layers:
            layer._can_checkpoint_with_cache = True
        self.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})

    @contextmanager
    def using_sdpa(self) -> Iterator[None]:
        """Run with dense masks, not compiled, for a while: what decoding needs, whatever kernel trains.

        Each decoding pass has another shape, so compiled layers would be compiled anew.
        """
        if self.attention_backend != "sdpa":
            self.model.set_attn_implementation("sdpa")
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            if self.attention_backend != "sdpa":
                self.model.set_attn_implementation(self.attention_backend)

    def forward(
        self,
        batch: Batch,
        attention: Attention,
        *,
        context: Context | None = None,
        record: Context | None = None,
        adapted: bool = False,
    ) -> Tensor:
        """Hidden states [B, T, D] after the final norm.

        Args:
            batch: the tokens.
            attention: which keys they see.
            context: keys and values of other tokens of the same rows, which the rule is asked about as well.
            record: receives the keys and values of this pass.
            adapted: go through the parameters that an objective has put beside frozen ones (`Objective.prepare`).
        """
        others = None if context is None else context.batch
        extra = kernel_arguments(self.attention_backend, attention, batch, context=others)
        if context is not None:
            extra["cache"] = Prefix(context)
        elif record is not None:
            extra["cache"] = Recording(record)
        if adapted:
            extra["adapted"] = True
        return self.model.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **extra,
        ).last_hidden_state

    def logits(self, rows: Tensor) -> Tensor:
        """[M, D] hidden states to [M, V] logits, only for the rows asked for."""
        return self.model.get_output_embeddings()(rows)

    def token_cross_entropy(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """[M] cross-entropies of [M, D] hidden states against [M] targets, by the kernel that was chosen."""
        head: Any = self.model.get_output_embeddings()
        return cross_entropy(head, hidden, targets, kernel=self.loss_kernel, vocab_size=self.vocab_size)


def _eos_token_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The tokenizer's end-of-sequence id, which training appends; the config may name others first (Llama 3)."""
    eos = model.config.eos_token_id if tokenizer is None else tokenizer.eos_token_id
    return eos[0] if isinstance(eos, (list, tuple)) else eos
