"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

WIDTH = 160
"""Columns where there is no terminal to ask."""


def table_console() -> Console:
    """As wide as the terminal; wide enough for a table in a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=WIDTH, highlight=False)
