"""`lit-refusion export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

import argparse

from lit_refusion.commands import compose
from lit_refusion.export import ExportConfig, export
from lit_refusion.schema import build


def run(arguments: argparse.Namespace) -> int:
    """Export `run=...` to `out=...`."""
    config = compose(arguments)
    if config is None:
        return 0
    print(export(build(config, ExportConfig)))
    return 0
