"""A model for lm-eval-harness: its requests, answered by the project's own decoders and likelihoods.

Importing this module registers the model as `lit_refusion`; it needs the extra `harness`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, distributed
from tqdm import tqdm

from lit_refusion.adapter import weights_fingerprint
from lit_refusion.chat import encode
from lit_refusion.config import load_config
from lit_refusion.decoder import Decoder
from lit_refusion.engine.scheduler import Watch
from lit_refusion.errors import UserError
from lit_refusion.evaluation.harness_config import HarnessConfig, join_processes
from lit_refusion.evaluation.harness_requests import Question, cut, request_keys, scored
from lit_refusion.evaluation.likelihood import Likelihood, check_conventions, negative_log_likelihood
from lit_refusion.export import LoadedModel, load_model
from lit_refusion.fitting import fitted_decoder, without_decoder
from lit_refusion.generation import Generation
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.tokenizer import tokenizer_fingerprint

LOGGER = logging.getLogger("lit_refusion")
DEFAULT_WINDOW = 2048
"""Tokens of a row where the model does not say."""


@register_model("lit_refusion")
class HarnessModel(TemplateLM):
    """Generation by a decoder, likelihoods by `negative_log_likelihood`.

    Noise is keyed by the tokens of a request, so an answer depends neither on the order of the requests nor on their
    neighbours. Text is encoded without special tokens, as in training; an empty context is one end-of-sequence (or
    beginning-of-sequence) token. The decoder's own settings decide on sampling, and its budget holds where a task has
    none. Answers are cut at a task's stop strings when they are finished: decoding itself ends at the end-of-sequence
    token or the budget, since parallel methods do not write from left to right.

    A likelihood that is a bound counts as the log-likelihood, and is never called greedy: which of the orders would be
    the decoder's is not decided by it.

    Args:
        loaded: model and tokenizer.
        decoder: fitted to the model.
        objective: what the model was trained with; None where only text is asked for.
        settings: of the draws; see `HarnessConfig`.
        decoder_settings: plain settings of the decoder, for the result.
        rank: number of this process.
        world_size: processes that share the requests.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        decoder: Decoder,
        objective: Objective | None,
        settings: HarnessConfig,
        decoder_settings: dict[str, Any],
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__()
        self.backbone, self.spec = loaded.backbone, loaded.spec
        self.tokenizer: Any = loaded.tokenizer
        self.prompt_format, self.settings = loaded.prompt_format, settings
        self.decoder, self.decoder_settings, self.objective = decoder, decoder_settings, objective
        self._rank, self._world_size, self._device = rank, world_size, loaded.backbone.device
        if objective is not None:
            check_conventions(objective, loaded.spec, model=settings.model)

    @classmethod
    def load(cls, overrides: Sequence[str], *, config_dir: str | None = None) -> HarnessModel:
        """From the settings of `conf/harness.yaml`, as on the command line; joins the other processes, if any."""
        config = load_config("harness", without_decoder(overrides), extra_folder=config_dir)
        settings = build({"decoder": None, "objective": None, **config}, HarnessConfig)
        rank, world_size, device = join_processes(settings.device)
        loaded = load_model(
            settings.model,
            base=settings.base,
            objective=settings.objective,
            device=device,
            dtype=settings.dtype,
            trust_remote_code=settings.trust_remote_code,
        )
        decoder, decoder_settings = fitted_decoder(
            "harness", overrides, loaded.spec, force=settings.force, config_dir=config_dir
        )
        return cls(
            loaded,
            decoder=decoder,
            objective=settings.objective,
            settings=settings,
            decoder_settings=decoder_settings,
            rank=rank,
            world_size=world_size,
        )

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> HarnessModel:
        """From the harness's own arguments: `model=FOLDER,decoder=...` with the names of `conf/harness.yaml`."""
        extra = additional_config or {}
        overrides = [f"{name}={'null' if value is None else value}" for name, value in arg_dict.items()]
        if extra.get("device") is not None:
            overrides.append(f"device={extra['device']}")
        if str(extra.get("batch_size") or "").isdigit():
            overrides.append(f"++decoder.batch_size={extra['batch_size']}")
        return cls.load(overrides)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> HarnessModel:
        """The same from `name=value,name=value`."""
        pairs = dict(text.split("=", 1) for text in arg_string.split(",") if "=" in text)
        return cls.create_from_arg_obj(pairs, additional_config)

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence id."""
        return self.backbone.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        return self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.eot_token_id

    @property
    def max_length(self) -> int:
        """The model's window, in tokens."""
        return self.backbone.max_length or DEFAULT_WINDOW

    @property
    def max_gen_toks(self) -> int:
        """Budget of tasks that have none."""
        return self.decoder.max_new_tokens

    @property
    def is_chat(self) -> bool:
        """Whether prompts go through the chat template."""
        return (self.settings.prompt_style or self.prompt_format.style) == "chat"

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests; tokenizers of one name may differ."""
        return tokenizer_fingerprint(self.tokenizer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one text, with the variables of the template that the model was trained with."""
        given = self.settings.template_kwargs
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **(self.prompt_format.template_kwargs if given is None else given),
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids, without special tokens unless they are in the text: as in training."""
        return encode([string], self.tokenizer)[0]

    # --- text ---

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers, in the order of the requests; (context, settings) each."""
        questions = [self._question(*request.args) for request in requests]
        keys = request_keys([question.prompt for question in questions])
        groups: dict[int, list[int]] = defaultdict(list)
        for number in sorted(range(len(questions)), key=lambda number: -len(questions[number].prompt)):
            groups[questions[number].budget].append(number)
        texts = [""] * len(questions)
        hidden = disable_tqdm or self.rank != 0
        with tqdm(total=len(questions), disable=hidden, desc="generate_until") as bar:
            for budget, numbers in groups.items():

                def on_done(place: int, generation: Generation, numbers: list[int] = numbers) -> None:
                    number = numbers[place]
                    texts[number] = cut(generation.tokens, questions[number].until, self.tokenizer)
                    self.cache_hook.add_partial("generate_until", requests[number].args, texts[number])
                    bar.update(1)

                replace(self.decoder, max_new_tokens=budget).generate(
                    self.backbone,
                    [questions[number].prompt for number in numbers],
                    seed=self.settings.seed,
                    indices=[keys[number] for number in numbers],
                    watch=Watch(on_done=on_done),
                )
        return texts

    def _question(self, context: str, gen_kwargs: Mapping[str, Any]) -> Question:
        """What is asked for; a context that is too long loses its beginning, as in the harness's own models."""
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks))
        if wanted["do_sample"] and getattr(self.decoder, "temperature", 0.0) == 0:
            LOGGER.warning("a task asks for sampling, but decoder.temperature=0 and decides; set it on the decoder")
        budget = wanted["max_gen_toks"]
        room = self.max_length - replace(self.decoder, max_new_tokens=budget).canvas
        if room < 1:
            raise UserError(
                f"max_gen_toks={budget}: it leaves no room for a prompt in the model's window of {self.max_length}; "
                "give gen_kwargs.max_gen_toks=..."
            )
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        if len(prompt) > room:
            LOGGER.warning("a context of %d tokens is cut to its last %d", len(prompt), room)
        return Question(prompt=prompt[-room:], budget=budget, until=tuple(filter(None, wanted["until"])))

    # --- likelihoods ---

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is the greedy continuation) of each (texts, context ids, continuation ids)."""
        found = self._measure([(context, text) for _, context, text in requests], disable_tqdm)
        answers = [(-one.nats, bool(one.is_greedy)) for one in found]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text after an end-of-sequence token, in windows that share as little as possible."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, 1)
            own = [make_disjoint_window(pair) for pair in pairs]
            windows += own
            owners += [number] * len(own)
        totals = [0.0] * len(requests)
        for owner, one in zip(owners, self._measure(windows, disable_tqdm), strict=True):
            totals[owner] -= one.nats
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _measure(self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[Likelihood]:
        """Of each (context, continuation); a context that is too long loses its beginning."""
        if self.objective is None:
            raise UserError(
                "objective: missing; tasks that ask for likelihoods need the one that the model was trained with, "
                "objective=NAME"
            )
        examples = [scored(context or [self.prefix_token_id], text, window=self.max_length) for context, text in pairs]
        measured = [example for example in examples if len(example.response_ids)]
        with tqdm(total=len(measured), disable=disable_tqdm or self.rank != 0, desc="loglikelihood") as bar:
            found = negative_log_likelihood(
                self.backbone,
                self.objective,
                measured,
                num_draws=self.settings.num_draws,
                seed=self.settings.seed,
                max_tokens_per_batch=self.settings.max_tokens_per_batch,
                check_greedy=True,
                on_progress=lambda done: bar.update(done - bar.n),
            )
        empty = Likelihood(index=0, nats=0.0, standard_error=0.0, tokens=0, num_draws=0, is_greedy=True)
        rest = iter(found)
        return [next(rest) if len(example.response_ids) else empty for example in examples]

    # --- processes and records ---

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, one after the other."""
        if self.world_size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        distributed.all_gather(parts, tensor.contiguous())
        return torch.cat([part.reshape(-1) if part.ndim == 0 else part for part in parts])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all ranks, on one of them."""
        if self.world_size == 1:
            return [obj]
        found: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        distributed.gather_object(obj, found, dst=dst)
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            distributed.barrier()

    def get_model_info(self) -> dict[str, Any]:
        """What the result says of its origin."""
        objective = self.objective
        likelihood = {"kind": objective.likelihood_kind, "is": objective.likelihood_meaning} if objective else None
        return {
            "path": self.settings.model,
            "weights_fingerprint": weights_fingerprint(self.backbone),
            "tokenizer_fingerprint": tokenizer_fingerprint(self.tokenizer),
            "spec": self.spec.to_dict(),
            "decoder": self.decoder_settings,
            "objective": repr(objective) if objective else None,
            "likelihood": likelihood,
            "num_draws": self.settings.num_draws,
            "seed": self.settings.seed,
            "model_dtype": str(self.backbone.model.dtype).removeprefix("torch."),
        }
