"""Chunked cross-entropy: the plain one's numbers without its memory. Shapes: M rows, D width, V vocabulary."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_refusion import losses
from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError
from lit_refusion.losses import cross_entropy, fastest_kernel, fused_cross_entropy, token_cross_entropy
from tests.conftest import REPOSITORY


def plain(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden), targets, reduction="none")


def make_inputs(num_rows: int, vocab_size: int, *, width: int = 8) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(width, vocab_size, bias=False)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
    hidden = torch.randn(num_rows, width, generator=generator).requires_grad_()
    targets = torch.randint(vocab_size, (num_rows,), generator=generator)
    weights = torch.rand(num_rows, generator=generator)
    return head, hidden, targets, weights


def values_and_gradients(
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor], num_rows: int, vocab_size: int
) -> list[Tensor]:
    head, hidden, targets, weights = make_inputs(num_rows, vocab_size)
    token_loss = loss(head, hidden, targets)
    (token_loss * weights).sum().backward()
    return [token_loss.detach(), hidden.grad, head.weight.grad]  # type: ignore[list-item]


def fused(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return fused_cross_entropy(head, hidden, targets, kernel="torch")  # type: ignore[arg-type]


def chunked(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    return token_cross_entropy(head, hidden, targets, vocab_size=head.weight.shape[0])  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("max_logits", [2**24, 37 * 20, 37 * 6, 37, 1])
def test_value_and_gradients_equal_plain_cross_entropy(max_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MAX_LOGITS", max_logits)

    for actual, expected in zip(values_and_gradients(chunked, 20, 37), values_and_gradients(plain, 20, 37)):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("loss", [chunked, fused])
def test_no_rows_have_no_loss(loss: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
    head, hidden, targets, _ = make_inputs(0, 5)

    assert loss(head, hidden, targets).shape == (0,)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(20, 37), (1, 3), (500, 1000)])
def test_torchs_kernel_gives_values_and_gradients_of_plain_cross_entropy(num_rows: int, vocab_size: int) -> None:
    results = values_and_gradients(fused, num_rows, vocab_size), values_and_gradients(plain, num_rows, vocab_size)
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_a_head_with_a_bias_has_it_in_the_fused_kernels_too() -> None:
    _, hidden, targets, _ = make_inputs(6, 11)
    head = nn.Linear(8, 11)
    torch.testing.assert_close(fused(head, hidden, targets), plain(head, hidden, targets))


def test_torchs_kernel_is_taken_where_one_chunk_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MAX_LOGITS", 20 * 37)
    head, hidden, _, _ = make_inputs(21, 37)
    assert fastest_kernel(head, hidden, vocab_size=37) == "torch"
    assert fastest_kernel(head, hidden[:20], vocab_size=37) == "chunked"
    assert fastest_kernel(head, hidden.to("meta"), vocab_size=37) == "chunked"
    other = nn.Linear(8, 37)
    other.register_forward_hook(lambda *_: None)
    assert fastest_kernel(other, hidden, vocab_size=37) == "chunked"
    assert fastest_kernel(type("Other", (nn.Linear,), {})(8, 37), hidden, vocab_size=37) == "chunked"
    monkeypatch.delattr(F, "linear_cross_entropy")
    assert fastest_kernel(head, hidden, vocab_size=37) == "chunked"


@pytest.mark.parametrize("max_logits", [2**24, 100])
def test_a_model_with_the_fastest_kernel_has_the_plain_loss(
    max_logits: int, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "MAX_LOGITS", max_logits)
    model, hidden = backbone.model, torch.randn(9, backbone.model.config.hidden_size)
    targets = torch.arange(9)
    expected = plain(model.get_output_embeddings(), hidden, targets)
    torch.testing.assert_close(backbone.token_cross_entropy(hidden, targets), expected)


@pytest.mark.parametrize("kernel", ["auto", "chunked"])
def test_a_head_with_a_hook_is_called(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MAX_LOGITS", 100)
    head, hidden, targets, _ = make_inputs(6, 37)
    head.register_forward_hook(lambda _module, _inputs, logits: 2 * logits)
    found = cross_entropy(head, hidden, targets, kernel=kernel, vocab_size=37)
    torch.testing.assert_close(found, plain(head, hidden, targets))


def test_a_kernel_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    head, hidden, targets, _ = make_inputs(2, 5)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UserError, match=r"backbone.cross_entropy=liger: needs an extra: pip install 'lit-refusion\[li"):
        fused_cross_entropy(head, hidden, targets, kernel="liger")  # type: ignore[arg-type]


LIGER = """
from tests.test_losses import *

