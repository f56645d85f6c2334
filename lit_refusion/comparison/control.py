"""Whether a comparison is controlled: what two arms do not share, and which of it was meant."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lit_refusion.comparison.arm import ArmRun
from lit_refusion.resume import flat

IGNORED = (
    "run", "resume", "dry_run", "cache", "launcher", "trainer.progress", "trainer.loggers", "decoding"
)  # fmt: skip
"""Settings of training that change where and how it runs, and nothing that it comes to."""

FACTS = {
    "data": "training data",
    "held_out": "held-out examples",
    "tokenizer": "tokenizer",
    "initial_weights": "initial weights",
    "example_order": "order of the examples",
    "steps": "optimizer steps",
    "examples": "examples seen",
    "tokens": "token budget: tokens of the examples seen",
    "parameters": "parameters",
    "software": "software and machine",
}
"""What every run records of its start, with its name in the report."""

EVALUATION = ("task", "problems_fingerprint", "num_problems", "prompt_format", "dtype", "device")
INTENDED = ("objective", "decoder")
BUDGET = "max_new_tokens"
"""Setting of a decoder that belongs to the conditions and not to the method."""


@dataclass(frozen=True)
class Contrast:
    """Something that an arm does not share with the reference arm.

    Args:
        arm: name of the arm.
        key: dotted name of the setting, or of the fact.
        reference: the reference arm's value.
        own: the arm's.
        owner: whose the reference value is.
    """

    arm: str
    key: str
    reference: Any
    own: Any
    owner: str = "the baseline"

    def __str__(self) -> str:
        title = f" ({FACTS[self.key]})" if self.key in FACTS else ""
        return f"{self.key}{title}: {_short(self.reference)} in {self.owner}, {_short(self.own)} in {self.arm}"


@dataclass(frozen=True)
class Control:
    """What the arms of a comparison share.

    Args:
        intended: differences in objective and decoder.
        allowed: others that `allow` names.
        violations: all others.
        shared: facts that all arms have in common, by name, with the first seed's value.
    """

    intended: tuple[Contrast, ...]
    allowed: tuple[Contrast, ...]
    violations: tuple[Contrast, ...]
    shared: dict[str, Any]

    @property
    def difference(self) -> str:
        """What the arms are for, in words: "objective, decoder"."""
        return ", ".join(dict.fromkeys(item.key.split(".")[0] for item in self.intended)) or "nothing"


def check(runs: Sequence[ArmRun], *, baseline: str, allow: Sequence[str]) -> Control:
    """Compare every arm with the baseline, seed by seed.

    Arms that failed are left out; where the baseline has, the first of the others stands in for it.

    Args:
        runs: all arms and seeds.
        baseline: name of the reference arm.
        allow: dotted names of settings or facts, or groups of them, that may differ.
    """
    found: list[Contrast] = []
    whole = [run for run in runs if run.failure is None]
    seeds = sorted({run.seed for run in runs if run.arm == baseline})
    for run in whole:
        if run.seed not in seeds:
            found.append(Contrast(run.arm, "seed", seeds, run.seed))
            continue
        pair = [other for other in whole if other.seed == run.seed]
        reference = next((other for other in pair if other.arm == baseline), pair[0])
        owner = "the baseline" if reference.arm == baseline else reference.arm
        for key, (theirs, own) in differences(reference, run).items():
            found.append(Contrast(run.arm, key, theirs, own, owner))
    for run in whole:
        if run.origin is not None and run.last_step < run.origin["steps"]:
            found.append(Contrast(run.name, "last_step", run.origin["steps"], run.last_step, "its settings"))
    found = list(dict.fromkeys(_hashable(item) for item in found))
    intended = tuple(item for item in found if _is_below(item.key, INTENDED) and not item.key.endswith(BUDGET))
    rest = [item for item in found if item not in intended]
    allowed = tuple(item for item in rest if _is_below(item.key, allow))
    violations = tuple(item for item in rest if item not in allowed)
    return Control(intended, allowed, violations, _shared(runs))


def differences(reference: ArmRun, run: ArmRun) -> dict[str, tuple[Any, Any]]:
    """What two runs do not share: name -> (reference's, run's)."""
    tasks = reference.evaluations.keys() & run.evaluations.keys()
    theirs, own = conditions(reference, tasks), conditions(run, tasks)
    pairs = {name: (theirs.get(name), own.get(name)) for name in {**theirs, **own}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def training_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a training that change what it comes to, by dotted name."""
    settings = {key.lstrip("."): value for key, value in flat("", config).items()}
    return {name: value for name, value in settings.items() if not _is_below(name, IGNORED)}


def conditions(run: ArmRun, tasks: Collection[str]) -> dict[str, Any]:
    """Everything that a run was made with, and evaluated with on these tasks, as dotted names."""
    found = training_settings(run.config or {})
    for name in FACTS:
        found |= flat(name, (run.origin or {}).get(name))
    for task in tasks:
        evaluated = run.evaluations[task]
        found |= flat(f"decoder.{task}", evaluated.result["decoder"])
        for name in EVALUATION:
            found |= flat(f"evaluation.{task}.{name}", evaluated.result[name])
        if run.run is None:
            found["model"] = evaluated.result["weights_fingerprint"]
    found["tasks"] = ", ".join(sorted(run.evaluations))
    return found


def _shared(runs: Sequence[ArmRun]) -> dict[str, Any]:
    """Facts that are equal in all runs of a seed that were trained."""
    origins = [(run.seed, run.origin) for run in runs if run.origin is not None]
    first = dict(reversed(origins))  # of each seed
    found = {}
    for name, title in FACTS.items():
        values = [origin[name] for origin in first.values()]
        if origins and name != "software" and all(origin[name] == first[seed][name] for seed, origin in origins):
            is_one = all(value == values[0] for value in values)
            found[title] = values[0] if is_one else "another for each seed, the same in all arms"
    return found


def _is_below(key: str, groups: Sequence[str]) -> bool:
    return any(key == group or key.startswith(f"{group}.") for group in groups)


def _hashable(item: Contrast) -> Contrast:
    return replace(item, reference=_frozen(item.reference), own=_frozen(item.own))


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, Mapping):
        return tuple(sorted((name, _frozen(item)) for name, item in value.items()))
    return value


def _short(value: Any) -> str:
    text = "none" if value is None else " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
