"""A document of headings, paragraphs, tables and images, written as Markdown or as one HTML file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

NOTHING = "-"
"""Stands in a table cell where there is no value."""
CODE = re.compile("`([^`]+)`")
NUMBER = re.compile(r"[\d.,]+[%x]?|\[[\d., ]+\]|" + NOTHING)

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c1f23; background: #fff; max-width: 76rem; margin: 2rem auto;
       padding: 0 1.5rem; }
h1, h2, h3 { line-height: 1.25; margin: 2.2rem 0 .7rem; }
h1 { margin-top: 1rem; }
h3 { color: #444b54; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid #e2e5e9; text-align: left; vertical-align: top; }
th { background: #f4f6f8; border-bottom: 2px solid #c9ced6; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
tbody tr:hover { background: #f8fafc; }
code { font: .92em ui-monospace, monospace; background: #f1f3f5; padding: .05rem .25rem; border-radius: 3px; }
.warning { background: #fff4d6; border-left: 4px solid #d99a00; padding: .6rem .9rem; font-weight: 600; }
.images { display: flex; flex-wrap: wrap; gap: 1rem; }
.images img { max-width: 100%; height: auto; border: 1px solid #e2e5e9; }
""".strip()


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A heading."""

    text: str
    """Plain text."""
    level: int = 2
    """1, 2 or 3."""


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """A paragraph."""

    text: str
    """Plain text; what stands between backticks is code."""
    warning: bool = False
    """Whether it must not be overlooked."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. Columns that hold nothing but numbers are aligned right."""

    head: tuple[str, ...]
    """Column titles."""
    rows: tuple[tuple[str, ...], ...]
    """Cells: plain text, code between backticks."""

    def numeric(self, column: int) -> bool:
        """Whether every cell of the column is a number or missing, and one is a number."""
        cells = [row[column] for row in self.rows]
        return all(NUMBER.fullmatch(cell) for cell in cells) and any(cell != NOTHING for cell in cells)


@dataclass(frozen=True, kw_only=True)
class Image:
    """A PNG image."""

    name: str
    """Its file name, beside the Markdown."""
    png: bytes
    """Its contents."""
    text: str
    """What it shows, for those who cannot see it."""


Block = Heading | Paragraph | Table | Image


def to_markdown(blocks: Sequence[Block]) -> str:
    """GitHub-flavoured Markdown; images are referred to by name. HTML and links in texts are shown, not taken."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_plain(block.text)}"
    if isinstance(block, Paragraph):
        return _plain(block.text)
    if isinstance(block, Image):
        return f"![{_plain(block.text)}]({block.name})"
    marks = ["---:" if block.numeric(column) else "---" for column in range(len(block.head))]
    lines = [block.head, marks, *block.rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """One line of text whose only markup is its code. Runs of backticks become one: Markdown pairs runs of one length."""
    parts = CODE.split(re.sub("`+", "`", " ".join(text.split())))
    return "".join(_code(part) if place % 2 else _escaped(part) for place, part in enumerate(parts))


def _escaped(text: str) -> str:
    return html.escape(text.replace("\\", "\\\\"), quote=False).replace("](", "]\\(")


def _code(text: str) -> str:
    """Between backticks nothing is escaped: what could end the cell and with it the code is written as HTML."""
    return f"<code>{_escaped(text).replace('|', '&#124;')}</code>" if set(text) & set("<>&|\\") else f"`{text}`"


def to_html(blocks: Sequence[Block], *, title: str) -> str:
    """One HTML file that needs nothing else: style and images are inside it."""
    body: list[str] = []
    in_images = False
    for block in blocks:
        if isinstance(block, Image) != in_images:
            body.append("</div>" if in_images else '<div class="images">')
            in_images = not in_images
        body.append(_html(block))
    if in_images:
        body.append("</div>")
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<title>{html.escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>", "</head>", "<body>", *body, "</body>", "</html>", "",
    ])  # fmt: skip


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{_inline(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        name = ' class="warning"' if block.warning else ""
        return f"<p{name}>{_inline(block.text)}</p>"
    if isinstance(block, Image):
        data = base64.b64encode(block.png).decode()
        return f'<img alt="{html.escape(block.text)}" src="data:image/png;base64,{data}">'
    classes = [' class="number"' if block.numeric(column) else "" for column in range(len(block.head))]

    def row(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}{name}>{_inline(cell)}</{tag}>" for name, cell in zip(classes, cells, strict=True))

    body = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in block.rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{row("th", block.head)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _inline(text: str) -> str:
    return CODE.sub(r"<code>\1</code>", html.escape(text))
