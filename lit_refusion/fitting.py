"""What has to fit together in a command: decoder and model, model and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_refusion.config import choices, load_config
from lit_refusion.data.shards import Shards
from lit_refusion.decoder import Decoder
from lit_refusion.errors import UserError
from lit_refusion.export import LoadedModel
from lit_refusion.schema import build
from lit_refusion.spec import DiffusionSpec
from lit_refusion.tokenizer import tokenizer_fingerprint


def without_decoder(overrides: Sequence[str]) -> list[str]:
    """The settings but those of a decoder that is not known yet."""
    return [text for text in overrides if not text.lstrip("+").startswith("decoder.")]


def fitted_decoder(
    command: str, overrides: Sequence[str], spec: DiffusionSpec, *, force: bool, config_dir: str | None
) -> tuple[Decoder, dict[str, Any]]:
    """The decoder of a command, fitted to a model, and its plain settings.

    Args:
        command: the command.
        overrides: its settings; without a `decoder=...` the first preset that fits is taken.
        spec: of the model.
        force: decode although the two do not fit.
        config_dir: folder of further YAML groups.
    """
    names_one = any(text.lstrip("+").startswith("decoder=") for text in overrides)
    preset = [] if names_one else [f"decoder={fitting_preset(spec, config_dir)}"]
    settings = load_config(command, [*preset, *overrides], extra_folder=config_dir)["decoder"]
    return build(settings, Decoder, key="decoder").fit_to(spec, force=force), settings


def fitting_preset(spec: DiffusionSpec, config_dir: str | None) -> str:
    """Name of a decoder preset that fits the model: the one called like its objective, else the first."""
    names = choices("decoder", extra_folder=config_dir)
    for name in sorted(names, key=lambda name: name != spec.objective):
        config = load_config("generate", [f"decoder={name}", "model=m", "prompt=p"], extra_folder=config_dir)
        if spec.objective in build(config["decoder"], Decoder, key="decoder").objectives:
            return name
    raise UserError(
        f"no decoder preset fits models trained with '{spec.objective}'; choose one of "
        f"{', '.join(names)} with decoder=... and force=true"
    )


def check_tokenizer(shards: Shards, model: LoadedModel, *, data: str, path: str) -> None:
    """Refuse data that another tokenizer than the model's has prepared.

    Args:
        shards: the data.
        model: the model.
        data: where the data is, for errors.
        path: where the model is, for errors.
    """
    found = tokenizer_fingerprint(model.tokenizer)
    if found != shards.manifest.tokenizer_fingerprint:
        raise UserError(
            f"data.folder={data}: it was prepared with another tokenizer ({shards.manifest.tokenizer_fingerprint}) "
            f"than that of model={path} ({found}); prepare it again with data.tokenizer set to the model"
        )
