"""Decoding in validation: what the real decoder makes of the model as it is, on every strategy."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lit_refusion.chat import PromptFormat
from lit_refusion.decoder import Decoder
from lit_refusion.errors import UserError
from lit_refusion.evaluation.answers import Answer, Examiner
from lit_refusion.evaluation.meter import figures
from lit_refusion.evaluation.task import Task
from lit_refusion.generation import Generation
from lit_refusion.new_file import write_file
from lit_refusion.spec import DiffusionSpec

SHOWN = 8
"""Answers that loggers show; the file has all."""


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """One decoder on one task, in validation.

    Args:
        decoder: fitted to the model where its settings leave things open.
        task: the problems and their scorer.
        every_n_steps: optimizer steps between decodings; a multiple of `trainer.validate_every`.
        num_problems: the first problems of the task, over all ranks.
        num_singles: problems of each rank that are decoded once more one at a time, for the speed at batch 1.
        max_seconds: no further problem is started after this time, those that are timed alone included; null for no
            limit. What is under way is finished. What is scored then depends on the machine.
        seed: seed of the sampling noise.
    """

    decoder: Decoder
    task: Task
    every_n_steps: int
    num_problems: int
    num_singles: int
    max_seconds: float | None
    seed: int

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "num_problems"):
            if getattr(self, name) < 1:
                raise UserError(f"decoding.{name}={getattr(self, name)}: must be at least 1")
        if self.num_singles < 0 or self.seed < 0 or (self.max_seconds is not None and self.max_seconds <= 0):
            raise UserError(
                f"decoding.num_singles={self.num_singles}, seed={self.seed}, max_seconds={self.max_seconds}: must not "
                "be negative, max_seconds must be positive or null"
            )


class DecodingCallback(Callback):
    """Decodes problems behind a validation, the last one included, and logs `decode/NAME/FIGURE`.

    Problems are dealt to the ranks. Where ranks share a model out, they run the same forward passes until all are done.
    Weights, random numbers and the training mode stay as they are.

    Args:
        name: of the decoding.
        config: decoder, task, and how much of it.
        tokenizer: the data's.
        prompt_format: how its prompts are written out.
        spec: the model's conventions.
        folder: of the samples, one file a decoding.
    """

    def __init__(
        self,
        name: str,
        config: DecodingConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: PromptFormat,
        spec: DiffusionSpec,
        folder: Path,
    ) -> None:
        self.name, self.config, self.folder = name, config, folder
        self.examiner = Examiner(
            task=config.task,
            decoder=config.decoder.fit_to(spec),
            tokenizer=tokenizer,
            prompt_format=prompt_format,
        )
        self.problems = config.task.problems(config.num_problems)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See that all problems fit, on every rank, before training begins."""
        module: Any = pl_module
        self.examiner.prompts(module.backbone, self.problems)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Decode, where it is time."""
        is_due = trainer.global_step % self.config.every_n_steps == 0 or trainer.global_step >= trainer.max_steps
        if trainer.sanity_checking or not is_due:
            return
        module: Any = pl_module
        mine = list(range(trainer.global_rank, len(self.problems), trainer.world_size))
        together: Callable[[Any], AbstractContextManager[bool]] | None = getattr(trainer.strategy, "decoding", None)
        with trainer.precision_plugin.forward_context(), (together or _alone)(module.backbone) as is_shared:
            agree = _agreement(module.device) if is_shared else None
            start = time.perf_counter()
            answers = self._ask(module.backbone, mine, self.examiner, agree=agree, limit=self.config.max_seconds)
            seconds = time.perf_counter() - start
            singles = mine[: self.config.num_singles]
            single = replace(self.examiner, decoder=replace(self.examiner.decoder, batch_size=1))
            start = time.perf_counter()
            left = None if self.config.max_seconds is None else max(0.0, self.config.max_seconds - seconds)
            alone = self._ask(module.backbone, singles, single, agree=agree, limit=left)
            single_seconds = time.perf_counter() - start
        parts = _gathered((answers, seconds, alone, single_seconds))
        found = [item for part in parts for item in part[0]]
        values = {
            **figures(answer for _, answer, _ in sorted(found, key=lambda item: item[0])),
            **self._speeds(parts),
        }
        module.log_measured({f"decode/{self.name}/{name}": value for name, value in values.items()})
        if trainer.is_global_zero:
            self._write_samples(trainer, sorted(found, key=lambda item: item[0]))

    def _ask(
        self, backbone: Any, numbers: list[int], examiner: Examiner, *, agree: Any, limit: float | None
    ) -> list[tuple[int, Answer, list[Any]]]:
        """(number, answer, step trace) of this rank's problems."""
        stop = time.perf_counter() + (math.inf if limit is None else limit)
        numbered = {self.problems[number].id: number for number in numbers}
        found: list[tuple[int, Answer, list[Any]]] = []

        def on_answer(answer: Answer, generation: Generation) -> None:
            trace = [[step.kind, list(step.committed), list(step.tokens)] for step in generation.steps]
            found.append((numbered[answer.id], answer, trace))

        examiner.ask(
            backbone,
            [self.problems[number] for number in numbers],
            seed=self.config.seed,
            indices=numbers,
            on_answer=on_answer,
            goes_on=lambda: time.perf_counter() < stop,
            agree=agree,
        )
        return found

    def _speeds(self, parts: list[Any]) -> dict[str, float]:
        """Tokens per second of all ranks together in batches, and of one rank at batch 1; scoring is counted."""
        tokens = sum(answer.tokens for found, *_ in parts for _, answer, _ in found)
        batch_size = self.examiner.decoder.batch_size
        speeds = {f"tokens_per_second_batch_{batch_size}": tokens / max(1e-9, *(part[1] for part in parts))}
        singles = [answer for *_, alone, _ in parts for _, answer, _ in alone]
        if singles and batch_size > 1:
            seconds = sum(part[3] for part in parts)
            speeds["tokens_per_second_batch_1"] = sum(answer.tokens for answer in singles) / seconds
            speeds["seconds_per_answer_batch_1"] = seconds / len(singles)
        return speeds

    def _write_samples(self, trainer: L.Trainer, found: list[tuple[int, Answer, list[Any]]]) -> None:
        """All answers with their step traces as JSON lines, and a few in the loggers."""
        path = self.folder / f"{self.name}-{trainer.global_step:08d}.jsonl"
        lines = [
            json.dumps({"question": self.problems[number].question, **answer.to_dict(), "steps": trace})
            for number, answer, trace in found
        ]
        write_file(path, "".join(line + "\n" for line in lines), name="")
        rows = [
            [self.problems[number].question, answer.text, str(answer.is_correct), str(answer.forward_passes)]
            for number, answer, _ in found[:SHOWN]
        ]
        columns = ["question", "answer", "correct", "forward passes"]
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                text = "\n".join(
                    "| " + " | ".join(_cell(cell) for cell in row) + " |" for row in [columns, ["---"] * 4, *rows]
                )
                logger.experiment.add_text(f"decode/{self.name}", text, trainer.global_step)
            elif isinstance(logger, WandbLogger):
                logger.log_table(f"decode/{self.name}", columns=columns, data=rows, step=trainer.global_step)


