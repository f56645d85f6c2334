"""Parameters that an objective trains beside a frozen model: whose they are, and the folder they are exported to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_refusion.backbone import Backbone
from lit_refusion.errors import UserError, first_line
from lit_refusion.schema import build

SETTINGS, WEIGHTS = "adapter.json", "adapter.safetensors"
SAMPLED_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Base:
    """The frozen model of an adapter.

    Args:
        path: folder or hub id; null for fresh weights, which cannot be loaded again.
        gguf_file: name of a GGUF file inside it.
        mask_token_id: the id of [MASK] that was asked for; null for the one that is found.
        fingerprint: of its weights.
    """

    path: str | None
    gguf_file: str | None
    mask_token_id: int | None
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """What an exported adapter says of itself.

    Args:
        base: the model that it belongs to.
        objective: settings of the objective, which knows where the parameters go.
        spec: the DiffusionSpec.
        prompt_format: how the training prompts were written out.
    """

    base: Base
    objective: dict[str, Any]
    spec: dict[str, Any]
    prompt_format: dict[str, Any]


def is_adapter_folder(path: str | Path) -> bool:
    """Whether an adapter was exported there."""
    return any((Path(path) / name).is_file() for name in (SETTINGS, WEIGHTS))


def trainable(backbone: Backbone) -> dict[str, torch.nn.Parameter]:
    """The parameters that train, by their names in the Hugging Face model."""
    return {name: parameter for name, parameter in backbone.model.named_parameters() if parameter.requires_grad}


def base_fingerprint(backbone: Backbone) -> str | None:
    """The fingerprint of the frozen weights; None where all train."""
    frozen = {name for name, parameter in backbone.model.named_parameters() if not parameter.requires_grad}
    return weights_fingerprint(backbone, frozen) if frozen else None


def weights_fingerprint(backbone: Backbone, names: set[str] | None = None) -> str:
    """A digest of the weights of these names, or of all.

    Of every weight eight rows count, rounded to bf16: cheap for any size, and the same for a model that is loaded in
    another precision. Rows that an embedding table has grown for [MASK] do not count.
    """
    names = set(dict(backbone.model.named_parameters())) if names is None else names
    digest = hashlib.sha256()
    for name, shape, rows in sorted(_sampled(backbone, names), key=lambda item: item[0]):
        digest.update(f"{name}{tuple(shape)}".encode())
        digest.update(rows.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def shape_fingerprint(backbone: Backbone) -> str:
    """A digest of the names and shapes of what trains."""
    shapes = sorted((name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in trainable(backbone).items())
    return hashlib.sha256(repr(shapes).encode()).hexdigest()[:32]


def save_adapter(folder: Path, settings: AdapterSettings, weights: dict[str, Tensor]) -> None:
    """Write weights and settings into a folder that exists."""
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)
    (folder / SETTINGS).write_text(json.dumps(asdict(settings), indent=2) + "\n", encoding="utf-8")


def read_settings(folder: Path) -> AdapterSettings:
    """What the folder says of itself.

    Raises:
        UserError: it cannot be read.
    """
    try:
        found = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / SETTINGS}: {first_line(error)}; export the adapter again") from error
    return build(found, AdapterSettings, key=f"{folder / SETTINGS}")


def load_weights(backbone: Backbone, folder: Path, base: Base, *, origin: str) -> None:
    """Put an adapter's weights into the parameters that its objective has added.

    Args:
        backbone: the base model, prepared by the objective.
        folder: the adapter's.
        base: what the adapter says of its base.
        origin: where the base model came from.

    Raises:
        UserError: another base, or weights that do not fit.
    """
    found = base_fingerprint(backbone)
    if found != base.fingerprint:
        raise UserError(
            f"model={folder}: it was trained on a base with fingerprint {base.fingerprint} ({base.path}), but {origin} "
            f"has {found}; give the right one with base=..."
        )
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS}: {first_line(error)}; export the adapter again") from error
    own = trainable(backbone)
    wrong = [
        name for name in {**own, **weights}
        if name not in own or name not in weights or own[name].shape != weights[name].shape
    ]  # fmt: skip
    if wrong:
        raise UserError(f"{folder / WEIGHTS}: weight {wrong[0]} does not fit its settings; export the adapter again")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def _sampled(backbone: Backbone, names: set[str]) -> Iterator[tuple[str, list[int], Tensor]]:
    """(name, shape, some rows) of these weights, from the files where they are not loaded yet."""
    if not backbone.weight_files:
        tables = [backbone.model.get_input_embeddings().weight, backbone.model.get_output_embeddings().weight]
        for name, parameter in backbone.model.named_parameters():
            if name in names:
                is_table = any(parameter is table for table in tables)
                rows = parameter.detach()[: backbone.num_trained_rows] if is_table else parameter.detach()
                yield name, list(rows.shape), rows[_rows(len(rows))]
        return
    for file in backbone.weight_files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in names.intersection(opened.keys()):
                    part = opened.get_slice(name)
                    shape = part.get_shape()
                    yield name, shape, torch.cat([part[row : row + 1] for row in _rows(shape[0])])
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: cannot read it: {first_line(error)}; fetch the model again") from error


def _rows(length: int) -> list[int]:
    """Some row numbers, first and last among them."""
    return sorted({round(i * (length - 1) / (SAMPLED_ROWS - 1)) for i in range(SAMPLED_ROWS)})
