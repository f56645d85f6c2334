"""`lit-refusion evaluate`: a model on a task, with the decoder that is used in earnest."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from lit_refusion.backbone import ForwardChoice
from lit_refusion.chat import PromptFormat
from lit_refusion.commands import compose, counting, harness
from lit_refusion.console import table_console
from lit_refusion.decoder import Decoder
from lit_refusion.engine.forward import runs_lean
from lit_refusion.errors import UserError
from lit_refusion.evaluation.answers import Examiner
from lit_refusion.evaluation.evaluate import Evaluation
from lit_refusion.evaluation.problem import Problem
from lit_refusion.evaluation.sandbox import describe
from lit_refusion.evaluation.sweep import draw_sweep, write_sweep
from lit_refusion.evaluation.task import Task, fingerprint
from lit_refusion.export import DType, LoadedModel, load_model
from lit_refusion.fitting import fitted_decoder, without_decoder
from lit_refusion.objective import Objective
from lit_refusion.schema import build

SWEEP = "sweep."


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What to evaluate, and how.

    Args:
        model: exported folder, or any Hugging Face causal LM with `objective`.
        base: where the base model of an adapter is; null for where it was in training.
        task: the problems and their scorer.
        out: folder of the result; an evaluation that was interrupted goes on in it.
        limit: the first problems only; null for all.
        num_singles: problems that are decoded once more one at a time, for the speed at batch 1.
        decoder: settings of the decoder; null takes the first preset that fits the model.
        objective: settings of the objective of a model that does not say how it was trained.
        seed: seed of the sampling noise.
        device: auto, cpu, cuda, ...
        dtype: auto, float32 or bfloat16.
        forward: what runs the model: "module" is Hugging Face's own code, "lean" does the same with less overhead,
            "auto" takes lean where it can be had.
        force: decode although decoder and model do not fit.
        trust_remote_code: run code that comes with the model.
        prompt_style: "chat" or "plain"; null for the way that the model was trained.
        template_kwargs: variables of the chat template; null for those that the model was trained with.
        allow_code_execution: run programs that the model writes, for tasks that test them.
        sweep: settings of the decoder to a list of values; every combination is evaluated.
    """

    model: str
    base: str | None
    task: Task
    out: str
    limit: int | None
    num_singles: int
    decoder: Decoder | None
    objective: Objective | None
    seed: int
    device: str
    dtype: DType
    forward: ForwardChoice
    force: bool
    trust_remote_code: bool
    prompt_style: Literal["chat", "plain"] | None
    template_kwargs: dict[str, Any] | None
    allow_code_execution: bool
    sweep: dict[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        if (self.limit is not None and self.limit < 1) or self.num_singles < 0 or self.seed < 0:
            raise UserError(
                f"limit={self.limit}, num_singles={self.num_singles}, seed={self.seed}: limit must be at least 1, the "
                "others must not be negative"
            )
        if self.task.scorer.executes_code and not self.allow_code_execution:
            raise UserError(
                f"task={self.task.name}: it runs programs that the model writes; where that may happen, give "
                "allow_code_execution=true"
            )


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, and print a table; a sweep prints one row for each combination."""
    if harness.is_asked(arguments):
        return harness.run(arguments)
    overrides = [_listed(text) for text in arguments.overrides]
    arguments.overrides = without_decoder(overrides)
    config = compose(arguments)
    if config is None:
        return 0
    settings = build({"decoder": None, "objective": None, **config}, EvaluateConfig)
    problems = settings.task.problems(settings.limit)
    model = load_model(
        settings.model,
        base=settings.base,
        objective=settings.objective,
        device=settings.device,
        dtype=settings.dtype,
        forward=settings.forward,
        trust_remote_code=settings.trust_remote_code,
    )
    decoder, decoder_settings = fitted_decoder(
        "evaluate", overrides, model.spec, force=settings.force, config_dir=arguments.config_dir
    )
    if settings.task.scorer.executes_code:
        print(f"programs run with: {describe()}")
    prompt_format = model.prompt_format.changed(
        model.tokenizer, style=settings.prompt_style, template_kwargs=settings.template_kwargs
    )
    identity = _identity(settings, config, model, prompt_format, problems)
    combinations = [
        (values, _changed(decoder_settings, values, model, force=settings.force))
        for values in _combinations(settings, decoder)
    ]  # all of them before the first is run
    results = []
    for values, own in combinations:
        evaluation = Evaluation(
            examiner=Examiner(
                task=settings.task,
                decoder=own,
                tokenizer=model.tokenizer,
                prompt_format=prompt_format,
            ),
            backbone=model.backbone,
            problems=problems,
            seed=settings.seed,
            num_singles=min(settings.num_singles, len(problems)),
            identity={**identity, "decoder": {**decoder_settings, **values}},
        )
        folder = Path(settings.out, *[",".join(f"{name}={value}" for name, value in values.items())])
        with counting(settings.task.name, len(problems)) as on_progress:
            results.append(evaluation.run(folder, on_progress=on_progress))
    _report(settings, results)
    return 0


def _report(settings: EvaluateConfig, results: list[dict[str, Any]]) -> None:
    """Print a table; write and draw a sweep."""
    swept, out = list(settings.sweep), Path(settings.out)
    table_console().print(_table(results, swept))
    if swept:
        write_sweep(out, swept, results)
        for picture in draw_sweep(out, swept, results):
            print(picture)
    print(f"{out}: records, settings and result of {len(results)} evaluation{'s' * (len(results) > 1)}")


def _listed(text: str) -> str:
    """`sweep.X=1,2,3` as a list that is added to the empty group."""
    name, _, values = text.partition("=")
    if not name.lstrip("+").startswith(SWEEP):
        return text
    return f"+{name.lstrip('+')}={values if values.startswith('[') else f'[{values}]'}"


def _combinations(settings: EvaluateConfig, decoder: Decoder) -> list[dict[str, Any]]:
    """The settings of each evaluation; one without any where nothing is swept."""
    names = {field.name for field in fields(decoder)}
    for name, values in settings.sweep.items():
        if name not in names:
            raise UserError(f"{SWEEP}{name}: {type(decoder).__name__} has no such setting")
        if not values:
            raise UserError(f"{SWEEP}{name}: give at least one value")
    return [dict(zip(settings.sweep, values, strict=True)) for values in product(*settings.sweep.values())]


def _changed(settings: dict[str, Any], values: dict[str, Any], model: LoadedModel, *, force: bool) -> Decoder:
    """The decoder with some settings changed, checked like any other."""
    return build({**settings, **values}, Decoder, key="decoder").fit_to(model.spec, force=force)


def _identity(
    settings: EvaluateConfig,
    config: dict[str, Any],
    model: LoadedModel,
    prompt_format: PromptFormat,
    problems: list[Problem],
) -> dict[str, Any]:
    """What the result says of its origin; only an evaluation of the same may go on in its folder."""
    return {
        **model.identity(settings.model),
        "forward": "lean" if runs_lean(model.backbone) else "module",
        "task": config["task"],
        "problems_fingerprint": fingerprint(problems),
        "num_problems": len(problems),
        "prompt_format": asdict(prompt_format),
        "seed": settings.seed,
        "num_singles": settings.num_singles,
    }


def _table(results: list[dict[str, Any]], swept: list[str]) -> Table:
    """One row an evaluation."""
    speeds = sorted({name for result in results for name in result["figures"] if name.startswith("tokens_per_second")})
    names = [name.replace("tokens_per_second_", "tokens/s, ").replace("_", " ") for name in speeds]
    table = Table(*swept, "problems", "accuracy", "95% interval", "invalid", "no EOS", "tokens/pass", *names)
    for result in results:
        found = result["figures"]
        table.add_row(
            *(str(result["decoder"][name]) for name in swept),
            f"{found['problems']:.0f}",
            f"{found['accuracy']:.1%}",
            f"{found['accuracy_low']:.1%} to {found['accuracy_high']:.1%}",
            f"{found['invalid']:.1%}",
            f"{found['no_eos']:.1%}",
            f"{found['tokens_per_forward']:.2f}",
            *(f"{found[name]:.1f}" if name in found else "" for name in speeds),
        )
    return table
