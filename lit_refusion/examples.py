"""One training example as token ids. Shapes: P prompt tokens, R response tokens."""

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and the response that is to be learned.

    Args:
        index: number of the example in its data set; keys all of its noise.
        prompt_ids: [P] int64.
        response_ids: [R] int64, R >= 1, the end-of-sequence token included.
        source: name of the source it came from.
    """

    index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    source: str = ""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def token_digest(tokens: np.ndarray, num_prompt: int) -> int:
    """64-bit hash of an example's token ids and of the place where its prompt ends."""
    content = num_prompt.to_bytes(8, "little") + tokens.astype("<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
