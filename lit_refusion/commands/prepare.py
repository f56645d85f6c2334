"""`lit-refusion prepare`: records to shards."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.progress import Progress

from lit_refusion.commands import compose
from lit_refusion.data.prepare import PrepareConfig, prepare
from lit_refusion.schema import build


def run(arguments: argparse.Namespace) -> int:
    """Prepare the data set of `data=...`."""
    config = compose(arguments)
    if config is None:
        return 0
    settings = build(config["data"], PrepareConfig, key="data")
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        prepared = prepare(settings, progress=progress)
    manifest = prepared.manifest
    for error in prepared.errors:
        print(f"skipped {error}")
    for source in manifest.sources:
        dropped = ", ".join(f"{count} {reason}" for reason, count in source["dropped"].items()) or "none"
        print(f"{source['name']}: read {source['read']}, kept {source['kept']}, dropped {dropped}")
    tokens = manifest.num_prompt_tokens + manifest.num_response_tokens
    print(
        f"{settings.folder}: {manifest.num_examples:,} examples, {tokens:,} tokens "
        f"({manifest.num_response_tokens:,} in responses), longest {manifest.longest}, {len(manifest.shards)} shards"
    )
    return 0
