"""One thin file per command: compose, build, run."""

from __future__ import annotations

import argparse
from typing import Any

from omegaconf import OmegaConf

from lit_refusion.config import load_config


def compose(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The command's config; None where `--show-config` only asked to see it."""
    config = load_config(arguments.command, arguments.overrides, extra_folder=arguments.config_dir)
    if arguments.show_config:
        print(OmegaConf.to_yaml(config), end="")
        return None
    return config
