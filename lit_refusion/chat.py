"""From messages to token ids: the same code for training data and for prompts typed by a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from lit_refusion.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How a prompt is written out.

    Args:
        style: "chat" applies the tokenizer's chat template with the generation prompt; "plain" joins the texts.
        template_kwargs: extra variables of the chat template, for example enable_thinking.
    """

    style: Literal["chat", "plain"]
    template_kwargs: dict[str, Any]

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuse a chat style that the tokenizer has no template for."""
        if self.style == "chat" and not tokenizer.chat_template:
            raise UserError(
                "prompt_format.style=chat, but the tokenizer has no chat template; add one or use style=plain"
            )

    def changed(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        style: Literal["chat", "plain"] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> PromptFormat:
        """This format with another style or other variables where they are given, checked against a tokenizer."""
        found = PromptFormat(
            style=style or self.style,
            template_kwargs=self.template_kwargs if template_kwargs is None else template_kwargs,
        )
        found.check(tokenizer)
        return found

    def prompt_text(self, tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]]) -> str:
        """The prompt as one string, ready for the response to follow."""
        if self.style == "plain":
            return "".join(message["content"] for message in messages)
        text = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, **self.template_kwargs
        )
        assert isinstance(text, str), type(text)
        return text

    def encode_prompts(
        self, tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[dict[str, str]]]
    ) -> list[list[int]]:
        """Token ids of each prompt. The template writes its own special tokens, so none are added."""
        return encode([self.prompt_text(tokenizer, messages) for messages in conversations], tokenizer)


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each text, without special tokens."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def encode_responses(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of each response, end-of-sequence appended."""
    return [[*ids, tokenizer.eos_token_id] for ids in encode(texts, tokenizer)]
