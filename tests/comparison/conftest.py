"""Fixtures of comparisons."""

from __future__ import annotations

import pytest

from lit_refusion.comparison import statistics


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse bootstrap, for tests that do not look at its digits."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
