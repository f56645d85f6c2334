"""What a run was made of, as a small file that a comparison reads: fingerprints instead of promises."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_refusion.adapter import weights_fingerprint
from lit_refusion.backbone import Backbone
from lit_refusion.data.loader import DataModule
from lit_refusion.errors import UserError
from lit_refusion.new_file import write_file
from lit_refusion.run_folder import LAST, checkpoint_path, is_whole, step_of

ORIGIN = "origin.json"
SAMPLED_STEPS = 2000
"""Steps whose examples are fingerprinted, evenly spaced; all steps of a shorter run."""


def initial(backbone: Backbone) -> dict[str, Any]:
    """Fingerprint and size of the weights that a run starts from, before an objective adds any."""
    parameters = list(backbone.parameters())
    tables = {id(backbone.model.get_input_embeddings().weight), id(backbone.model.get_output_embeddings().weight)}
    head = backbone.model.get_output_embeddings().weight
    return {
        "initial_weights": weights_fingerprint(backbone),
        "parameters": sum(_count(p) for p in parameters),
        "layer_parameters": sum(_count(p) for p in parameters if id(p) not in tables),
        "head_parameters": _count(head),
    }


def _count(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def order(data: DataModule, max_steps: int) -> dict[str, Any]:
    """Fingerprint of which examples are seen in which order, and how much text that is.

    The tokens are those of the examples as they are stored, whatever rows an objective makes of them. Of a long run
    evenly spaced steps count, and the tokens are scaled up from them.
    """
    steps = np.unique(np.linspace(0, max_steps - 1, min(max_steps, SAMPLED_STEPS)).round().astype(np.int64))
    digest, tokens, responses = hashlib.sha256(), 0, 0
    for step in steps.tolist():
        visits = data.plan.step(step)
        numbers = np.array([visit.index for visit in visits], np.int64)
        digest.update(np.array([step], np.int64).tobytes() + data.shards.keys[numbers].tobytes())
        tokens += int(data.shards.lengths(numbers).sum())
        responses += int(data.shards.response_lengths(numbers).sum())
    scale = max_steps / len(steps)
    return {
        "example_order": digest.hexdigest()[:32],
        "steps": max_steps,
        "examples": max_steps * data.plan.global_batch_size,
        "tokens": round(tokens * scale),
        "response_tokens": round(responses * scale),
        "held_out": hashlib.sha256(data.shards.keys[data.validation_indices].tobytes()).hexdigest()[:32],
    }


def software() -> dict[str, str]:
    """Versions and machine."""
    packages = ("lit-refusion", "torch", "lightning", "transformers")
    return {
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {machine_name()}",
        "threads": str(torch.get_num_threads()),
    }


def machine_name() -> str:
    """The first GPU, else the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def write_origin(run: Path, content: dict[str, Any]) -> None:
    """Write the file into a run's folder."""
    write_file(run / ORIGIN, json.dumps(content, indent=2) + "\n", name="run=")


def read_origin(run: Path) -> dict[str, Any]:
    """What `write_origin` wrote.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        return json.loads((run / ORIGIN).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"{run}: it has no {ORIGIN}, so nobody can tell what it was made of; give the folder of a training run "
            "that this version has made"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{run / ORIGIN}: cannot read it ({error}); start the run again with resume=auto") from error


def has_ended(run: Path) -> bool:
    """Whether a training has reached its last step."""
    last = checkpoint_path(run, LAST)
    if not (run / ORIGIN).is_file() or not last.exists() or not is_whole(last):
        return False
    return step_of(last) >= read_origin(run)["steps"]
