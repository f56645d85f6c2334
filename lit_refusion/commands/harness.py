"""`lit-refusion evaluate harness=TASK`: tasks of lm-eval-harness, with our decoders and likelihoods."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import distributed

from lit_refusion.commands import compose
from lit_refusion.errors import UserError, first_line
from lit_refusion.fitting import without_decoder
from lit_refusion.new_folder import new_folder

SETTING = "harness="
RESULT, SAMPLES = "result.json", "samples_{}.jsonl"


def is_asked(arguments: argparse.Namespace) -> bool:
    """Whether `evaluate` is to run tasks of the harness."""
    return any(text.startswith(SETTING) for text in arguments.overrides)


def run(arguments: argparse.Namespace) -> int:
    """Run the tasks, print the harness's table, and write its result with where it is from."""
    overrides = [_listed(text) for text in arguments.overrides]
    own = {"command": "harness", "overrides": without_decoder(overrides)}
    if compose(argparse.Namespace(**{**vars(arguments), **own})) is None:
        return 0
    try:
        from lm_eval.utils import make_table

        from lit_refusion.evaluation.harness import HarnessModel
    except ImportError as error:
        raise UserError(
            f"harness: it needs an extra ({first_line(error)}): pip install 'lit-refusion[harness]'"
        ) from error
    model = HarnessModel.load(overrides, config_dir=arguments.config_dir)
    settings = model.settings
    if settings.out is None:
        raise UserError("out: missing; give out=FOLDER for the result")
    if not settings.harness:
        raise UserError("harness=[]: give the name of a task")
    tasks = _known_tasks(settings.harness, settings.include)
    place = new_folder(Path(settings.out), setting="out") if model.rank == 0 else nullcontext()
    with place as folder:
        results = _evaluate(model, tasks)
        if results is not None and folder is not None:
            _write(folder, results)
            print(make_table(results))
            print(f"{settings.out}: result and samples")
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return 0


def _evaluate(model: Any, tasks: Any) -> dict[str, Any] | None:
    """The harness's result; None on all ranks but the first."""
    from lm_eval import simple_evaluate

    settings = model.settings
    try:
        results: Any = simple_evaluate(
            model=model,
            tasks=list(settings.harness),
            num_fewshot=settings.num_fewshot,
            limit=settings.limit,
            bootstrap_iters=settings.bootstrap_iters,
            system_instruction=settings.system,
            apply_chat_template=model.is_chat,
            fewshot_as_multiturn=settings.fewshot_as_multiturn,
            gen_kwargs=settings.gen_kwargs or None,
            task_manager=tasks,
            confirm_run_unsafe_code=settings.allow_code_execution,
        )
    except ValueError as error:
        if "confirm_run_unsafe_code" not in str(error):
            raise
        raise UserError(
            f"harness={','.join(settings.harness)}: it runs programs that the model writes, in this very process; "
            "where that may happen, give allow_code_execution=true (the tasks of task=... run them in a sandbox)"
        ) from error
    return results


def _known_tasks(names: Sequence[str], include: str | None) -> Any:
    """The harness's index of tasks; its own ones, which take seconds to find, only where they are asked for.

    Raises:
        UserError: a task that is not there.
    """
    from lm_eval.tasks import TaskManager

    if include is not None:
        if not Path(include).is_dir():
            raise UserError(f"include={include}: no such folder")
        own = TaskManager(include_path=include, include_defaults=False)
        if set(names) <= set(own.all_subtasks):
            return own
    tasks = TaskManager(include_path=include)
    for name in names:
        if not Path(name).is_file() and not any(fnmatch(known, name) for known in tasks.all_tasks):
            raise UserError(
                f"harness={name}: lm-eval has no such task; `lm_eval ls tasks` lists them, include= adds some"
            )
    return tasks


def _listed(text: str) -> str:
    """`harness=a,b` as a list."""
    values = text.removeprefix(SETTING)
    return f"{SETTING}[{values}]" if text.startswith(SETTING) and not values.startswith("[") else text


def _write(folder: Path, results: dict[str, Any]) -> None:
    """The harness's own result, and its samples in a file for each task."""
    from lm_eval.utils import handle_non_serializable

    for task, samples in (results.pop("samples", None) or {}).items():
        with (folder / SAMPLES.format(task)).open("w", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(sample, default=handle_non_serializable, ensure_ascii=False) + "\n")
    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    (folder / RESULT).write_text(text + "\n", encoding="utf-8")
