"""From the folders of runs to a report that says what was equal, what differs, and how sure one can be."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lit_refusion.comparison.arm import ArmRun, read_all, read_plan
from lit_refusion.comparison.control import Control, check
from lit_refusion.comparison.figures import Score, arms, costs, plain, scores, tasks
from lit_refusion.comparison.page import render
from lit_refusion.comparison.plots import draw
from lit_refusion.comparison.report import score_rows, warnings, write_out
from lit_refusion.comparison.throughput import THROUGHPUT, MeasureConfig, measure
from lit_refusion.console import table_console
from lit_refusion.errors import UserError
from lit_refusion.new_file import write_file


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What to compare.

    Args:
        runs: folders of ablations, of their arms, or of training runs with their evaluations below `evaluations/TASK`.
        out: folder of the report; what is there is replaced.
        baseline: the arm that the others are measured against; null for the first.
        allow: dotted names of settings or facts in which arms may differ, or groups of them.
        measure: how throughput is measured.
        num_samples: problems whose answers are shown side by side.
        seed: of the bootstrap.
    """

    runs: tuple[str, ...]
    out: str
    baseline: str | None
    allow: tuple[str, ...]
    measure: MeasureConfig
    num_samples: int
    seed: int

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("compare: give the folders of the runs: lit-refusion compare RUN RUN ... out=FOLDER")
        if self.num_samples < 0 or self.seed < 0:
            raise UserError(f"num_samples={self.num_samples}, seed={self.seed}: must not be negative")


@dataclass(frozen=True)
class Outcome:
    """What came of a comparison.

    Args:
        is_controlled: whether the arms differ in nothing that was not meant.
        has_all: whether every arm has a result.
    """

    is_controlled: bool
    has_all: bool


def compare(config: CompareConfig) -> Outcome:
    """Write `report.md`, `report.html`, `results.json`, `scores.csv` and the pictures, and print the tables.

    Raises:
        UserError: a folder cannot be read, or nothing in it has been evaluated.
    """
    runs = read_all(config.runs)
    names = arms(runs)
    baseline = config.baseline or names[0]
    if baseline not in names:
        raise UserError(f"baseline={baseline}: no such arm; there are {', '.join(names)}")
    if not any(run.evaluations for run in runs):
        failed = [f"{run.name}: {run.failure}" for run in runs if run.failure is not None]
        hint = f"every arm failed ({'; '.join(failed)})" if failed else "run lit-refusion evaluate first"
        raise UserError(f"{', '.join(config.runs)}: nothing has been evaluated there; {hint}")
    out = Path(config.out)
    control = check(runs, baseline=baseline, allow=config.allow)
    throughput = measure(runs, config.measure, path=out / THROUGHPUT, told=lambda text: print(text, flush=True))
    rows = scores(runs, baseline=baseline, throughput=throughput, seed=config.seed)
    spent = costs(runs)
    pictures = draw(out, runs, rows, _setting(control, names, baseline))
    report = write_out(
        runs=runs,
        control=control,
        scores=rows,
        costs=spent,
        throughput=throughput,
        pictures=pictures,
        baseline=baseline,
        num_samples=config.num_samples,
        command=_command(config.runs),
    )
    write_file(out / "report.md", report, name="out=")
    write_file(out / "report.html", render(report, folder=out, title=", ".join(names)), name="out=")
    write_file(out / "scores.csv", _csv(rows), name="out=")
    results = {
        "baseline": baseline,
        "scores": plain(rows),
        "costs": plain(spent),
        "control": asdict(control),
        "failures": {run.name: run.failure for run in runs if run.failure is not None},
        "throughput": throughput,
    }
    write_file(out / "results.json", json.dumps(results, indent=2, default=str) + "\n", name="out=")
    _show(runs, control, rows, out)
    return Outcome(not control.violations, all(run.failure is None for run in runs))


def _setting(control: Control, names: Sequence[str], baseline: str) -> tuple[str, dict[str, float]] | None:
    """The one setting, a number, that all arms of a study differ in."""
    varied: dict[str, dict[str, Any]] = {}
    for item in (*control.intended, *control.allowed):
        key = item.key.rpartition(".")[2]
        varied.setdefault(key, {baseline: item.reference})[item.arm] = item.own
    if len(varied) != 1 or len(names) < 3:
        return None
    [(key, values)] = varied.items()
    is_number = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values.values())
    if set(values) != set(names) or not is_number:
        return None
    return key.replace("_", " "), {arm: float(value) for arm, value in values.items()}


def _command(paths: Sequence[str]) -> list[str]:
    """The command of an ablation, from its folder."""
    plan = read_plan(Path(paths[0])) if len(paths) == 1 else None
    return plan["command"] if plan else []


def _csv(rows: Sequence[Score]) -> str:
    """One row an arm and task, with plain numbers."""
    text = io.StringIO()
    sizes = sorted({size for row in rows for size in row.tokens_per_second})
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["task", "arm", "seeds", "problems", "score", "score_low", "score_high", "gain", "gain_low", "gain_high",
         "p_value", "tokens_per_forward", "tokens_per_answer", "forward_passes_per_answer", "invalid",
         *(f"tokens_per_second_batch_{size}" for size in sizes), *(f"speedup_batch_{size}" for size in sizes)]
    )  # fmt: skip
    for row in rows:
        against = row.against
        gain = ["", "", "", ""]
        if against is not None:
            gain = [*map(str, asdict(against.gain).values()), str(against.p_value)]
        writer.writerow(
            [row.task, row.arm, len(row.seeds), row.problems, *asdict(row.score).values(), *gain,
             row.tokens_per_forward, row.tokens_per_answer, row.forward_passes_per_answer, row.invalid,
             *(row.tokens_per_second.get(size, "") for size in sizes), *(row.speedup.get(size, "") for size in sizes)]
        )  # fmt: skip
    return text.getvalue()


def _show(runs: Sequence[ArmRun], control: Control, rows: Sequence[Score], out: Path) -> None:
    """The tables in the terminal, what has to be known in front of them."""
    console = table_console()
    for text in warnings(runs, control):
        lines = [line.removeprefix(">").strip().replace("**", "") for line in text.split("\n")]
        console.print("\n".join(line for line in lines if line), style="bold red", markup=False)
    for task in tasks(runs):
        head, *body = score_rows(rows, task)
        table = Table(title=task)
        for number, name in enumerate(head):
            table.add_column(name, justify="right" if number else "left")
        for row in body:
            table.add_row(*row)
        console.print(table)
    if not control.violations:
        console.print(f"controlled: the arms differ only in {control.difference}")
    console.print(f"report: {out / 'report.html'} and {out / 'report.md'}", soft_wrap=True)
