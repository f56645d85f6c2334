"""How the drafts of Orthrus get better in training: `python -m benchmarks.orthrus --base MODEL --data DATA`.

Trains twins beside an exported autoregressive model in stages, with a constant learning rate, and decodes the held-out
problems of the demo after each; prints a Markdown table, draws a plot. At every stage the text must be the base's own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from lit_refusion.config import load_config
from lit_refusion.decoder import Decoder
from lit_refusion.demo.word_problems import generate
from lit_refusion.export import LoadedModel, load_model
from lit_refusion.generation import Generation
from lit_refusion.schema import build

STAGES = (1, 50, 100, 200, 400, 800, 1600, 3200)
NUM_PROBLEMS = 128


def main() -> None:
    """Train, decode, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="exported model of objective=ar")
    parser.add_argument("--data", required=True, help="prepared data, with the base's own answers at best")
    parser.add_argument("--out", default="runs/benchmark_orthrus")
    parser.add_argument("--stages", type=int, nargs="*", default=STAGES, help="optimizer steps at which to decode")
    parser.add_argument("--plot", help="picture to write")
    parser.add_argument("settings", nargs="*", help="further settings of train, as objective.block_size=8")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    expected = decode(load_model(arguments.base, objective=None), "ar")
    rows = []
    for steps in arguments.stages:
        train(arguments, out / "run", steps)
        found = decode(exported(out / "run", out / "model"), "orthrus")
        assert [g.tokens for g in found] == [g.tokens for g in expected], "the text is not the base's"
        rows.append({"steps": steps, **figures(found)})
        print(json.dumps(rows[-1]), flush=True)
    (out / "results.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    print("\n| steps | tokens per pass | kept drafts a cycle |\n|---|---|---|")
    for row in rows:
        print(f"| {row['steps']:,} | {row['tokens_per_pass']:.2f} | {row['acceptance_length']:.2f} |")
    if arguments.plot:
        draw(rows, Path(arguments.plot))


def train(arguments: argparse.Namespace, run: Path, steps: int) -> None:
    """Go on to `steps` optimizer steps."""
    command = [
        *(sys.executable, "-m", "lit_refusion.cli", "train", "objective=orthrus", "data=prepared"),
        *(f"data.folder={arguments.data}", f"run={run}", "backbone=pretrained", f"backbone.path={arguments.base}"),
        *("optimizer.schedule=constant", "optimizer.learning_rate=1e-3", "optimizer.weight_decay=0", "resume=auto"),
        *(f"trainer.max_steps={steps}", "trainer.progress=none", *arguments.settings),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def exported(run: Path, model: Path) -> LoadedModel:
    """The run's last state, loaded."""
    shutil.rmtree(model, ignore_errors=True)
    command = ["lit_refusion.cli", "export", f"run={run}", "checkpoint=last", f"out={model}"]
    subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)
    return load_model(str(model), objective=None)


def decode(model: LoadedModel, decoder: str) -> list[Generation]:
    """Greedy answers to the held-out problems."""
    problems = generate(NUM_PROBLEMS, seed=1, held_out=True)
    messages = [[{"role": "user", "content": problem["query"]}] for problem in problems]
    prompts = model.prompt_format.encode_prompts(model.tokenizer, messages)
    config = load_config("generate", ["model=m", "prompt=p", f"decoder={decoder}", "decoder.max_new_tokens=96"])
    return build(config["decoder"], Decoder, key="decoder").fit_to(model.spec).generate(model.backbone, prompts)


def figures(found: list[Generation]) -> dict[str, Any]:
    """Over all problems together: tokens per forward pass, and kept drafts per cycle."""
    cycles = [sum(step.kind == "verify" for step in generation.steps) for generation in found]
    kept = sum(n * generation.statistics["acceptance_length"] for n, generation in zip(cycles, found, strict=True))
    tokens = sum(len(generation.tokens) for generation in found)
    return {
        "tokens_per_pass": tokens / sum(generation.forward_passes for generation in found),
        "acceptance_length": kept / sum(cycles),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Both figures over the optimizer steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [row["steps"] for row in rows]
    axes.plot(steps, [row["acceptance_length"] for row in rows], "o-", color="#fd8d3c", label="kept drafts a cycle")
    axes.plot(steps, [row["tokens_per_pass"] for row in rows], "o-", color="#08519c", label="tokens per forward pass")
    axes.axhline(1, color="#999999", linewidth=1, linestyle="--", label="autoregressive")
    axes.set_xscale("log")
    axes.set_xlabel("optimizer steps")
    axes.set_ylim(bottom=0)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
