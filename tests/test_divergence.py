"""Chunked divergence: the plain one's numbers, each teacher row projected once. M rows, U teachers, V vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_refusion import losses
from lit_refusion.losses import token_divergence
from tests.test_losses import LargestTensor

WIDTH, VOCABULARY = 8, 37
NUM_TEACHERS, NUM_ROWS = 9, 30
MARK = 1000.0
"""First component of a teacher row; its column of the head is zero."""


def make_inputs(
    num_rows: int = NUM_ROWS, vocab_size: int = VOCABULARY, *, bias: bool = False
) -> tuple[nn.Linear, Tensor, Tensor, Tensor, Tensor]:
    """Head, rows, teachers, whose row teaches which, and weights; teacher 4 teaches nobody."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, vocab_size, bias=bias).requires_grad_(False)
    head.weight.normal_(generator=generator)
    head.weight[:, 0] = 0
    if bias:
        head.bias.normal_(generator=generator)
    hidden = torch.randn(num_rows, WIDTH, generator=generator)
    hidden[:, 0] = 0
    teacher = torch.randn(NUM_TEACHERS, WIDTH, generator=generator)
    teacher[:, 0] = MARK + torch.arange(NUM_TEACHERS)
    teacher_of = torch.randperm(num_rows, generator=generator) % NUM_TEACHERS
    teacher_of[teacher_of == 4] = 5
    weights = torch.rand(num_rows, generator=generator)
    return head, hidden.requires_grad_(), teacher, teacher_of, weights


def plain(head: nn.Linear, hidden: Tensor, teacher: Tensor, teacher_of: Tensor) -> Tensor:
    own, target = (head(rows).log_softmax(-1) for rows in (hidden, teacher[teacher_of]))
    return F.kl_div(own, target, log_target=True, reduction="none").sum(-1)


