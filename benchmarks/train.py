"""How fast a step of ReFusion trains beside the official code: `python -m benchmarks.train --data FILE.jsonl`.

All contenders train a fresh Qwen3 (width 128, 4 layers, fp32) of the same weights on the same documents, on one thread
each, in turn within each repeat; for each size of the vocabulary. Speed counts the documents' own tokens, not padding.
`--loss` compares the kernels of head and loss, `--loader` the loader's speed with training's, and `--profile` shows
where a step of every objective spends its time, all without the official code.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import reference, train_loader, train_loss, train_profile
from benchmarks.figures import environment, existing, ratio, shown, spread, table, turns, write
from benchmarks.worker import Worker
from lit_refusion.chat import PromptFormat
from lit_refusion.tokenizer import load_tokenizer

TOKENIZER = Path(__file__).parent.parent / "lit_refusion" / "demo" / "tokenizer"
OFFICIAL = "official, padded"
LAYOUTS = {"padded, as given": ("padded", False), "padded": ("padded", True), "packed": ("packed", True)}
"""Layout, and whether the step's documents are dealt to micro-batches by length as the loader does."""
TITLES = (
    "contender", "tokens/s", "tokens/CPU-s", "ratio to the first", "by CPU time", "padding", "extra memory (MB)",
    "as a share", "loss",
)  # fmt: skip
Document = dict[str, list[int]]


def main(arguments: list[str] | None = None) -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=existing, required=True, help="JSON lines with query and response")
    parser.add_argument("--tokenizer", default=str(TOKENIZER), help="ids beyond a vocabulary are folded into it")
    parser.add_argument("--vocab", default="512,50000,151936", help="sizes of the vocabulary")
    parser.add_argument("--documents", type=int, default=64, help="of an optimizer step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--row-length", type=int, default=512, help="tokens of a packed row at most")
    parser.add_argument("--kernels", default="chunked,torch")
    parser.add_argument(
        "--checkpointing", action="store_true", help="gradient checkpointing, as the official script has"
    )
    parser.add_argument("--repeats", type=int, default=3)
    reference.add_arguments(parser)
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--loader", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", help="JSON file to write")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started, results = environment(), {}
    parts = {"loss": train_loss.measure, "loader": train_loader.measure, "profile": train_profile.measure}
    chosen = {name: part for name, part in parts.items() if getattr(asked, name)} or {"training": measure}
    documents = read_documents(asked)
    for name, part in chosen.items():
        results[name] = part(asked, documents)
    write(asked.out, results, started)


def read_documents(asked: argparse.Namespace) -> list[Document]:
    """Prompt and response ids of some documents, drawn at random."""
    records = [json.loads(line) for line in Path(asked.data).read_text(encoding="utf-8").split("\n") if line]
    chosen = np.random.default_rng(0).permutation(len(records))[: asked.documents]
    tokenizer = load_tokenizer(asked.tokenizer)
    messages = [[{"role": "user", "content": records[i]["query"]}] for i in chosen]
    prompts = PromptFormat(style="chat", template_kwargs={}).encode_prompts(tokenizer, messages)
    answers = [tokenizer(records[i]["response"], add_special_tokens=False)["input_ids"] for i in chosen]
    return [
        {"prompt_ids": list(prompt), "response_ids": [*answer, tokenizer.eos_token_id]}
        for prompt, answer in zip(prompts, answers)
    ]


def folded(documents: list[Document], vocab_size: int) -> list[Document]:
    """The same lengths with ids of a smaller vocabulary, whose last id is [MASK]."""
    return [{name: [i % (vocab_size - 1) for i in ids] for name, ids in item.items()} for item in documents]


