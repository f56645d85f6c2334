"""One command of an ablation: it is run once, and again only when its settings have changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lit_refusion.config import load_config
from lit_refusion.fitting import without_decoder
from lit_refusion.new_file import write_file


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command, and the file that says that it is done.

    Args:
        command: name of the command.
        overrides: its settings.
        marker: written when it has succeeded: the command with all of its settings, resolved.
        product: what is there then; if somebody has removed it, it is made again.
        folder: what is removed before something else is made there; None for that of a training, which is left alone.
        source: folder of files that it reads and no other step makes; a change of them counts like one of settings.
        config_dir: folder of further YAML groups.
    """

    command: str
    overrides: tuple[str, ...]
    marker: Path
    product: Path
    folder: Path | None
    source: Path | None
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
        return self._content

    @cached_property
    def _content(self) -> str:
        names = [text for text in self.overrides if not text.lstrip("+").startswith("sweep.")]
        if not any(text.lstrip("+").startswith("decoder=") for text in names):
            names = without_decoder(names)  # those of a preset that is known when the model is
        config = load_config(self.command, names, extra_folder=self.config_dir)
        rest = {"others": others} if (others := [text for text in self.overrides if text not in names]) else {}
        return json.dumps({"command": self.command, "config": config, **rest}, indent=2, sort_keys=True) + "\n"

    def is_done(self) -> bool:
        """Whether it has succeeded with these settings."""
        return self.product.exists() and self._is_noted(self.marker)

    def begin(self) -> None:
        """Note that it is under way; what it has made with other settings is removed.

        An evaluation goes on with the records that an interrupted one has left; an export starts anew.
        """
        changed = any(path.is_file() and not self._is_noted(path) for path in (self.marker, self._begun))
        if changed or self.command == "export":
            self._clear()
        self.marker.unlink(missing_ok=True)
        write_file(self._begun, self.content(), name="out=")

    def finish(self) -> None:
        """Note that it has succeeded, with the settings that it began with."""
        self._begun.replace(self.marker)

    def discard(self) -> None:
        """What it is made of changes: remove what it has made."""
        for path in (self.marker, self._begun):
            path.unlink(missing_ok=True)
        self._clear()

    @property
    def _begun(self) -> Path:
        return self.marker.with_suffix(".begun")

    def _is_noted(self, path: Path) -> bool:
        if not path.is_file() or path.read_text(encoding="utf-8") != self.content():
            return False
        files = [] if self.source is None else self.source.glob("*")
        return all(file.stat().st_mtime_ns <= path.stat().st_mtime_ns for file in files)

    def _clear(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
