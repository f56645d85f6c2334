"""Logged figures as one CSV file that survives a resume."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger


class CsvMetrics(Logger):
    """Writes one row per logged step to `metrics.csv`; a column per figure.

    Lightning's CSVLogger deletes the file of the run that is being resumed. Here its rows stay, except those at or
    behind the first step that is logged anew: they belong to the part that is trained again.

    Args:
        path: the file.
    """

    name = "csv"
    version = ""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] | None = None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row; a figure that was never logged before makes the file be written anew with one more column."""
        row: dict[str, Any] = {"step": step or 0, **metrics}
        if self._columns is None:
            self._write([old for old in self._read() if int(old["step"]) < row["step"]], ["step"])
        assert self._columns is not None
        new = [name for name in row if name not in self._columns]
        if new:
            self._write(self._read(), self._columns + sorted(new))
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run folder has the config."""

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _write(self, rows: list[dict[str, str]], columns: list[str]) -> None:
        """Replace the file in one rename."""
        known = dict.fromkeys([*columns, *(rows[0] if rows else [])])
        self._columns = list(known)
        temporary = self.path.with_suffix(".partial")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self.path)
