"""Train a small tokenizer on records: `python -m benchmarks.tokenizer FILE... --vocab-size 2048 --out FOLDER`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from lit_refusion.demo.tokenizer_training import train_bpe


def texts(paths: list[Path]) -> Iterator[str]:
    """Queries and responses of JSON lines."""
    for path in paths:
        for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n"):
            record = json.loads(line)
            yield f"user\n{record['query']}"
            yield f"assistant\n{record['response']}"


def main() -> None:
    """Train it and save it as a Hugging Face folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    train_bpe(arguments.out, texts(arguments.files), vocab_size=arguments.vocab_size)


if __name__ == "__main__":
    main()
