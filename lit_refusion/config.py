"""Composing YAML config groups with Hydra's override grammar. The only file that knows Hydra."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from lit_refusion.errors import UserError

COMPOSING = threading.Lock()
"""Hydra's state is global."""


def config_folder() -> Path:
    """The YAML files: `conf/` beside the packages in a checkout, inside the package once installed."""
    here = Path(__file__).resolve().parent
    folders = (here / "conf", here.parent / "conf")
    return next(folder for folder in folders if folder.is_dir())


def load_config(command: str, overrides: Sequence[str], *, extra_folder: str | None = None) -> dict[str, Any]:
    """The resolved config of a command as plain data.

    Args:
        command: name of the YAML at the root of `conf/`.
        overrides: `group=choice` and `key=value`, in Hydra's grammar.
        extra_folder: a folder of the user's own, laid out like `conf/`, searched as well.

    Raises:
        UserError: unknown key, group or choice, bad syntax, missing value.
    """
    overrides = list(overrides)
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise UserError(f"{text}: expected KEY=VALUE or GROUP=CHOICE")
    if extra_folder is not None:
        if not Path(extra_folder).is_dir():
            raise UserError(f"--config-dir {extra_folder}: no such folder")
        overrides.append(f"hydra.searchpath=[file://{Path(extra_folder).resolve()}]")
    try:
        with COMPOSING:
            return _composed(command, overrides)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key}: missing; give {error.full_key}=...") from error
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(_one_line(error, extra_folder)) from error


def _composed(command: str, overrides: list[str]) -> dict[str, Any]:
    GlobalHydra.instance().clear()
    OmegaConf.register_new_resolver("package", _package_path, replace=True)
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            config = compose(command, overrides)
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    finally:
        GlobalHydra.instance().clear()


def _package_path(relative: str) -> str:
    """`${package:PATH}` in YAML: a file that the package carries."""
    return str(Path(__file__).resolve().parent / relative)


def choices(group: str, *, extra_folder: str | None = None) -> list[str]:
    """Names of the YAML files of a config group."""
    folders = [config_folder(), *([Path(extra_folder)] if extra_folder else [])]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _one_line(error: Exception, extra_folder: str | None) -> str:
    """Hydra's message with the reason in front and the remedy behind, on one line."""
    messages = [str(error)]
    cause = error.__cause__
    while cause is not None:
        messages.append(str(cause))
        cause = cause.__cause__
    text = re.sub(r"\s+", " ", " ".join(dict.fromkeys(messages))).strip()
    group = re.search(r"In '[^']*': Could not find '([\w/-]+)/([^']*)'", text) or re.search(
        r"Could not find '([\w/-]+)/([^']*)'", text
    )
    if group:
        name, choice = group.groups()
        known = ", ".join(choices(name, extra_folder=extra_folder)) or "nothing"
        return f"{name}={choice}: no such choice; {name} takes {known}"
    if "multirun" in text:
        return f"{text.split(' ')[0]}: give one value; a list goes in brackets, [a,b]"
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        return f"unknown setting {key.group(1)}; --show-config prints what there is (++KEY=VALUE adds to an open group)"
    return text
