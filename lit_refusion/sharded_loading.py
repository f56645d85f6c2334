"""Loading a trained model in shares: no process ever holds more than one layer and one tensor of it.

`skeleton` builds the model without storage; a strategy then calls `materialise` and shards module by module; at last
`stream_weights` reads the safetensors tensor by tensor on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lit_refusion.errors import UserError, first_line
from lit_refusion.model_loading import check_architecture


def weight_files(path_or_id: str) -> list[Path]:
    """The safetensors files of a folder or hub id (downloaded); empty where its weights are in another format."""
    folder = Path(path_or_id)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path_or_id, allow_patterns=["*.safetensors", "*.json"]))
        except Exception as error:  # the hub's errors have no common class
            raise UserError(f"backbone.path={path_or_id}: cannot load the model: {first_line(error)}") from error
    return sorted(folder.glob("*.safetensors"))


def skeleton(path_or_id: str, *, attention: str, trust_remote_code: bool) -> PreTrainedModel:
    """The model with parameters that have no storage (on the meta device), in fp32, and real buffers."""
    try:
        config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)
        check_architecture(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
        for module in model.modules():
            _recompute_buffers(module, config)
    except (OSError, ValueError, ImportError, RuntimeError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"backbone.path={path_or_id}: cannot build the model: {first_line(error)}") from error
    return model


def _recompute_buffers(module: nn.Module, config: Any) -> None:
    """Buffers are no weights (rotary frequencies): make them anew from the config."""
    if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
        fresh = type(module)(config=config)
        for name, buffer in fresh.named_buffers(recurse=False):
            setattr(module, name, buffer)


def is_skeleton(module: nn.Module) -> bool:
    """Whether parameters still lack storage."""
    return any(parameter.is_meta for parameter in module.parameters())


def materialise(module: nn.Module, *, device: torch.device, shared: dict[int, nn.Parameter]) -> None:
    """Give the parameters of a module (and of those inside it) storage, without values.

    Args:
        module: part of a skeleton.
        device: where the storage goes.
        shared: parameters made so far, by the id of their skeleton: tied ones stay tied.
    """
    for part in module.modules():
        materialise_own(part, device=device, shared=shared)


def materialise_own(module: nn.Module, *, device: torch.device, shared: dict[int, nn.Parameter]) -> None:
    """The same for a module's own parameters only."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if id(parameter) not in shared:
                storage = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                shared[id(parameter)] = nn.Parameter(storage, requires_grad=parameter.requires_grad)
            module._parameters[name] = shared[id(parameter)]


def stream_weights(
    model: PreTrainedModel,
    files: list[Path],
    assign: Callable[[nn.Parameter, Tensor | None], None],
    *,
    copies: dict[str, str],
    is_reader: bool,
) -> None:
    """Fill a sharded model, tensor by tensor.

    Args:
        model: the model; every parameter has storage for its share.
        files: its safetensors.
        copies: parameters that start as copies: name -> the weight in the files.
        assign: collective; puts a whole tensor, read on one rank (None on the others), into a parameter's shares.
        is_reader: whether this rank reads.

    Raises:
        UserError: a weight is missing or has another shape, or a file is damaged.
    """
    parameters = dict(model.named_parameters())  # tied ones once
    sources = {name: copies.get(name, name) for name in parameters}
    shapes = {file: _shapes(file) for file in files}
    where = {name: file for file, its_shapes in shapes.items() for name in its_shapes}
    missing = sorted(set(sources.values()) - set(where))
    if missing:
        raise UserError(
            f"{files[0].parent}: {len(missing)} weights are not in its files ({missing[0]}, ...); they would start at "
            "random, so fetch the model again"
        )
    for name, parameter in parameters.items():  # on all ranks: assigning is collective
        source = sources[name]
        found, expected = shapes[where[source]][source], tuple(getattr(parameter, "ds_shape", parameter.shape))
        if found != expected:
            raise UserError(
                f"{where[source]}: weight {source} has shape {found}, the model's has {expected}; fetch it again"
            )
    for name, tensor in _read(sources, where, is_reader=is_reader):
        assign(parameters[name], None if tensor is None else tensor.to(parameters[name].dtype))


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every weight in a file, from its header."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot read it: {first_line(error)}; fetch the model again") from error


def _read(sources: dict[str, str], where: dict[str, Path], *, is_reader: bool) -> Iterator[tuple[str, Tensor | None]]:
    """(name, tensor on the reader) of every parameter, file by file."""
    for file in sorted(set(where.values())):
        names = [name for name, source in sources.items() if where[source] == file]
        if not is_reader:
            yield from ((name, None) for name in names)
            continue
        with safe_open(file, framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(sources[name])
