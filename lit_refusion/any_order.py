"""The any-order bound of a likelihood: tokens decoded one at a time, in all orders. Shapes: R response tokens."""

from __future__ import annotations

import numpy as np

from lit_refusion.examples import Example
from lit_refusion.masking import mask_response
from lit_refusion.views import View

MEANING = (
    "upper bound of -log p(response | prompt, number of response tokens): mean over all orders of decoding one "
    "token at a time"
)
"""What the bound is, for result files."""


def hide_some(num_tokens: int, u: float, rng: np.random.Generator) -> np.ndarray:
    """[num_tokens] bool: l tokens at random, l uniform in 1 .. num_tokens as `u` is in [0, 1).

    With the weight num_tokens / l for each hidden token, the sum over hidden tokens has the mean, over orders, of

        sum over tokens i of  - log p(x_i | tokens before i in the order),

    which bounds - log p(x) from above, and equals the integral over t in (0, 1) of the sum with Bernoulli masks of
    rate t and weights 1 / t. It varies less than that (arXiv 2502.09992, Eq. 6).
    """
    is_hidden = np.zeros(num_tokens, bool)
    is_hidden[rng.permutation(num_tokens)[: min(num_tokens, 1 + int(u * num_tokens))]] = True
    return is_hidden


def any_order_row(example: Example, u: float, rng: np.random.Generator, *, shift: bool) -> View:
    """A row with l hidden response tokens of weight R / l each; `shift` as in `mask_response`."""
    is_hidden = hide_some(len(example.response_ids), u, rng)
    rate = is_hidden.mean()
    return mask_response(example, is_hidden, np.full(len(is_hidden), 1 / rate), shift=shift, mask_rate=float(rate))
