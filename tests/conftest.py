"""Fixtures: tiny tokenizers, backbones and data; everything offline and on the CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_refusion.backbone import Backbone
from lit_refusion.data.sources import Source

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

REPOSITORY = Path(__file__).resolve().parent.parent
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES = {
    name: {
        "model_type": name,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "tie_word_embeddings": name == "qwen3",
        "initializer_range": 0.2,
    }
    for name in ("qwen3", "llama")
}


def shared_folder(*parts: str) -> Path:
    """A folder of reference data beside the repository; tests that need it skip where it is absent."""
    path = Path(os.environ.get("LIT_REFUSION_SHARED", REPOSITORY.parent / "shared")).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"reference data {path} is not there (set LIT_REFUSION_SHARED to its folder)")
    return path


def make_tokenizer(*, mask_token: str | None = "<|mask|>") -> PreTrainedTokenizerBase:
    """A byte-level tokenizer: 256 bytes, a few merges, ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + ([mask_token] if mask_token else [])
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["What is 1 + 2? The answer is 3."] * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", mask_token=mask_token
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_source(*files: Path | str, **changes: Any) -> Source:
    """A source named "mine" of these files, which keeps everything, with changes."""
    values: dict[str, Any] = {
        "name": "mine",
        "files": tuple(map(str, files)),
        "hub": None,
        "subsets": (),
        "split": "train",
        "query": "query",
        "response": "response",
        "messages": "messages",
        "weight": 1.0,
        "max_examples": None,
        "max_prompt_tokens": None,
        "max_tokens": None,
        "min_response_tokens": 1,
        "deduplicate": False,
    }
    return Source(**{**values, **changes})


def random_prompts(count: int, *, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts of ordinary token ids, of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 250, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def confident_backbone(tokenizer: PreTrainedTokenizerBase, *, architecture: str = "qwen3", seed: int = 0) -> Backbone:
    """Random weights with sharpened logits, so that thresholds divide the candidates."""
    backbone = Backbone.from_architecture(ARCHITECTURES[architecture], tokenizer=tokenizer, seed=seed)
    with torch.no_grad():
        backbone.model.get_output_embeddings().weight.mul_(3.0)
    return backbone


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(params=sorted(ARCHITECTURES))
def backbone(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> Backbone:
    """A tiny backbone with random weights, once per architecture."""
    return Backbone.from_architecture(ARCHITECTURES[request.param], tokenizer=tokenizer, seed=1)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A small JSONL file of additions."""
    path = tmp_path / "records.jsonl"
    lines = [
        {"query": f"What is {a} + {b}?", "response": f"The answer is {a + b}."} for a in range(12) for b in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
