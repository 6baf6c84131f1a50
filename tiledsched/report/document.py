"""A document of headings, paragraphs, tables and charts, written as Markdown or as one HTML file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VEGA_LITE = "6.4"
NOTHING = "-"
"""Stands in a table cell where there is no value."""
CODE = re.compile("`([^`]+)`")
NUMBER = re.compile(r"[\d.,]+[%x]?|\[[\d., ]+\]|" + NOTHING)

STYLE = """
:root { color-scheme: light dark; --text: #1c1f23; --soft: #5a6270; --page: #fff; --line: #dfe3e8; --head: #f4f6f8;
        --warn: #fff4d6; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e7eb; --soft: #a3adba; --page: #16191d; --line: #343a42; --head: #21262c; --warn: #4a3a10; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 72rem; margin: 1.2rem auto;
       padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; margin: 2rem 0 .6rem; }
h1 { margin-top: .6rem; font-size: 1.6rem; }
h3 { color: var(--soft); }
nav { font-size: .87rem; margin: .8rem 0; columns: 16rem; }
nav a { display: block; }
a { color: inherit; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .7rem; margin: 1rem 0; padding: 0; }
.cards div { border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.cards dt { font-size: 1.5rem; font-weight: 650; }
.cards dd { margin: 0; color: var(--soft); font-size: .87rem; }
.scroll, .chart { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--head); white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
code { font: .92em ui-monospace, monospace; background: var(--head); padding: .05rem .25rem; border-radius: 3px; }
.warning { background: var(--warn); border-left: 4px solid #d99a00; padding: .6rem .9rem; font-weight: 600; }
input.filter { font: inherit; width: 18rem; max-width: 100%; padding: .2rem .5rem; margin-top: .4rem; }
details { border-top: 1px solid var(--line); padding: .3rem 0; }
summary { cursor: pointer; font-size: 1.2rem; font-weight: 600; padding: .3rem 0; }
.chart img { max-width: 100%; height: auto; }
""".strip()
DRAWING = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const drawn = () => { const text = getComputedStyle(document.body).color, line = dark.matches ? "#3a4048" : "#e3e6ea";
  for (const one of document.querySelectorAll(".chart[data-spec]")) {
    const spec = JSON.parse(document.getElementById(one.dataset.spec).textContent);
    const words = {labelColor: text, titleColor: text}, lines = {gridColor: line, domainColor: line, tickColor: line};
    const config = {axis: {...words, ...lines}, legend: words, header: words, text: {color: text}, view: {stroke: line}};
    vegaEmbed(one, {...spec, background: null, config}, {actions: {export: true, source: false, compiled: false, editor: false}, renderer: "svg"}); } };
dark.addEventListener("change", drawn); drawn();
""".strip()
SCRIPT = """
for (const input of document.querySelectorAll("input.filter")) input.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\\s+/).filter(Boolean);
  for (const row of input.parentElement.querySelectorAll("tbody tr")) {
    const text = row.textContent.toLowerCase(); row.hidden = !words.every(word => text.includes(word)); } });
const open = () => { const to = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = to && to.closest("details"); if (folded) { folded.open = true; to.scrollIntoView(); } };
addEventListener("hashchange", open); open();
""".strip()
FILTERED = 12
"""Rows from which a table on a page gets a field to filter them by."""
CONFIG = {"background": "white", "font": "DejaVu Sans, sans-serif"}
"""Of a chart as a file."""


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A heading."""

    text: str
    """Plain text."""
    level: int = 2
    """1, 2 or 3."""
    folded: bool = False
    """Of level 2: whether what follows is opened by a click."""


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
class Cards:
    """A few figures, large."""

    items: tuple[tuple[str, str], ...]
    """Each with what it is."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart."""

    name: str
    """Of its files, without their endings."""
    spec: Mapping[str, Any]
    """Vega-Lite."""
    text: str
    """What it shows, for those who cannot see it."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Links to the headings of level 2 that follow."""


Block = Heading | Paragraph | Table | Cards | Chart | Contents


def drawings(blocks: Sequence[Block]) -> dict[str, bytes] | None:
    """Each chart as SVG and PNG, by file name; None where nothing draws them (vl-convert is not installed).

    A chart that cannot be drawn is left out.
    """
    try:
        import vl_convert
    except ImportError:
        return None
    found: dict[str, bytes] = {}
    for one in blocks:
        if isinstance(one, Chart):
            spec = {**one.spec, "config": CONFIG}
            found[f"{one.name}.svg"] = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE).encode()
            found[f"{one.name}.png"] = vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=1.5)
    return found


