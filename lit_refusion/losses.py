"""Losses at supervised rows only. Shapes: M supervised rows, U rows of a teacher, D width, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lit_refusion.errors import UserError

LossKernel = Literal["auto", "chunked", "torch", "liger"]

MAX_LOGITS = 2**24
"""Logit elements that exist at a time (fp32: 64 MiB); a chunk has MAX_LOGITS // V rows."""


def cross_entropy(head: Any, hidden: Tensor, targets: Tensor, *, kernel: LossKernel, vocab_size: int) -> Tensor:
    """[M] cross-entropies of [M, D] hidden states against [M] targets by a kernel; see the functions below.

    Where ranks share the head out, all of them have to gather it equally often, however many rows and chunks each has.
    So a plain head is not called: its weight is read, once.
    """
    if kernel == "auto":
        kernel = fastest_kernel(head, hidden, vocab_size=vocab_size)
    if kernel != "chunked":
        return fused_cross_entropy(head, hidden, targets, kernel=kernel)
    logits_of = partial(F.linear, weight=head.weight, bias=head.bias) if is_plain(head) else head
    return token_cross_entropy(logits_of, hidden, targets, vocab_size=vocab_size)


def token_cross_entropy(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, *, vocab_size: int
) -> Tensor:
    """Cross-entropy of each row in fp32, [M], without ever holding [M, V].

    The rows go through the head in chunks and each chunk's logits are computed again in the backward pass:
    a third more head arithmetic for memory that does not grow with M. Every chunk makes a gradient of the head's size,
    which `fused_cross_entropy` adds up in place.

    Args:
        logits_of: maps [m, D] to [m, V].
        hidden: [M, D].
        targets: [M] int64.
    """

    def chunk_loss(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(rows).float(), labels, reduction="none")

    rows_per_chunk = max(1, MAX_LOGITS // vocab_size)
    chunks = zip(hidden.split(rows_per_chunk), targets.split(rows_per_chunk))
    if len(hidden) <= rows_per_chunk:
        return chunk_loss(hidden, targets)
    return torch.cat([checkpoint(chunk_loss, rows, labels, use_reentrant=False) for rows, labels in chunks])


def is_plain(head: nn.Module) -> bool:
    """Whether calling a head does no more than what its weight and bias say, but for gathering them."""
    if type(head) is not nn.Linear or "forward" in vars(head):
        return False
    is_gathered_by_hooks = hasattr(head.weight, "ds_id")  # ZeRO stage 3
    return is_gathered_by_hooks or not (head._forward_hooks or head._forward_pre_hooks)


def fastest_kernel(head: nn.Module, hidden: Tensor, *, vocab_size: int) -> LossKernel:
    """What "auto" stands for: "torch" where it was measured to be faster: on a CPU, for more logits than a chunk."""
    needs_chunks = len(hidden) * vocab_size > MAX_LOGITS
    has_kernel = hasattr(F, "linear_cross_entropy") and is_plain(head)
    return "torch" if needs_chunks and has_kernel and hidden.is_cpu else "chunked"


def fused_cross_entropy(head: nn.Linear, hidden: Tensor, targets: Tensor, *, kernel: LossKernel) -> Tensor:
    """The same by a library's kernel that joins head and loss, [M].

    Args:
        head: the output head; its weight must be whole when this is called.
        hidden: [M, D].
        targets: [M] int64.
        kernel: "torch" (`torch.nn.functional.linear_cross_entropy`) or "liger" (Hsu et al., arXiv 2410.10989).

    Raises:
        UserError: the kernel is not installed.
    """
    weight, bias = head.weight.to(hidden.dtype), None if head.bias is None else head.bias.to(hidden.dtype)
    try:
        if kernel == "torch":
            from torch.nn import LinearCrossEntropyOptions

            # Left to itself it takes chunks of about M D / V rows; where that is one or two it is ten times slower.
            options = LinearCrossEntropyOptions(batch_chunk_size=max(1, MAX_LOGITS // len(weight)))
            fused = F.linear_cross_entropy
            return fused(hidden, weight, targets, linear_bias=bias, reduction="none", options=options).float()
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
    except ImportError as error:
        needed = "torch 2.13 or later" if kernel == "torch" else "an extra: pip install 'lit-refusion[liger]'"
        raise UserError(f"backbone.cross_entropy={kernel}: needs {needed}; or use chunked") from error
    return liger_fused_linear_cross_entropy(hidden, weight, targets, bias=bias, reduction="none").float()


def token_divergence(head: nn.Linear, hidden: Tensor, teacher: Tensor, teacher_of: Tensor) -> Tensor:
    """KL(softmax(head(teacher row)) || softmax(head(own row))) of each row over the whole vocabulary, in fp32, [M].

    Rows go through the head in chunks that are ordered by their teacher row, so that each of those is projected once,
    whatever number of rows it teaches. The gradient, for `hidden` alone, is made along the way:
    (softmax(own) - softmax(teacher)) @ W. So nothing is computed again in the backward pass.

    Args:
        head: the output head, frozen; its weight must be whole when this is called.
        hidden: [M, D].
        teacher: [U, D] hidden states; they get no gradient.
        teacher_of: [M] int64, the teacher row of each row.
    """
    loss: Tensor = _Divergence.apply(hidden, teacher.detach(), teacher_of, head.weight, head.bias)
    return loss


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher: Tensor, teacher_of: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        loss = torch.zeros(len(hidden), device=hidden.device)
        gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        teachers, number, counts = torch.unique(teacher_of, return_inverse=True, return_counts=True)
        order = torch.argsort(number, stable=True)
        for first, stop, start, end in _chunks(counts.tolist(), max_rows=max(2, MAX_LOGITS // len(weight))):
            rows = order[start:end]
            target = F.linear(teacher[teachers[first:stop]], weight, bias).float().log_softmax(-1)  # [u, V]
            own = F.linear(hidden[rows], weight, bias).float().log_softmax(-1)  # [m, V]
            target = target[number[rows] - first]
            loss[rows] = (target.exp() * (target - own)).sum(-1)
            if gradient is not None:
                difference = own.exp_().sub_(target.exp_()).to(weight.dtype)
                gradient[rows] = (difference @ weight).to(gradient.dtype)  # autocast may have made it bf16
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype)[:, None], None, None, None, None


def _chunks(counts: list[int], *, max_rows: int) -> Iterator[tuple[int, int, int, int]]:
    """(first teacher, last + 1, first row, last + 1) of chunks of at most `max_rows` rows, teachers included.

    A teacher of more rows than that has a chunk of its own.

    Args:
        counts: [U] rows of each teacher.
        max_rows: rows of logits.
    """
    first = start = end = 0
    for number, count in enumerate(counts):
        if number > first and (end - start + count) + (number + 1 - first) > max_rows:
            yield first, number, start, end
            first, start = number, end
        end += count
    if counts:
        yield first, len(counts), start, end
