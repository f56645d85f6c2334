"""The official ReFusion code as a contender, and the settings that it shares with ours."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import existing
from benchmarks.worker import Worker
from decoders.refusion import ReFusionDecoder
from lit_refusion.config import load_config
from lit_refusion.decoder import Decoder
from lit_refusion.schema import build


@dataclass(frozen=True)
class Setting:
    """What is decoded how."""

    slot_size: int
    block_size: int
    slot_threshold: float
    token_threshold: float
    new_tokens: int

    @classmethod
    def read(cls, text: str) -> Setting:
        """From five numbers between commas."""
        slot, block, p_slot, p_token, new = text.split(",")
        if int(new) % int(block) or int(block) % int(slot):
            raise SystemExit(f"--settings {text}: give whole slots in a block, and whole blocks of new tokens")
        return cls(int(slot), int(block), float(p_slot), float(p_token), int(new))

    def decoder(self, *, batch_size: int, budget: int = 0) -> ReFusionDecoder:
        """Ours, with the released code's fault."""
        changes = {
            "slot_size": self.slot_size, "block_size": self.block_size, "slot_threshold": self.slot_threshold,
            "token_threshold": self.token_threshold, "max_new_tokens": self.new_tokens, "batch_size": batch_size,
            "as_released": True, "temperature": 0.0, "speculation_budget": budget,
        }  # fmt: skip
        config = load_config("generate", ["model=m", "prompt=p", "decoder=refusion"])["decoder"]
        decoder = build({**config, **changes}, Decoder, key="decoder")
        assert isinstance(decoder, ReFusionDecoder)
        return decoder


@dataclass(frozen=True)
class Measured:
    """One contender over some prompts, once."""

    seconds: float
    cpu_seconds: float
    texts: list[list[int]]  # up to the end of sequence
    passes: int  # of all prompts together, each counted by itself

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(map(len, self.texts))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the official code is."""
    parser.add_argument(
        "--reference", type=existing, help="checkout of the official ReFusion code; left out without it"
    )
    parser.add_argument("--reference-python", help="interpreter that runs it")


def start(asked: argparse.Namespace, model: str | Path) -> Worker | None:
    """The official code with a model, where it was asked for."""
    if asked.reference is None:
        return None
    worker = Worker("benchmarks.reference_worker", python=asked.reference_python, path=[asked.reference])
    worker.ask("load", path=str(Path(model).resolve()))
    return worker


def decode(worker: Worker, setting: Setting, prompts: list[list[int]], *, eos_token_id: int) -> Measured:
    """By the official code, which times itself."""
    found = worker.ask("decode", prompts=prompts, eos_token_id=eos_token_id, **vars(setting))
    return Measured(
        seconds=sum(item["seconds"] for item in found),
        cpu_seconds=sum(item["cpu_seconds"] for item in found),
        texts=[cut(item["tokens"], eos_token_id) for item in found],
        passes=sum(item["passes"] for item in found),
    )


def cut(tokens: list[int], eos_token_id: int) -> list[int]:
    """Up to the first end of sequence."""
    return tokens[: tokens.index(eos_token_id) + 1] if eos_token_id in tokens else tokens
