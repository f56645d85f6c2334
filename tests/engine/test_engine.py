"""The decoding engine: cached equals uncached, rows are independent, the buffer never grows or moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lit_refusion.backbone import Backbone
from lit_refusion.engine.cache import BufferCache
from lit_refusion.engine.queries import hidden_keys
from lit_refusion.engine.replies import split_replies
from lit_refusion.engine.request import Reply, Request, Row, Sampling, visible
from lit_refusion.engine.sampling import filter_logits
from lit_refusion.engine.scheduler import decode
from lit_refusion.errors import UserError
from lit_refusion.generation import Generation

DONE = Generation(tokens=(), uncut_tokens=(), forward_passes=0, stop="length")


def causal(tokens: list[int], start: int, *, num_replies: int, **extra: Any) -> Request:
    places = start + np.arange(len(tokens))
    return Request(
        tokens=np.array(tokens),
        positions=places,
        places=places,
        intervals=visible((0, places + 1)),
        num_replies=num_replies,
        **extra,
    )


def run(backbone: Backbone, *rows: Row, batch_size: int = 8, capacity: int = 32) -> list[Generation]:
    return decode(backbone, rows, batch_size=batch_size, capacity=capacity, seeds=[0] * len(rows))


def recorded(requests: list[Request], replies: list[Reply]) -> Row:
    for request in requests:
        replies.append((yield request))
    return DONE


@torch.no_grad()
def plain_log_p(backbone: Backbone, tokens: list[int]) -> torch.Tensor:
    return backbone.model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)


def test_cached_equals_uncached(backbone: Backbone) -> None:
    """Three pieces of a text through the cache give the probabilities of the whole text."""
    text = list(range(30, 42))
    targets = np.array([*text[1:], 7])
    replies: list[Reply] = []
    pieces = [(0, 5), (5, 6), (6, 12)]
    requests = [causal(text[a:b], a, num_replies=b - a, targets=targets[a:b], entropy=True) for a, b in pieces]
    run(backbone, recorded(requests, replies))
    log_p = plain_log_p(backbone, text)
    p_target = log_p.gather(1, torch.from_numpy(targets)[:, None])[:, 0].exp()
    np.testing.assert_allclose(np.concatenate([r.p_target for r in replies]), p_target, rtol=1e-4)
    np.testing.assert_allclose(
        np.concatenate([r.entropy for r in replies]), torch.special.entr(log_p.exp()).sum(-1), rtol=1e-4
    )
    allowed = log_p.clone()
    allowed[:, backbone.mask_token_id] = -torch.inf
    best = allowed.max(-1)
    assert np.concatenate([r.tokens for r in replies]).tolist() == best.indices.tolist()
    np.testing.assert_allclose(np.concatenate([r.p_token for r in replies]), best.values.exp(), rtol=1e-4)


def test_places_do_not_matter_only_positions_do(backbone: Backbone) -> None:
    text = list(range(30, 40))
    straight: list[Reply] = []
    scattered: list[Reply] = []
    run(backbone, recorded([causal(text, 0, num_replies=10)], straight))
    order = np.arange(10)
    requests = [
        Request(
            tokens=np.array(text),
            positions=order,
            places=15 - order,  # the buffer in reverse: token i sees [15 - i, 16)
            intervals=visible((15 - order, 16)),
            num_replies=10,
        )
    ]
    run(backbone, recorded(requests, scattered))
    np.testing.assert_allclose(straight[0].p_token, scattered[0].p_token, rtol=1e-4)
    assert straight[0].tokens.tolist() == scattered[0].tokens.tolist()


def test_groups_in_scratch_do_not_see_each_other(backbone: Backbone) -> None:
    """Two continuations of one prompt in one pass equal each by itself."""
    prompt, left, right = [50, 51, 52], [60, 61], [70, 71]
    replies: list[Reply] = []
    base = np.array([3, 3, 5, 5])
    places = np.array([3, 4, 5, 6])
    both = Request(
        tokens=np.array(left + right),
        positions=np.array([3, 4, 3, 4]),
        places=places,
        intervals=visible((0, 3), (base, places + 1)),
        num_replies=4,
    )
    run(backbone, recorded([causal(prompt, 0, num_replies=0), both], replies))
    for part, tail in ((slice(0, 2), left), (slice(2, 4), right)):
        log_p = plain_log_p(backbone, prompt + tail)[3:]
        log_p[:, backbone.mask_token_id] = -torch.inf
        np.testing.assert_allclose(replies[1].p_token[part], log_p.max(-1).values.exp(), rtol=1e-4)


def test_rewriting_scratch_forgets_what_was_there(backbone: Backbone) -> None:
    text = list(range(30, 38))
    replies: list[Reply] = []
    requests = [
        causal(text[:4], 0, num_replies=0),
        causal([99, 98, 97, 96, 95], 4, num_replies=5),  # rejected drafts
        causal(text[4:], 4, num_replies=4),
    ]
    run(backbone, recorded(requests, replies))
    log_p = plain_log_p(backbone, text)[4:]
    log_p[:, backbone.mask_token_id] = -torch.inf
    np.testing.assert_allclose(replies[2].p_token, log_p.max(-1).values.exp(), rtol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_rows_are_independent_and_refilled(backbone: Backbone, batch_size: int) -> None:
    """Rows of different lengths, more rows than places: the same replies for any batch size, in the rows' order."""
    rng = np.random.default_rng(0)
    rows, expected = [], []
    for number in range(7):
        prompt = rng.integers(10, 200, 3 + 2 * number).tolist()
        text = [*prompt, *rng.integers(10, 200, 8 - number).tolist()]
        expected.append(plain_log_p(backbone, text)[-1, 5].exp().item())

        def row(text: list[int] = text, prompt_length: int = len(prompt)) -> Row:
            yield causal(text[:prompt_length], 0, num_replies=1)
            for place in range(prompt_length, len(text)):
                reply = yield causal([text[place]], place, num_replies=1, targets=np.array([5]))
            return Generation(
                tokens=(), uncut_tokens=(), forward_passes=0, stop="length", statistics={"p": reply.p_target[0]}
            )

        rows.append(row())
    results = run(backbone, *rows, batch_size=batch_size)
    np.testing.assert_allclose([result.statistics["p"] for result in results], expected, rtol=1e-4)


