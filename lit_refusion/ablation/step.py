"""One command of an ablation: it is run once, and again only when its settings have changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lit_refusion.config import load_config
from lit_refusion.new_file import write_file


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, and the file that says that it is done.

    Args:
        command: name of the command.
        overrides: its settings.
        marker: written when it has succeeded: the command with all of its settings, resolved.
        config_dir: folder of further YAML groups.
    """

    command: str
    overrides: tuple[str, ...]
    marker: Path
    config_dir: str | None

    @property
    def arguments(self) -> list[str]:
        """What to start it with."""
        options = ["--config-dir", self.config_dir] if self.config_dir else []
        return [self.command, *options, *self.overrides]

    def content(self) -> str:
        """Of the marker.

        Raises:
            UserError: the settings are wrong.
        """
        names = [text for text in self.overrides if not text.lstrip("+").startswith("sweep.")]
        config = load_config(self.command, names, extra_folder=self.config_dir)
        return json.dumps({"command": self.command, "config": config}, indent=2, sort_keys=True) + "\n"

    def is_done(self) -> bool:
        """Whether it has succeeded with these settings."""
        return self.marker.is_file() and self.marker.read_text(encoding="utf-8") == self.content()

    def finish(self) -> None:
        """Note that it has."""
        write_file(self.marker, self.content(), name="out=")
