"""Putting problems to a model: prompts in, scored answers out, one by one as they are finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_refusion.backbone import Backbone
from lit_refusion.chat import PromptFormat
from lit_refusion.decoder import Decoder
from lit_refusion.engine.scheduler import Watch
from lit_refusion.errors import UserError
from lit_refusion.evaluation.problem import Problem
from lit_refusion.evaluation.task import Task
from lit_refusion.generation import Generation


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A scored answer.

    Args:
        id: of the problem.
        prompt_tokens: tokens of the prompt.
        text: the completion, its special tokens left out, behind the task's prefix.
        tokens: kept tokens.
        forward_passes: that the row took part in.
        stop: "eos" or "length".
        is_correct: the scorer's verdict.
        answer: what it took for the answer; None for invalid output.
        note: why it is wrong, where the scorer can say.
        statistics: the decoder's own figures.
        repeats_eos: whether an end-of-sequence token follows the first.
        goes_on: whether text follows the first end-of-sequence token.
    """

    id: str
    prompt_tokens: int
    text: str
    tokens: int
    forward_passes: int
    stop: str
    is_correct: bool
    answer: str | None
    note: str
    statistics: dict[str, float]
    repeats_eos: bool
    goes_on: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Examiner:
    """A task put to a model with a decoder: the same in training, evaluation and comparison.

    Args:
        task: the problems and their scorer.
        decoder: fitted to the model.
        tokenizer: the model's.
        prompt_format: how its prompts are written out.
    """

    task: Task
    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    prompt_format: PromptFormat

    def ask(
        self,
        backbone: Backbone,
        problems: Sequence[Problem],
        *,
        seed: int,
        indices: Sequence[int],
        on_answer: Callable[[Answer, Generation], None],
        on_decoded: Callable[[], None] | None = None,
        goes_on: Callable[[], bool] | None = None,
        agree: Callable[[tuple[int, int]], bool | None] | None = None,
    ) -> None:
        """Decode the problems and score each answer as soon as it is there.

        Args:
            backbone: the model.
            problems: the problems.
            seed: seed of the sampling noise.
            indices: number of each problem in its task, which keys its noise.
            on_answer: gets each answer, in the order in which they end.
            on_decoded: called before an answer is scored, for a clock that leaves scoring out.
            goes_on: see `Watch`.
            agree: see `Watch`.

        Raises:
            UserError: a prompt does not fit into the model's window.
        """
        prompts = self.prompts(backbone, problems)

        def on_done(number: int, generation: Generation) -> None:
            if on_decoded is not None:
                on_decoded()
            on_answer(self.score(problems[number], generation, len(prompts[number])), generation)

        watch = Watch(on_done=on_done, goes_on=goes_on, agree=agree)
        self.decoder.generate(backbone, prompts, seed=seed, indices=indices, watch=watch)

    def prompts(self, backbone: Backbone, problems: Sequence[Problem]) -> list[list[int]]:
        """Token ids of each problem's prompt.

        Raises:
            UserError: a prompt does not fit into the model's window.
        """
        prompts = self.task.prompts(problems, self.tokenizer, self.prompt_format)
        self._check_window(backbone, problems, prompts)
        return prompts

    def score(self, problem: Problem, generation: Generation, prompt_tokens: int) -> Answer:
        """The scored answer that a generation is."""
        text = self.task.prefix + str(self.tokenizer.decode(list(generation.tokens), skip_special_tokens=True))
        verdict = self.task.scorer.score(text, problem)
        eos = self.tokenizer.eos_token_id
        uncut = list(generation.uncut_tokens)
        behind = uncut[uncut.index(eos) + 1 :] if eos in uncut else []
        return Answer(
            id=problem.id,
            prompt_tokens=prompt_tokens,
            text=text,
            tokens=len(generation.tokens),
            forward_passes=generation.forward_passes,
            stop=generation.stop,
            is_correct=verdict.is_correct,
            answer=verdict.answer,
            note=verdict.note,
            statistics=generation.statistics,
            repeats_eos=eos in behind,
            goes_on=any(token != eos for token in behind),
        )

    def _check_window(self, backbone: Backbone, problems: Sequence[Problem], prompts: Sequence[Sequence[int]]) -> None:
        window = backbone.max_length
        for problem, prompt in zip(problems, prompts, strict=True):
            if window is not None and len(prompt) + self.decoder.canvas > window:
                raise UserError(
                    f"task={self.task.name}: problem {problem.id} has {len(prompt)} tokens, which with "
                    f"decoder.max_new_tokens={self.decoder.max_new_tokens} exceed the model's window of {window}; "
                    "lower decoder.max_new_tokens"
                )
