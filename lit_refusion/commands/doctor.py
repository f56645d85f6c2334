"""`lit-refusion doctor`: whether this machine can run the project; exit code 0 or 1."""

from __future__ import annotations

import argparse
from pathlib import Path

from lit_refusion.commands import compose
from lit_refusion.doctor import examine


def run(arguments: argparse.Namespace) -> int:
    """Print a line a check."""
    config = compose(arguments)
    if config is None:
        return 0
    findings = examine(Path(config["run"]))
    print("\n".join(map(str, findings)))
    return 1 if any(finding.is_problem for finding in findings) else 0
