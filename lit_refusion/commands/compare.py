"""`lit-refusion compare RUN...`: a report on runs that are there."""

from __future__ import annotations

import argparse

from lit_refusion.commands import compose
from lit_refusion.comparison.compare import CompareConfig, compare
from lit_refusion.schema import build

FAILED = 1


def run(arguments: argparse.Namespace) -> int:
    """Compare the folders; 1 where the comparison is not controlled, or an arm has no result."""
    runs = [text for text in arguments.overrides if "=" not in text]
    arguments.overrides = [text for text in arguments.overrides if "=" in text]
    config = compose(arguments)
    if config is None:
        return 0
    outcome = compare(build({**config, "runs": runs}, CompareConfig))
    return 0 if outcome.is_controlled and outcome.has_all else FAILED