@contextmanager
def model_folder(asked: argparse.Namespace, vocab_size: int) -> Iterator[Path]:
    """A fresh model that both implementations can read."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=asked.width,
        num_hidden_layers=asked.layers,
        num_attention_heads=asked.width // 32,
        num_key_value_heads=asked.width // 32,
        head_dim=32,
        intermediate_size=3 * asked.width,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    config.mask_token_id = vocab_size - 1
    with tempfile.TemporaryDirectory(prefix="benchmark-train-") as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        path = Path(folder) / "config.json"
        fields = json.loads(path.read_text(encoding="utf-8"))
        # Where older versions of transformers look for it.
        fields["rope_theta"] = config.rope_parameters["rope_theta"]
        path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        yield Path(folder)


def measure(asked: argparse.Namespace, documents: list[Document]) -> list[dict[str, Any]]:
    """The table of every vocabulary."""
    num_tokens = sum(len(ids) for item in documents for ids in item.values())
    print(
        f"## Training, width {asked.width}, {asked.layers} layers, steps of {len(documents)} documents "
        f"({num_tokens:,} tokens) in micro-batches of {asked.micro_batch}"
    )
    return [one_vocabulary(asked, documents, int(size)) for size in asked.vocab.split(",")]


def one_vocabulary(asked: argparse.Namespace, documents: list[Document], vocab_size: int) -> dict[str, Any]:
    """All contenders with one model."""
    documents = folded(documents, vocab_size)
    with model_folder(asked, vocab_size) as model, ExitStack() as workers:
        contenders = {name: workers.enter_context(make()) for name, make in makers(asked, model).items()}
        is_compared = OFFICIAL in contenders  # with the weights that they start from
        equality = compare_losses(contenders, documents[: asked.micro_batch], model) if is_compared else {}
        requests = {name: request(asked, name, documents) for name in contenders}
        baselines = {name: begin(contenders[name], requests[name], documents) for name in contenders}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for repeat in range(asked.repeats):
            for name in turns(list(contenders), repeat):
                found[name].append(contenders[name].ask("train", **requests[name]))
        memory = {name: worker.ask("extra_memory") for name, worker in contenders.items()}
    rows = figures(found, memory, documents)
    for row in rows:
        row["first_step_memory"] = baselines[row["contender"]]
    report(vocab_size, rows, equality)
    return {"vocabulary": vocab_size, "contenders": rows, "equality": equality}


def makers(asked: argparse.Namespace, model: Path) -> dict[str, Any]:
    """What starts the process of each contender, its model loaded."""

    def official() -> Worker:
        worker = reference.start(asked, model)
        assert worker is not None
        if asked.checkpointing:
            worker.ask("enable_checkpointing")
        return worker

    def ours(kernel: str) -> Worker:
        worker = Worker("benchmarks.train_worker")
        worker.ask("load", path=str(model), kernel=kernel, checkpointing=asked.checkpointing)
        return worker

    found: dict[str, Any] = {OFFICIAL: official} if asked.reference else {}
    kernels = asked.kernels.split(",")
    for layout in LAYOUTS:
        found[f"ours, {layout}, {kernels[0]}"] = lambda: ours(kernels[0])
    for kernel in kernels[1:]:
        for layout in ("padded", "packed"):
            found[f"ours, {layout}, {kernel}"] = lambda kernel=kernel: ours(kernel)
    return found


def request(asked: argparse.Namespace, name: str, documents: list[Document]) -> dict[str, Any]:
    """What a contender is asked to train on."""
    size = asked.micro_batch
    if name == OFFICIAL:
        return {"micro_batches": [documents[i : i + size] for i in range(0, len(documents), size)], "seed": 0}
    return step(asked, name.removeprefix("ours, ").rpartition(", ")[0], documents)


def step(asked: argparse.Namespace, layout: str, documents: list[Document]) -> dict[str, Any]:
    """The same for ours."""
    name, is_dealt = LAYOUTS[layout]
    loader = {"layout": name, "micro_batch_size": asked.micro_batch, "max_row_length": asked.row_length}
    return {"documents": documents, "loader": loader, "is_dealt": is_dealt, "seed": 0}


def begin(worker: Worker, asked: dict[str, Any], documents: list[Document]) -> int:
    """Make the optimizer and its states with a step on one document; then count memory."""
    worker.ask("begin_training", learning_rate=1e-4)
    if "micro_batches" in asked:
        worker.ask("train", micro_batches=[documents[:1]], seed=0)
    else:
        loader = {**asked["loader"], "micro_batch_size": 1}
        worker.ask("train", **{**asked, "documents": documents[:1], "loader": loader})
    found = worker.ask("extra_memory")
    worker.ask("forget_peak")
    return found


def compare_losses(contenders: dict[str, Worker], documents: list[Document], model: Path) -> dict[str, Any]:
    """Loss and gradient norm of the official code and of ours on the rows that the official code made."""
    rows = contenders[OFFICIAL].ask("loss_and_rows", documents=documents, seed=1)
    path = model / "rows.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    found = {OFFICIAL: {name: rows[name] for name in ("loss", "gradient_norm")}}
    for name, worker in contenders.items():
        if name.startswith("ours, packed"):
            found[name.replace("packed, ", "")] = worker.ask("loss_of_rows", path=str(path))
    return found


def figures(
    found: dict[str, list[dict[str, float]]], memory: dict[str, int], documents: list[Document]
) -> list[dict[str, Any]]:
    """Speeds and memory of each contender; ratios are to the first."""
    num_tokens = sum(len(ids) for item in documents for ids in item.values())
    kinds = ("seconds", "cpu_seconds")
    speeds, per_cpu = (
        {name: [num_tokens / run[kind] for run in runs] for name, runs in found.items()} for kind in kinds
    )
    first = next(iter(found))
    return [
        {
            "contender": name,
            "tokens_per_second": spread(speeds[name]),
            "tokens_per_cpu_second": spread(per_cpu[name]),
            "ratio": ratio(speeds[name], speeds[first]),
            "cpu_ratio": ratio(per_cpu[name], per_cpu[first]),
            "padding": 1 - num_tokens / runs[0]["places"],
            "extra_memory": memory[name],
            "memory_share": memory[name] / max(1, memory[first]),
            "loss": runs[0]["loss"],
        }
        for name, runs in found.items()
    ]


def report(vocab_size: int, rows: list[dict[str, Any]], equality: dict[str, Any]) -> None:
    """Print."""
    print(f"\n### Vocabulary {vocab_size:,}\n")
    print(table(TITLES, [_cells(row) for row in rows]))
    if equality:
        expected = equality[OFFICIAL]
        for name, values in equality.items():
            errors = {key: abs(values[key] / expected[key] - 1) for key in values}
            shown_errors = ", ".join(f"{key} {values[key]:.6f} (off by {errors[key]:.1e})" for key in values)
            print(f"\nOn the official rows of one micro-batch, {name}: {shown_errors}", end="")
        print(flush=True)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["contender"], shown(row["tokens_per_second"]), shown(row["tokens_per_cpu_second"]),
        shown(row["ratio"], ".2f"), shown(row["cpu_ratio"], ".2f"), f"{row['padding']:.0%}",
        f"{row['extra_memory'] / 1e6:,.0f}", f"{row['memory_share']:.2f}", f"{row['loss']:.3f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