def to_markdown(blocks: Sequence[Block], drawn: Collection[str] = ()) -> str:
    """GitHub-flavoured Markdown; those charts are shown whose files were drawn. HTML and links in texts are shown, not taken."""
    return "\n\n".join(text for block in blocks if (text := _markdown(block, drawn))) + "\n"


def _markdown(block: Block, drawn: Collection[str]) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_plain(block.text)}"
    if isinstance(block, Paragraph):
        return _plain(block.text)
    if isinstance(block, Cards):
        return "\n".join(f"- **{_plain(value)}**: {_plain(what)}" for value, what in block.items)
    if isinstance(block, Contents):
        return ""
    if isinstance(block, Chart):
        file = f"{block.name}.svg"
        return f"![{_plain(block.text)}]({file})" if file in drawn else ""
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
    """One HTML file that needs nothing else: style, charts and what draws them are inside it."""
    body: list[str] = []
    folded = False
    for block in blocks:
        if isinstance(block, Heading) and block.level < 3 and folded:
            body.append("</details>")
            folded = False
        if isinstance(block, Contents):
            links = (each for each in blocks if isinstance(each, Heading) and each.level == 2)
            items = "".join(f'<a href="#{_anchor(each.text)}">{_inline(each.text)}</a>' for each in links)
            body.append(f"<nav>{items}</nav>")
        elif isinstance(block, Heading) and block.folded:
            body.append(f'<details><summary id="{_anchor(block.text)}">{_inline(block.text)}</summary>')
            folded = True
        else:
            body.append(_html(block))
    if folded:
        body.append("</details>")
    code = _drawing_code() if any(isinstance(block, Chart) for block in blocks) else ""
    return "\n".join([
        "<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<title>{html.escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>", "</head>", "<body>", *body,
        *([f'<script type="module">{code}\n{DRAWING}</script>'] if code else []), f"<script>{SCRIPT}</script>", "</body>", "</html>", "",
    ])  # fmt: skip


def _drawing_code() -> str:
    """What draws charts in a browser; empty where vl-convert, which carries it, is not installed."""
    try:
        import vl_convert
    except ImportError:
        return ""
    return str(vl_convert.javascript_bundle(vl_version=VEGA_LITE)).replace("</script", "<\\/script")


def _anchor(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f'<h{block.level} id="{_anchor(block.text)}">{_inline(block.text)}</h{block.level}>'
    if isinstance(block, Paragraph):
        name = ' class="warning"' if block.warning else ""
        return f"<p{name}>{_inline(block.text)}</p>"
    if isinstance(block, Cards):
        return "\n".join(['<dl class="cards">', *(f"<div><dt>{_inline(value)}</dt><dd>{_inline(what)}</dd></div>"
                                                  for value, what in block.items), "</dl>"])  # fmt: skip
    if isinstance(block, Chart):
        data = json.dumps(block.spec, separators=(",", ":")).replace("<", "\\u003c")
        return (f'<script type="application/json" id="{block.name}">{data}</script>\n'
                f'<div class="chart" data-spec="{block.name}" role="img" aria-label="{html.escape(block.text)}"></div>')  # fmt: skip
    if isinstance(block, Contents):
        return ""
    classes = [' class="number"' if block.numeric(column) else "" for column in range(len(block.head))]

    def row(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}{name}>{_inline(cell)}</{tag}>" for name, cell in zip(classes, cells, strict=True))

    body = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in block.rows)
    field = '<input class="filter" type="search" placeholder="filter rows" aria-label="filter rows">'
    return (
        f'<div class="scroll">{field if len(block.rows) >= FILTERED else ""}<table>\n<thead><tr>{row("th", block.head)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _inline(text: str) -> str:
    return CODE.sub(r"<code>\1</code>", html.escape(text))
