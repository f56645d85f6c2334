"""The report of a comparison as Markdown; the page and the terminal show the same tables."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_refusion.comparison.arm import ArmRun
from lit_refusion.comparison.control import Contrast, Control
from lit_refusion.comparison.figures import Cost, Score, arms, tasks
from lit_refusion.errors import UserError
from lit_refusion.evaluation.problem import Problem
from lit_refusion.evaluation.task import Task
from lit_refusion.schema import build

Rows = list[list[str]]
"""A table; the first row has the headings."""


def write_out(
    *,
    runs: Sequence[ArmRun],
    control: Control,
    scores: Sequence[Score],
    costs: Sequence[Cost],
    throughput: dict[str, Any] | None,
    pictures: Sequence[tuple[Path, str]],
    baseline: str,
    num_samples: int,
    command: Sequence[str],
) -> str:
    """The whole report.

    Args:
        runs: the arms.
        control: what they share.
        scores: by task and arm.
        costs: of the trainings.
        throughput: what was measured; None if nothing was.
        pictures: files beside the report, with captions.
        baseline: the reference arm.
        num_samples: problems whose answers are shown.
        command: what the arms came of; empty where nobody knows.
    """
    sections = [
        f"# Comparison of {', '.join(arms(runs))}",
        *warnings(runs, control),
        *(
            f"## {task}\n\n{markdown(score_rows(scores, task))}\n\n{_reading(scores, task, baseline)}"
            for task in tasks(runs)
        ),
        _throughput_note(throughput),
        *(f"![{caption}]({path.name})\n\n*{caption}*" for path, caption in pictures),
        *([f"## What training took\n\n{markdown(cost_rows(costs))}\n\n{COST_NOTE}"] if costs else []),
        f"## Control\n\n{_control(control, runs, baseline)}",
        *_samples(runs, num_samples),
        *([f"## Command\n\n```\n{shlex.join(command)}\n```"] if command else []),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def warnings(runs: Sequence[ArmRun], control: Control) -> list[str]:
    """What a reader has to know first, as Markdown; nothing where all is well."""
    found = []
    if control.violations:
        lines = [f"> - {item}" for item in control.violations]
        found.append(
            "> **WARNING: this comparison is not controlled.** Beside objective and decoder the arms differ in:\n>\n"
            + "\n".join(lines)
            + "\n>\n> What is meant can be named with `allow=[...]`."
        )
    failed = [run for run in runs if run.failure is not None]
    if failed:
        lines = [f"> - {run.name}: {_one_line(run.failure or '')}" for run in failed]
        found.append("> **WARNING: some arms have no result.**\n>\n" + "\n".join(lines))
    return found


def score_rows(scores: Sequence[Score], task: str) -> Rows:
    """The table of a task."""
    own = [score for score in scores if score.task == task]
    sizes = sorted({size for score in own for size in score.tokens_per_second})
    seeds = any(len(score.seeds) > 1 for score in own)
    head = ["arm", *(["seeds"] if seeds else []), "score (95% interval)", "against baseline", "p", "tokens/pass"]
    rows = [[*head, *(f"tokens/s, batch {size}" for size in sizes), "tokens/answer", "unreadable"]]
    for score in own:
        value, against = score.score, score.against
        rows.append(
            [
                score.arm,
                *([str(len(score.seeds))] if seeds else []),
                f"{value.value:.1%} ({value.low:.1%} to {value.high:.1%})",
                ""
                if against is None
                else f"{100 * against.gain.value:+.1f} ({100 * against.gain.low:+.1f} to "
                f"{100 * against.gain.high:+.1f})",
                "" if against is None else _p_value(against.p_value),
                f"{score.tokens_per_forward:.2f}",
                *(_speed(score, size) for size in sizes),
                f"{score.tokens_per_answer:.1f}",
                f"{score.invalid:.1%}",
            ]
        )
    return rows


def _speed(score: Score, size: int) -> str:
    if size not in score.tokens_per_second:
        return ""
    ratio = f" ({score.speedup[size]:.2f}x)" if size in score.speedup else ""
    return f"{score.tokens_per_second[size]:.0f}{ratio}"


def _p_value(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _reading(scores: Sequence[Score], task: str, baseline: str) -> str:
    own = [score for score in scores if score.task == task]
    tests = sorted({score.against.test for score in own if score.against is not None})
    against = (
        f" Against the baseline (`{baseline}`) in points, on the same problems; p: {', '.join(tests)}." if tests else ""
    )
    passes = " Tokens per pass are all kept tokens / all forward passes, the prompt's included."
    return f"{own[0].problems:,} problems.{against}{passes}"


def _throughput_note(throughput: dict[str, Any] | None) -> str:
    if throughput is None:
        return "Throughput was not measured."
    how, software = throughput["measure"], throughput["software"]
    return (
        f"Tokens per second: one process, arm by arm in turn on the same {how['num_problems']} problems, the median of "
        f"{how['repeats']} rounds, and in brackets the median of the ratios to the baseline within a round. "
        f"{software['machine']}, {software['threads']} thread(s), torch {software['torch']}."
    )


COST_NOTE = (
    "Tokens are those of the examples seen; row tokens those of the rows that the objective makes of them, copies and "
    "learned padding included. FLOPs are estimated from the matrix products (6 x layer parameters x row tokens + 6 x "
    "head parameters x supervised tokens). Time is of training alone; arms that ran side by side share the machine, so "
    "it is no measurement of speed. Memory is the process's peak, libraries included."
)


def cost_rows(costs: Sequence[Cost]) -> Rows:
    """The table of what the trainings took."""
    rows = [
        ["arm", "steps", "tokens", "row tokens", "supervised", "FLOPs", "minutes", "peak memory", "NELBO (nats/token)"]
    ]
    for cost in costs:
        rows.append(
            [
                cost.arm,
                f"{cost.steps:,}",
                *(f"{count:,.0f}" for count in (cost.tokens, cost.row_tokens, cost.supervised_tokens)),
                f"{cost.flops:.2e}",
                f"{cost.seconds / 60:.1f}",
                f"{cost.peak_memory / 1e9:.2f} GB",
                "" if cost.nelbo is None else f"{cost.nelbo:.4f}",
            ]
        )
    return rows


def _control(control: Control, runs: Sequence[ArmRun], baseline: str) -> str:
    parts = [f"The arms differ {'only ' if not control.violations else ''}in: {control.difference}."]
    if control.allowed:
        parts.append("Allowed to differ:\n\n" + "\n".join(f"- {item}" for item in control.allowed))
    parts.append(markdown([["setting", *arms(runs)], *_settings(control.intended, arms(runs), baseline)]))
    if control.shared:
        parts.append("Found equal in all arms:\n\n" + markdown([["what", "value"], *_facts(control.shared)]))
    return "\n\n".join(parts)


def _settings(found: Sequence[Contrast], names: Sequence[str], baseline: str) -> Rows:
    """One row a setting that differs, one column an arm."""
    keys = list(dict.fromkeys(item.key for item in found))
    rows = []
    for key in sorted(keys):
        own = {item.arm: item for item in found if item.key == key}
        reference = next(iter(own.values())).reference
        values = [reference if name == baseline or name not in own else own[name].own for name in names]
        rows.append([_code(key), *("" if value is None else _code(str(value)) for value in values)])
    return rows


def _facts(shared: dict[str, Any]) -> Rows:
    return [[name, f"{value:,}" if isinstance(value, int) else str(value)] for name, value in shared.items()]


def _samples(runs: Sequence[ArmRun], count: int) -> list[str]:
    """Answers of all arms to the same problems, those first that the arms do not agree on."""
    sections = []
    for task in tasks(runs):
        own = list({run.arm: run for run in reversed(runs) if task in run.evaluations}.values())[::-1]
        answers = {run.arm: {record["id"]: record for record in run.evaluations[task].records} for run in own}
        shared = set.intersection(*(set(found) for found in answers.values()))
        questions = {problem.id: problem for problem in _problems(own[0], task)}
        order = sorted(
            (name for name in questions if name in shared),
            key=lambda name: len({found[name]["is_correct"] for found in answers.values()}) == 1,
        )
        for name in order[:count]:
            rows = [["arm", "right", "passes", "answer"]]
            for arm, found in answers.items():
                record = found[name]
                mark = "yes" if record["is_correct"] else "no"
                rows.append([arm, mark, str(record["forward_passes"]), _code(record["text"])])
            problem = questions[name]
            wanted = "" if problem.answer is None else f" (answer: {_code(problem.answer)})"
            sections.append(f"**{task}, {name}** {_code(_one_line(problem.question))}{wanted}\n\n{markdown(rows)}")
    return ["## Answers side by side", *sections] if sections else []


def _problems(run: ArmRun, task: str) -> list[Problem]:
    """The problems of a task, as far as they are still there."""
    result = run.evaluations[task].result
    try:
        return list(build(result["task"], Task, key="task").problems(result["num_problems"]))
    except (UserError, OSError):
        return []


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _code(text: str) -> str:
    """A text of any characters as inline code, on one line."""
    flat = _one_line(text) or " "
    fence = "`"
    while fence in flat:
        fence += "`"
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def markdown(rows: Rows) -> str:
    """A table as Markdown."""
    lines = ["| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
