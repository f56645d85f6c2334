"""Where records come from: files or Hugging Face data sets, their field names, and what is kept of them."""

from __future__ import annotations

import glob
import math
from dataclasses import dataclass
from pathlib import Path

from lit_refusion.data.formats import SUFFIXES
from lit_refusion.data.records import Fields
from lit_refusion.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of records.

    Args:
        name: name used in counts, reports and mixtures.
        files: paths or glob patterns; empty where `hub` is given.
        hub: id of a Hugging Face data set, or a folder with one; null where `files` is given.
        subsets: names of the hub data set's configurations, read one after another; empty for its default.
        split: split of the hub data set.
        query: field with the question.
        response: field with the answer.
        messages: field with a chat (list of role and content); where a record has it, it is used instead.
        weight: copies of each example; a fraction is made up by a sub-sample, so that the count is exact.
            0 leaves the source out, unread.
        max_examples: at most this many examples, those with the smallest hashes; null for all.
        max_prompt_tokens: examples with a longer prompt (chat template included) are dropped; null for no limit.
        max_tokens: examples with more tokens, prompt and response, are dropped; null for no limit.
        min_response_tokens: examples with a shorter response (end-of-sequence included) are dropped.
        deduplicate: drop examples whose text was kept before, from this source or from an earlier one.
    """

    name: str
    files: tuple[str, ...]
    hub: str | None
    subsets: tuple[str, ...]
    split: str
    query: str
    response: str
    messages: str
    weight: float
    max_examples: int | None
    max_prompt_tokens: int | None
    max_tokens: int | None
    min_response_tokens: int
    deduplicate: bool

    def __post_init__(self) -> None:
        key = f"data.sources[{self.name}]"
        if bool(self.files) == (self.hub is not None):
            raise UserError(f"{key}: give either files={list(self.files)} or hub={self.hub}")
        if self.subsets and self.hub is None:
            raise UserError(f"{key}.subsets={list(self.subsets)}: only a hub data set has subsets; name files in files")
        if not 0 <= self.weight < math.inf:
            raise UserError(f"{key}.weight={self.weight}: must be a number, and not negative")
        for name in ("max_examples", "max_prompt_tokens", "max_tokens", "min_response_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{key}.{name}={value}: must be at least 1")

    @property
    def fields(self) -> Fields:
        """Names of the records' fields."""
        return Fields(source=self.name, query=self.query, response=self.response, messages=self.messages)

    def paths(self) -> list[Path]:
        """The files behind the patterns, sorted within each, so that the order never depends on the disk."""
        found: list[Path] = []
        for pattern in self.files:
            matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True) if Path(match).is_file())
            if not matches:
                raise UserError(
                    f"data.sources[{self.name}].files={pattern}: no such file; check the path or the pattern"
                )
            found += matches
        for path in found:
            if not path.name.endswith(SUFFIXES):
                raise UserError(f"{path}: unknown kind of file; supported: {', '.join(SUFFIXES)}")
        return found