def liger(head, hidden, targets):
    return fused_cross_entropy(head, hidden, targets, kernel="liger")

for num_rows, vocab_size in [(20, 37), (130, 300)]:  # in several chunks
    ours, theirs = (values_and_gradients(loss, num_rows, vocab_size) for loss in (plain, liger))
    for pair in zip(ours, theirs):
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-4)
"""


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_ligers_kernel_gives_values_and_gradients_of_plain_cross_entropy() -> None:
    """Through Triton's interpreter, so without a GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", LIGER], check=True, env=environment, cwd=REPOSITORY)


def test_half_precision_logits_are_reduced_in_fp32() -> None:
    head, hidden, targets, _ = make_inputs(6, 50)
    head, hidden = head.bfloat16(), hidden.detach().bfloat16()

    loss = chunked(head, hidden, targets)

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(head(hidden).float(), targets, reduction="none"))


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation makes, the backward pass included."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


NUM_ROWS, VOCABULARY = 1_000, 50_000


@pytest.mark.parametrize(("loss", "is_small"), [(chunked, True), (plain, False)])
def test_all_logits_never_exist_at_a_time(loss: Callable[..., Tensor], is_small: bool) -> None:
    head, hidden, targets, weights = make_inputs(NUM_ROWS, VOCABULARY)

    with LargestTensor() as largest:
        (loss(head, hidden, targets) * weights).sum().backward()

    assert (largest.numel <= losses.MAX_LOGITS) == is_small
    assert is_small or largest.numel == NUM_ROWS * VOCABULARY  # the recorder sees what it should


def test_head_sees_a_chunk_at_a_time_and_again_in_the_backward_pass() -> None:
    head, hidden, targets, weights = make_inputs(NUM_ROWS, VOCABULARY)
    rows: list[int] = []
    head.register_forward_hook(lambda module, args, output: rows.append(len(args[0])))

    total = (chunked(head, hidden, targets) * weights).sum()
    assert sum(rows) == NUM_ROWS
    total.backward()

    assert sum(rows) == 2 * NUM_ROWS
    assert max(rows) * VOCABULARY <= losses.MAX_LOGITS


PEAK = """
import sys, torch
from torch import nn
from torch.nn import functional as F
from lit_refusion.losses import token_cross_entropy

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

torch.set_num_threads(1)
head, hidden = nn.Linear(16, 50_000, bias=False), torch.randn(2_000, 16, requires_grad=True)
targets = torch.randint(50_000, (2_000,))
F.cross_entropy(head(hidden[:2]), targets[:2]).backward()  # first-use allocations
before = status("VmRSS")
if sys.argv[1] == "chunked":
    loss = token_cross_entropy(head, hidden, targets, vocab_size=50_000)
else:
    loss = F.cross_entropy(head(hidden), targets, reduction="none")
loss.sum().backward()
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_peak_memory_is_a_fraction_of_the_plain_version() -> None:
    # VmHWM and not ru_maxrss: the latter starts at the peak of the process that forked.
    chunked_kib, plain_kib = (
        int(subprocess.run([sys.executable, "-c", PEAK, kind], check=True, capture_output=True, text=True).stdout)
        for kind in ("chunked", "plain")
    )

    assert plain_kib > 2 * 2_000 * 50_000 * 4 / 1024  # logits and their gradient: the measurement works
    assert chunked_kib < plain_kib / 2
