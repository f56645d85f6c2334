"""Fixtures of ablations."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.ablation.stand_in import EXPERIMENT, Ablation, make_stand_in, use


@pytest.fixture
def ablation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ablation:
    """Three arms, two of which share a training, run by a stand-in."""
    found = Ablation(tmp_path, copy.deepcopy(EXPERIMENT))
    make_stand_in(found.program.parent)
    use(found.program, monkeypatch)
    return found
