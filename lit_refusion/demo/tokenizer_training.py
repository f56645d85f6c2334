"""Trains small byte-level tokenizers: the demo's, the folder ``tokenizer/`` next to this file, and ones like it."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lit_refusion.demo.word_problems import generate

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # ids 0, 1, 2, 3
WORDS = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(folder: str | Path, *, num_problems: int = 5000, seed: int = 0) -> None:
    """Trains the demo's tokenizer on the training problems.

    Args:
        folder: where to save; made if missing.
        num_problems: number of training problems to learn the merges from.
        seed: seed of those problems. Equal arguments give equal files.
    """
    texts = ["user\n{query}", "assistant\n{response}"]
    problems = generate(num_problems, seed=seed)
    train_bpe(folder, (text.format(**problem) for problem in problems for text in texts), vocab_size=VOCAB_SIZE)


def train_bpe(folder: str | Path, texts: Iterable[str], *, vocab_size: int) -> None:
    """Trains a byte-level BPE tokenizer with a chat template and [MASK], and saves it as a Hugging Face folder.

    A number below 100 is one token, the space before it included, so its length shifts no later token: a slot that is
    decoded out of order has to know where it stands. Digit by digit, the slot-wise loss after 60 s was twice as high.

    Args:
        folder: where to save; made if missing.
        texts: to learn the merges from. Equal texts give equal files.
        vocab_size: entries, special tokens included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        mask_token="<|mask|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder), save_jinja_files=False)