def check_decodings(
    configs: dict[str, DecodingConfig], *, validate_every: int, has_validation: bool, monitor: str
) -> None:
    """Refuse decodings that would never run, or a figure to choose checkpoints by that is not always there.

    Args:
        configs: by name.
        validate_every: optimizer steps between validations.
        has_validation: whether any example is held out.
        monitor: the figure.

    Raises:
        UserError: names the setting.
    """
    for name, config in configs.items():
        if not has_validation:
            raise UserError(f"decoding.{name}: it runs in validation, and no example is held out; raise "
                            "loader.validation_fraction")  # fmt: skip
        if config.every_n_steps % validate_every:
            raise UserError(
                f"decoding.{name}.every_n_steps={config.every_n_steps}: must be a multiple of "
                f"trainer.validate_every={validate_every}, since it runs in validation"
            )
        if config.task.scorer.executes_code:
            raise UserError(
                f"decoding.{name}.task={config.task.name}: it runs programs that the model writes, which training does "
                "not do; evaluate checkpoints with lit-refusion evaluate allow_code_execution=true"
            )
    kind, _, rest = monitor.partition("/")
    if kind == "decode":
        name = rest.partition("/")[0]
        if name not in configs or configs[name].every_n_steps != validate_every:
            raise UserError(
                f"trainer.monitor={monitor}: needs decoding.{name} with every_n_steps={validate_every}, so that the "
                "figure is there at every validation"
            )


def _alone(backbone: Any) -> AbstractContextManager[bool]:
    """Every rank has the whole model, and decodes at its own pace."""
    return nullcontext(False)


def _agreement(device: torch.device) -> Callable[[tuple[int, int]], bool | None]:
    """See `Watch.agree`: the kind of pass that more rows of all ranks wait for."""

    def agree(counts: tuple[int, int]) -> bool | None:
        waiting: Tensor = torch.tensor(counts, device=device)
        if dist.is_initialized():
            dist.all_reduce(waiting)
        plain, adapted = waiting.tolist()
        return None if plain + adapted == 0 else adapted > plain

    return agree


def _gathered(item: Any) -> list[Any]:
    """The item of every rank, on all ranks."""
    if not dist.is_initialized():
        return [item]
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def _cell(text: str) -> str:
    """Text in a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", "<br>")