def test_a_request_beyond_the_buffer_is_an_error(backbone: Backbone) -> None:
    with pytest.raises(UserError, match="place 32 of a buffer of 32"):
        run(backbone, recorded([causal([5] * 33, 0, num_replies=1)], []))


def test_decoding_restores_train_mode_and_leaves_weights_alone(backbone: Backbone) -> None:
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    for training in (True, False):
        backbone.train(training)
        run(backbone, recorded([causal([5, 6], 0, num_replies=1)], []))
        assert backbone.training is training
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_buffer_is_allocated_once_and_returned_as_a_view(backbone: Backbone) -> None:
    config = backbone.model.config
    cache = BufferCache(config, num_rows=2, capacity=10, dtype=torch.float32, device=torch.device("cpu"))
    address = cache.buffer.data_ptr()
    cache.aim(torch.tensor([[0, 1], [4, 10]]), rows=[0, 1], visible=6)
    keys = torch.randn(2, config.num_key_value_heads, 2, config.head_dim)
    returned, _ = cache.update(keys, keys, 0)
    assert returned.shape == (2, config.num_key_value_heads, 6, config.head_dim)
    assert returned.untyped_storage().data_ptr() == address
    torch.testing.assert_close(returned[0, :, :2], keys[0])
    torch.testing.assert_close(returned[1, :, 4], keys[1, :, 0])
    assert not returned[1, :, 5].any()  # the padded query went to the trash at place 10


def test_interval_mask_written_out() -> None:
    intervals = torch.tensor([[[0, 2, 4, 5, 0, 0], [0, 1, 0, 0, 0, 0]]])
    expected = torch.tensor([[[[1, 1, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]]]], dtype=torch.bool)
    assert torch.equal(~hidden_keys(intervals, 6), expected)
    assert torch.equal(~hidden_keys(intervals, 6, used=((0, False), (1, True))), expected)


def test_filters_written_out() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = lambda **options: filter_logits(logits, **options).isfinite()[0].tolist()  # noqa: E731
    assert kept(top_k=2, top_p=1.0, temperature=1.0) == [True, True, False, False]
    assert kept(top_k=0, top_p=0.5, temperature=1.0) == [True, False, False, False]
    assert kept(top_k=0, top_p=0.51, temperature=1.0) == [True, True, False, False]
    assert kept(top_k=0, top_p=0.81, temperature=1.0) == [True, True, True, False]


def test_mask_token_is_never_drawn(backbone: Backbone) -> None:
    class Masky(type(backbone)):  # type: ignore[misc]
        def logits(self, rows: torch.Tensor) -> torch.Tensor:
            logits = super().logits(rows).clone()
            logits[:, self.mask_token_id] += 100
            return logits

    backbone.__class__ = Masky
    for temperature in (0.0, 1.0):
        replies: list[Reply] = []
        sampling = Sampling(temperature=temperature)
        run(backbone, recorded([causal([5, 6, 7], 0, num_replies=3, sampling=sampling)], replies))
        assert backbone.mask_token_id not in replies[0].tokens


def test_engine_runs_on_a_backbone_trained_with_another_kernel(backbone: Backbone) -> None:
    sdpa: list[Reply] = []
    flex: list[Reply] = []
    run(backbone, recorded([causal([5, 6, 7], 0, num_replies=3)], sdpa))
    backbone.model.set_attn_implementation("flex_attention")
    backbone.attention_backend = "flex_attention"
    run(backbone, recorded([causal([5, 6, 7], 0, num_replies=3)], flex))
    np.testing.assert_array_equal(sdpa[0].p_token, flex[0].p_token)
    assert backbone.model.config._attn_implementation == "flex_attention"


def test_replies_are_split_at_the_rows_borders() -> None:
    assert split_replies([3, 2], limit=5) == [slice(0, 5)]
    assert split_replies([3, 0, 5], limit=4) == [slice(0, 3), slice(3, 7), slice(7, 8)]
    assert split_replies([0], limit=4) == []


def test_chunked_replies_equal_whole_ones(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(temperature=1.0)
    request = causal(list(range(30, 40)), 0, num_replies=10, sampling=sampling, entropy=True, margin=True)
    whole: list[Reply] = []
    run(backbone, recorded([request], whole))
    monkeypatch.setattr("lit_refusion.engine.replies.MAX_LOGITS", 3 * backbone.vocab_size)
    chunked: list[Reply] = []
    run(backbone, recorded([request], chunked), recorded([causal([7], 0, num_replies=1)], []))
    np.testing.assert_allclose(chunked[0].entropy, whole[0].entropy, rtol=1e-4)
    np.testing.assert_allclose(chunked[0].margin, whole[0].margin, rtol=1e-3, atol=1e-6)
    assert chunked[0].tokens.tolist() == whole[0].tokens.tolist()
