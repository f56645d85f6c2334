"""What an objective trains on, shown: tokens by role, weights, and the attention mask as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from lit_refusion.attention import dense_mask
from lit_refusion.examples import Example
from lit_refusion.objective import Objective
from lit_refusion.views import IGNORE, MASK, View, collate

MAX_PICTURE = 256
"""Longest row whose attention mask is drawn."""

STYLES = {
    "prompt": "dim",
    "response": "none",
    "hidden": "bold magenta",
    "padding": "yellow",
    "hidden padding": "bold yellow",
    "supervised": "underline",
}


def role(view: View, place: int, num_prompt: int, num_text: int) -> str:
    """What a row of a view is: prompt, response, padding (behind the original example), and whether it is hidden."""
    is_padding = view.position_ids[place] >= num_text
    if view.input_ids[place] == MASK:
        return "hidden padding" if is_padding else "hidden"
    if is_padding:
        return "padding"
    return "prompt" if view.position_ids[place] < num_prompt else "response"


def show_view(
    view: View, example: Example, objective: Objective, tokenizer: PreTrainedTokenizerBase, console: Console
) -> None:
    """Print a legend, the row with its roles in colour, and a table of the supervised rows."""
    legend = Text("  ").join(Text(name, style=style) for name, style in STYLES.items())
    console.print(legend)
    text = Text()
    for place in range(len(view)):
        kind = role(view, place, len(example.prompt_ids), len(example))
        shown = "▒" if view.input_ids[place] == MASK else str(tokenizer.decode([int(view.input_ids[place])]))
        style = STYLES[kind] + (" underline" if view.targets[place] != IGNORE else "")
        if place and view.noisy[place] and not view.noisy[place - 1]:
            text.append("  ‖ noisy copies: ", style="cyan")
        text.append(shown.replace("\n", "⏎"), style=style.removeprefix("none "))
    console.print(text)
    console.print(_supervised_rows(view, objective, tokenizer))


def _supervised_rows(view: View, objective: Objective, tokenizer: PreTrainedTokenizerBase) -> Table:
    """One line per supervised row: where it stands, what it sees there, what it predicts, with which weight."""
    table = Table(title=f"{int((view.targets != IGNORE).sum())} supervised rows, mask rate {view.mask_rate:.3f}")
    for heading in ("row", "position", "input", "predicts", "term", "weight"):
        table.add_column(heading, justify="right" if heading in ("row", "position", "weight") else "left")
    for place in np.flatnonzero(view.targets != IGNORE):
        token = view.input_ids[place]
        table.add_row(
            str(place),
            str(view.position_ids[place]),
            "▒" if token == MASK else repr(tokenizer.decode([int(token)])),
            repr(tokenizer.decode([int(view.targets[place])])),
            objective.terms[view.term[place]],
            f"{view.weights[place]:.4f}",
        )
    return table


def draw_mask(view: View, objective: Objective, path: Path, *, step: int) -> None:
    """The row's attention mask as a PNG: dark where the query (down) sees the key (across)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    batch = collate([[view]], mask_token_id=0, pad_to_multiple=1, num_examples=1, num_response_tokens=1)
    attention = objective.attention(step)
    allowed = dense_mask(attention, batch)[0, 0].numpy()
    figure, axis = plt.subplots(figsize=(5, 5))
    axis.imshow(allowed, cmap="Greys", interpolation="nearest", vmin=0, vmax=1.4)
    supervised = np.flatnonzero(view.targets != IGNORE)
    axis.plot(np.full(len(supervised), -1.5), supervised, ">", color="C1", markersize=3, clip_on=False)
    axis.set(title=f"{objective.name}: {attention.name} attention", xlabel="key", ylabel="query (▸ supervised)")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
