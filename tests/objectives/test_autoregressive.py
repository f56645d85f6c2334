"""Next-token prediction against a plain implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lit_refusion.backbone import Backbone
from lit_refusion.examples import Example
from lit_refusion.views import collate
from objectives.autoregressive import Autoregressive


def views(objective: Autoregressive) -> list:
    rng = np.random.default_rng(0)
    examples = [
        Example(index=0, prompt_ids=np.array([10, 11, 12]), response_ids=np.array([20, 21, 22, 2])),
        Example(index=1, prompt_ids=np.array([13]), response_ids=np.array([2])),
    ]
    return [objective.view(example, rng) for example in examples]


def test_row_written_out() -> None:
    long, short = views(Autoregressive(average="example"))
    assert long.input_ids.tolist() == [10, 11, 12, 20, 21, 22, 2]
    assert long.targets.tolist() == [-100, -100, 20, 21, 22, 2, -100]
    np.testing.assert_allclose(long.weights, [0, 0, 0.25, 0.25, 0.25, 0.25, 0])
    assert short.targets.tolist() == [2, -100]
    assert short.weights.tolist() == [1, 0]


@pytest.mark.parametrize("average", ["example", "token"])
def test_loss_equals_plain_cross_entropy(backbone: Backbone, average: str) -> None:
    objective = Autoregressive(average=average)
    batch = collate(
        [[view] for view in views(objective)],
        mask_token_id=None,
        pad_to_multiple=4,
        num_examples=2,
        num_response_tokens=5,
    )
    loss = objective.loss(backbone, batch, step=0)
    per_example = []
    for view in views(objective):
        logits = backbone.model(torch.from_numpy(view.input_ids)[None], use_cache=False).logits[0]
        per_example.append(F.cross_entropy(logits, torch.from_numpy(view.targets), reduction="none"))
    if average == "example":
        expected = per_example[0].sum() / 4 + per_example[1].sum()
        assert objective.normalizer == "examples"
    else:
        expected = sum(losses.sum() for losses in per_example)
        assert objective.normalizer == "response_tokens"
    torch.testing.assert_close(loss.total, expected, atol=1e-4, rtol=1e-4)


def test_batch_without_targets_still_reaches_every_parameter(backbone: Backbone) -> None:
    objective = Autoregressive(average="example")
    batch = collate(
        [[view] for view in views(objective)],
        mask_token_id=None,
        pad_to_multiple=1,
        num_examples=2,
        num_response_tokens=5,
    )
    batch.targets.fill_(-100)
    batch.weights.fill_(0)
    batch.term.fill_(-1)
    loss = objective.loss(backbone, batch, step=0)
    loss.total.backward()
    assert float(loss.total.detach()) == 0
    for name, parameter in backbone.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
