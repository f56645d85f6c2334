"""The report as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

from markdown_it import MarkdownIt

STYLE = """
:root { color-scheme: light dark; --line: #c8c8c8; --soft: #f4f4f4; --warn: #b00020; --warn-soft: #fdecee; }
@media (prefers-color-scheme: dark) {
  :root { --line: #4a4a4a; --soft: #262626; --warn: #ff8a80; --warn-soft: #3a1d20; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
th { background: var(--soft); }
code, pre { background: var(--soft); font-size: 0.85rem; overflow-wrap: anywhere; white-space: pre-wrap; }
pre { padding: 0.6rem; }
img { max-width: 100%; background: white; }
blockquote { border-left: 0.4rem solid var(--warn); background: var(--warn-soft); margin: 1rem 0; padding: 0.4rem; }
"""
PICTURE = re.compile(r"[\w.-]+\.png")


class _Reader(MarkdownIt):
    """Takes no link and no picture but those in a folder: text of a model or of a log may hold others."""

    def __init__(self, folder: Path) -> None:
        super().__init__("commonmark", {"html": False})
        self.folder = folder
        self.enable("table")

    def validateLink(self, url: str) -> bool:  # noqa: N802
        return PICTURE.fullmatch(url) is not None and (self.folder / url).is_file()


def render(markdown: str, *, folder: Path, title: str) -> str:
    """A report as a page.

    Args:
        markdown: the report; HTML in it is shown, not obeyed.
        folder: where its pictures are.
        title: of the page.
    """
    body = _Reader(folder).render(markdown)
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    body = re.sub(f'src="({PICTURE.pattern})"', lambda found: f'src="{_data(folder / found.group(1))}"', body)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        f'content="width=device-width">\n<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"{body}</body>\n</html>\n"
    )


def _data(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