CHUNKS = [2**24, VOCABULARY * 60, VOCABULARY * 12, VOCABULARY * 7, VOCABULARY, 1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("max_logits", CHUNKS)
def test_value_and_gradient_equal_the_plain_divergence(
    max_logits: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "MAX_LOGITS", max_logits)
    found = []
    for loss in (token_divergence, plain):
        head, hidden, teacher, teacher_of, weights = make_inputs(bias=bias)
        token_loss = loss(head, hidden, teacher, teacher_of)
        (token_loss * weights).sum().backward()
        found.append((token_loss.detach(), hidden.grad))
    for actual, expected in zip(*found):
        assert expected is not None
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
        assert expected.abs().max() > 0.1


def test_only_the_rows_get_a_gradient() -> None:
    head, hidden, teacher, teacher_of, _ = make_inputs(bias=True)
    head.requires_grad_(True)
    teacher.requires_grad_(True)
    token_divergence(head, hidden, teacher, teacher_of).sum().backward()
    assert hidden.grad is not None
    assert (head.weight.grad, head.bias.grad, teacher.grad) == (None, None, None)


def test_rows_without_gradient_have_the_same_loss() -> None:
    head, hidden, teacher, teacher_of, _ = make_inputs()
    loss = token_divergence(head, hidden, teacher, teacher_of)
    with torch.no_grad():
        assert torch.equal(token_divergence(head, hidden, teacher, teacher_of), loss.detach())
    detached = token_divergence(head, hidden.detach(), teacher, teacher_of)
    assert not detached.requires_grad
    assert torch.equal(detached, loss.detach())


def test_a_row_equal_to_its_teacher_has_no_divergence() -> None:
    head, _, teacher, teacher_of, _ = make_inputs()
    loss = token_divergence(head, teacher[teacher_of], teacher, teacher_of)
    torch.testing.assert_close(loss, torch.zeros(NUM_ROWS))


def test_direction_is_teacher_to_row() -> None:
    """KL(teacher || row) of (1/2, 1/2) and (1/4, 3/4): log 2 - log 3 / 2."""
    head = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    teacher, hidden = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    expected = torch.log(torch.tensor([2 / 3**0.5]))
    torch.testing.assert_close(token_divergence(head, hidden, teacher, torch.tensor([0])), expected)


class Projections:
    """Inputs of the head, chunk by chunk, told apart by their mark."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.teachers: list[list[int]] = []
        self.rows: list[int] = []
        linear = F.linear

        def recording(x: Tensor, *args: Any) -> Tensor:
            if x[0, 0] >= MARK:
                self.teachers.append([round(float(mark - MARK)) for mark in x[:, 0]])
            else:
                self.rows.append(len(x))
            return linear(x, *args)

        monkeypatch.setattr(losses.F, "linear", recording)


@pytest.mark.parametrize("max_rows", [1_000, 20, 12, 8])
def test_every_teacher_is_projected_once(max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MAX_LOGITS", max_rows * VOCABULARY)
    head, hidden, teacher, teacher_of, _ = make_inputs()
    assert torch.bincount(teacher_of).max() < 8  # all fit
    projected = Projections(monkeypatch)
    token_divergence(head, hidden, teacher, teacher_of).sum().backward()
    assert [number for chunk in projected.teachers for number in chunk] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert sum(projected.rows) == NUM_ROWS
    assert len(projected.rows) == len(projected.teachers)
    assert all(len(t) + rows <= max_rows for t, rows in zip(projected.teachers, projected.rows))
    assert (len(projected.rows) > 1) == (max_rows < NUM_ROWS)


def test_chunks_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two teachers of two rows each go together where six rows of logits may exist."""
    monkeypatch.setattr(losses, "MAX_LOGITS", 6 * VOCABULARY)
    head, hidden, teacher, _, _ = make_inputs(8)
    projected = Projections(monkeypatch)
    token_divergence(head, hidden, teacher, torch.tensor([3, 0, 1, 2, 2, 1, 3, 0]))
    assert projected.teachers == [[0, 1], [2, 3]]
    assert projected.rows == [4, 4]


@pytest.mark.parametrize("loss", [token_divergence, plain])
def test_all_logits_never_exist_at_a_time(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MAX_LOGITS", 20 * 1000)
    head, hidden, teacher, teacher_of, weights = make_inputs(100, 1000)
    teacher_of = torch.arange(100) % NUM_TEACHERS
    with LargestTensor() as largest:
        (loss(head, hidden, teacher, teacher_of) * weights).sum().backward()
    if loss is token_divergence:
        assert largest.numel <= losses.MAX_LOGITS
    else:
        assert largest.numel == 100 * 1000  # the recorder sees what it should


def test_no_rows_have_no_loss() -> None:
    head, hidden, teacher, teacher_of, _ = make_inputs(0)
    loss = token_divergence(head, hidden, teacher, teacher_of)
    loss.sum().backward()
    assert loss.shape == (0,)
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, WIDTH)


def test_half_precision_logits_are_reduced_in_fp32() -> None:
    head, hidden, teacher, teacher_of, _ = make_inputs()
    head, teacher = head.bfloat16(), teacher.bfloat16()
    half = hidden.detach().bfloat16().requires_grad_()
    loss = token_divergence(head, half, teacher, teacher_of)
    own, target = (head(rows).float().log_softmax(-1) for rows in (half, teacher[teacher_of]))
    expected = F.kl_div(own, target, log_target=True, reduction="none").sum(-1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    loss.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_under_autocast_it_has_a_gradient_of_its_inputs_type() -> None:
    """What bf16-mixed makes of it: fp32 weights and inputs, products in bf16."""
    head = nn.Linear(8, 32, bias=False)
    hidden, teacher = torch.randn(6, 8, requires_grad=True), torch.randn(4, 8)
    rows = torch.tensor([0, 1, 1, 2, 3, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = token_divergence(head, hidden, teacher, rows)
    loss.sum().backward()
    exact = hidden.detach().clone().requires_grad_()
    token_divergence(head, exact, teacher, rows).sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, exact.grad, atol=0.05, rtol=0.05)
