"""`lit-refusion analyze dependency`: how much masked tokens depend on each other, over their distance."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_refusion.analysis.dependency import Dependency
from lit_refusion.analysis.dependency_report import draw_report, table, write_report
from lit_refusion.commands import compose, counting
from lit_refusion.config import choices, load_config
from lit_refusion.data.remote import CacheConfig
from lit_refusion.data.shards import Shards
from lit_refusion.errors import UserError
from lit_refusion.examples import Example
from lit_refusion.export import DType, LoadedModel, load_model
from lit_refusion.fitting import check_tokenizer
from lit_refusion.new_folder import new_folder
from lit_refusion.objective import Objective
from lit_refusion.schema import build
from lit_refusion.spec import DiffusionSpec

STUDIES = ("dependency",)


@dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """What to study.

    Args:
        model: exported folder, or any Hugging Face causal LM with `objective`.
        base: where the base model of an adapter is; null for where it was in training.
        objective: how rows are laid out; null for the preset that the model was trained with.
        data: folder of prepared data, or a URL of one.
        cache: where the files of a URL are kept.
        out: folder of the result; must not exist.
        limit: examples, spread evenly over the data; null for all.
        ratios: shares of the response that are hidden.
        num_pairs: pairs of an example at each ratio.
        max_distance: largest distance of a pair, in tokens.
        run_length: tokens that are hidden together; null for the model's smallest slot, or 1.
        batch_size: rows of a forward pass.
        log_x: whether the plot's distances are on a logarithmic scale.
        seed: of the choice of tokens.
        device: auto, cpu, cuda, ...
        dtype: auto, float32 or bfloat16.
        trust_remote_code: run code that comes with the model.
    """

    model: str
    base: str | None
    objective: Objective | None
    data: str
    cache: CacheConfig
    out: str
    limit: int | None
    ratios: tuple[float, ...]
    num_pairs: int
    max_distance: int
    run_length: int | None
    batch_size: int
    log_x: bool
    seed: int
    device: str
    dtype: DType
    trust_remote_code: bool

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit={self.limit}: must be at least 1, or null for all examples")

    def study(self, spec: DiffusionSpec | None) -> Dependency:
        """The study of a model with these conventions."""
        smallest = min(spec.slot_sizes, default=1) if spec is not None else 1
        return Dependency(
            ratios=self.ratios,
            num_pairs=self.num_pairs,
            max_distance=self.max_distance,
            run_length=smallest if self.run_length is None else self.run_length,
            batch_size=self.batch_size,
            seed=self.seed,
        )


def run(arguments: argparse.Namespace) -> int:
    """Measure, write JSON, CSV and a plot, and print a table."""
    if arguments.overrides[:1] != [STUDIES[0]]:
        given = next((text for text in arguments.overrides if "=" not in text), "nothing")
        raise UserError(f"{given}: give what to study first: lit-refusion analyze {STUDIES[0]} ...")
    arguments.overrides = arguments.overrides[1:]
    config = compose(arguments)
    if config is None:
        return 0
    settings = build({"objective": None, **config, "data": config["data"]["folder"]}, AnalyzeConfig)
    settings.study(None)  # what is wrong in it shows before the model is loaded
    shards = Shards(settings.data, cache=settings.cache)
    model = load_model(
        settings.model,
        base=settings.base,
        objective=settings.objective,
        device=settings.device,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
    )
    objective = _objective(settings, model, arguments.config_dir)
    check_tokenizer(shards, model, data=settings.data, path=settings.model)
    examples = _examples(settings, model, shards)
    study = settings.study(model.spec)
    with new_folder(Path(settings.out), setting="out") as folder:
        with counting("examples", len(examples)) as on_progress:
            points = study.measure(model.backbone, objective, examples, on_progress=on_progress)
        write_report(folder, points, _identity(settings, study, model, shards, num_examples=len(examples)))
        picture = draw_report(folder, points, log_x=settings.log_x)
    console = Console()
    console.print(table(points))
    what = "dependency.json, dependency.csv" + (" and dependency.png" if picture else "")
    console.print(f"{settings.out}: {what} of {len(examples)} examples", markup=False, soft_wrap=True)
    if picture is None:
        console.print("the plot needs an extra: pip install 'lit-refusion[plots]'", markup=False)
    return 0


def _objective(settings: AnalyzeConfig, model: LoadedModel, config_dir: str | None) -> Objective:
    """The objective that was given, or a preset with the model's conventions."""
    found = settings.objective or fitting_objective(model.spec, config_dir)
    own, theirs = found.spec(model.backbone.mask_token_id), model.spec
    for name in ("shift", "attention"):
        if getattr(own, name) != getattr(theirs, name):
            raise UserError(
                f"objective: its rows have {name}={getattr(own, name)}, but model={settings.model} was trained with "
                f"{getattr(theirs, name)}; give the objective's settings of the training"
            )
    return found


def fitting_objective(spec: DiffusionSpec, config_dir: str | None) -> Objective:
    """The first preset of the objective that the model names.

    Raises:
        UserError: there is none.
    """
    names = choices("objective", extra_folder=config_dir)
    for name in names:
        needed = [f"objective={name}", "model=m", "out=o", "data.folder=f"]
        config = load_config("analyze", needed, extra_folder=config_dir)
        found = build(config["objective"], Objective, key="objective")
        if found.name == spec.objective:
            return found
    raise UserError(
        f"no objective preset is called '{spec.objective}', as the model's; choose one of {', '.join(names)}"
    )


def _examples(settings: AnalyzeConfig, model: LoadedModel, shards: Shards) -> list[Example]:
    """Examples that fit into the model's window and have two response tokens, spread evenly over the data."""
    count = len(shards) if settings.limit is None else min(settings.limit, len(shards))
    window = model.backbone.max_length
    found = [shards[number * len(shards) // count] for number in range(count)]
    fits = [len(example.response_ids) > 1 and (window is None or len(example) <= window) for example in found]
    usable = [example for example, is_usable in zip(found, fits) if is_usable]
    if not usable:
        raise UserError(
            f"data.folder={settings.data}: none of {count} examples has two response tokens and fits into the model's "
            f"window of {window}; raise limit, or prepare other data"
        )
    return usable


def _identity(
    settings: AnalyzeConfig, study: Dependency, model: LoadedModel, shards: Shards, *, num_examples: int
) -> dict[str, Any]:
    """What the result says of its origin."""
    return {
        "model": settings.model,
        "spec": model.spec.to_dict(),
        "data": settings.data,
        "data_fingerprint": shards.manifest.content_fingerprint,
        "dtype": str(model.backbone.model.dtype).removeprefix("torch."),
        "num_examples": num_examples,
        **asdict(study),
        "ratios": list(study.ratios),
    }
