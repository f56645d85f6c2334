"""Loading a tokenizer and telling two of them apart."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_refusion.errors import UserError, first_line


def load_tokenizer(
    path_or_id: str | Path, *, gguf_file: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id; it must have an end-of-sequence token."""
    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path_or_id), trust_remote_code=trust_remote_code, **extra)
    except Exception as error:  # the Rust tokenizers raise bare Exceptions
        raise UserError(
            f"tokenizer={path_or_id}: cannot load it ({first_line(error)}); give a folder or a hub id"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer={path_or_id}: it has no eos_token; set one in tokenizer_config.json")
    return tokenizer


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what turns text into ids: vocabulary with added tokens, normalisation, chat template, special ids.

    The name and the folder do not count, so a copied tokenizer has the same fingerprint.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {}
    # Truncation and padding are settings of a call, not of the tokenizer.
    rules = {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
    content = {
        "vocab": sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]),
        "rules": rules,
        "chat_template": tokenizer.chat_template,
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def num_token_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows that an embedding table needs: the largest id plus one; ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1
