"""The settings of `evaluate harness=...`, and the processes that share its requests."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed

from lit_refusion.decoder import Decoder
from lit_refusion.errors import UserError
from lit_refusion.export import DType
from lit_refusion.objective import Objective


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """What the harness is to do, and with what.

    Args:
        harness: names of the tasks.
        include: folder of further task files; null for none.
        model: exported folder, or any Hugging Face causal LM with `objective`.
        base: where the base model of an adapter is; null for where it was in training.
        out: folder of the result; must not exist.
        limit: the first documents of each task only; null for all.
        num_fewshot: examples before each question; null for what the task says.
        gen_kwargs: settings of generation instead of the tasks' own.
        system: a system message; null for none.
        fewshot_as_multiturn: examples are turns of the conversation, where there is a chat template.
        bootstrap_iters: samples for standard errors that have no formula; 0 for none.
        decoder: settings of the decoder; null takes the first preset that fits the model.
        objective: what the model was trained with, for likelihoods; null where none are asked for.
        seed: seed of the sampling noise and of the draws.
        num_draws: rows of each likelihood that is a bound.
        max_tokens_per_batch: tokens of a forward pass for likelihoods, padding included.
        device: auto, cpu, cuda, ...
        dtype: auto, float32 or bfloat16.
        force: decode although decoder and model do not fit.
        trust_remote_code: run code that comes with the model.
        prompt_style: "chat" or "plain"; null for the way that the model was trained.
        template_kwargs: variables of the chat template; null for those that the model was trained with.
        allow_code_execution: run tasks that execute what the model writes, in this very process.
    """

    harness: tuple[str, ...]
    include: str | None
    model: str
    base: str | None
    out: str | None
    limit: int | None
    num_fewshot: int | None
    gen_kwargs: dict[str, Any]
    system: str | None
    fewshot_as_multiturn: bool
    bootstrap_iters: int
    decoder: Decoder | None
    objective: Objective | None
    seed: int
    num_draws: int
    max_tokens_per_batch: int
    device: str
    dtype: DType
    force: bool
    trust_remote_code: bool
    prompt_style: Literal["chat", "plain"] | None
    template_kwargs: dict[str, Any] | None
    allow_code_execution: bool

    def __post_init__(self) -> None:
        for name in ("limit", "num_draws", "max_tokens_per_batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("num_fewshot", "bootstrap_iters", "seed"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: must not be negative")


def join_processes(device: str) -> tuple[int, int, str]:
    """(rank, processes, device) where torchrun or `accelerate launch` has started several processes."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1:
        return 0, 1, device
    on_cuda = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    if on_cuda:
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0))}"
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        distributed.init_process_group("nccl" if on_cuda else "gloo", timeout=timedelta(weeks=52))  # answers take long
    return distributed.get_rank(), world_size, device
