"""`lit-refusion prepare`: records to shards; `lit-refusion prepare verify`: whether they are still whole."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lit_refusion.commands import compose
from lit_refusion.data.answers import Answering, weights_state
from lit_refusion.data.prepare import PrepareConfig, Prepared, prepare
from lit_refusion.data.remote import is_remote
from lit_refusion.data.selection import DUPLICATE, SourceCounts
from lit_refusion.data.shards import Manifest
from lit_refusion.data.verification import verify
from lit_refusion.decoder import Decoder
from lit_refusion.errors import UserError
from lit_refusion.new_folder import partial_folder
from lit_refusion.processes import num_cores
from lit_refusion.schema import build

VERIFY = "verify"


def run(arguments: argparse.Namespace) -> int:
    """Prepare the data set of `data=...`, or verify it."""
    is_check = arguments.overrides[:1] == [VERIFY]
    arguments.overrides = arguments.overrides[is_check:]
    config = compose(arguments)
    if config is None:
        return 0
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    times = (TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, disable=not console.is_terminal) as progress:
        if is_check:
            return _verify(config["data"]["folder"], progress)
        return _prepare(config, progress)


def _verify(origin: str, progress: Progress) -> int:
    if is_remote(origin):
        raise UserError(f"data.folder={origin}: give the local folder; remote files are checked as they are fetched")
    folder = Path(origin)
    problems = list(verify(folder, progress=progress))
    for problem in problems:
        print(problem)
    manifest = Manifest.load(folder)
    if problems:
        print(f"{folder}: {len(problems)} problems; put the files back, or prepare the data again")
    else:
        print(f"{folder}: whole; {manifest.num_examples:,} examples in {len(manifest.shards)} shards")
    return 1 if problems else 0


def _prepare(config: dict[str, Any], progress: Progress) -> int:
    settings = build(config["data"], PrepareConfig, key="data")
    workers, dry_run = config["num_workers"], config["dry_run"]
    if not (workers is None or (isinstance(workers, int) and workers >= 0)) or not isinstance(dry_run, bool):
        raise UserError(
            f"num_workers={workers}, dry_run={dry_run}: give a number of processes or null, and true or false"
        )
    workers = num_cores() if workers is None else workers
    answering = _answering(config, settings)
    try:
        prepared = prepare(settings, answering=answering, num_workers=workers, dry_run=dry_run, progress=progress)
    except KeyboardInterrupt:
        print(f"what is finished is kept in {partial_folder(Path(settings.folder))}; run the command again to go on")
        raise
    _report(prepared, settings)
    return 0


def _answering(config: dict[str, Any], settings: PrepareConfig) -> Answering | None:
    """Who writes the responses anew, if anybody does."""
    if not isinstance(config["regenerate_responses"], bool):
        raise UserError(f"regenerate_responses={config['regenerate_responses']}: give true or false")
    if not config["regenerate_responses"]:
        return None
    build(config["decoder"], Decoder, key="decoder")
    fields = {
        "model": config["model"] or settings.tokenizer,
        "tokenizer": settings.tokenizer,
        "max_length": settings.max_length,
        "token_dtype": "uint32",
        "seed": settings.seed,
        "weights": weights_state(config["model"] or settings.tokenizer),
        **{name: config[name] for name in ("decoder", "device", "dtype")},
    }
    return build(fields, Answering, key="regenerate_responses")


def _report(prepared: Prepared, settings: PrepareConfig) -> None:
    for error in prepared.errors:
        print(f"skipped {error}")
    for count in prepared.counts:
        dropped = ", ".join(f"{number:,} {reason}" for reason, number in count.dropped.items()) or "none"
        repeats = f", repeated {count.repeats:,}" if count.repeats else ""
        print(f"{count.name}: read {count.read:,}, kept {count.kept:,}, dropped {dropped}{repeats}")
        if count.duplicates and DUPLICATE not in count.refused:
            print(f"{count.name}: {count.duplicates:,} examples repeat an earlier text; deduplicate=true drops them")
    manifest = prepared.manifest
    if manifest is None:
        Console(soft_wrap=True).print(_table(prepared.counts))
        print(f"dry run: {settings.folder} is not written; the tokens are kept for the run itself")
        return
    tokens = manifest.num_prompt_tokens + manifest.num_response_tokens
    print(
        f"{settings.folder}: {manifest.num_examples:,} examples, {tokens:,} tokens "
        f"({manifest.num_response_tokens:,} in responses), longest {manifest.longest}, {len(manifest.shards)} shards"
    )


def _table(counts: list[SourceCounts]) -> Table:
    """What each filter would drop by itself, and what it drops after the ones before it."""
    table = Table("source", "filter", "refuses", "drops", title="filters, in their order")
    for column in table.columns[2:]:
        column.justify = "right"
    for count in counts:
        for reason in dict.fromkeys([*count.refused, *count.dropped]):
            alone = count.refused.get(reason)
            table.add_row(
                count.name, reason, "" if alone is None else f"{alone:,}", f"{count.dropped.get(reason, 0):,}"
            )
    return table
