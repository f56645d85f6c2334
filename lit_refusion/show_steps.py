"""What every forward pass of a generation committed, in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from lit_refusion.generation import Generation

OPEN = "·"


def render_steps(generation: Generation, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """One line per pass: its number and kind, then the response so far, new tokens highlighted, open ones as dots."""
    shown: dict[int, str] = {}
    length = max((place for step in generation.steps for place in step.committed), default=-1) + 1
    width = len(str(len(generation.steps)))
    kind_width = max(9, *(len(step.kind) for step in generation.steps))
    for number, step in enumerate(generation.steps, start=1):
        new = set(step.committed)
        shown |= {place: str(tokenizer.decode([token])) for place, token in zip(step.committed, step.tokens)}
        text = Text().append(f"{number:{width}} {step.kind:{kind_width}} ", style="dim")
        if not new:
            text.append("-", style="dim")
        else:
            for place in range(length):
                style = "bold green" if place in new else ("none" if place in shown else "dim")
                text.append(shown.get(place, OPEN).replace("\n", "⏎"), style=style)
            text.append(f"  [{len(new)} at {_ranges(sorted(new))}]", style="cyan")
        console.print(text)


def _ranges(places: list[int]) -> str:
    """3,4,5,9 as 3-5,9."""
    parts: list[list[int]] = []
    for place in places:
        if parts and place == parts[-1][1] + 1:
            parts[-1][1] = place
        else:
            parts.append([place, place])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
