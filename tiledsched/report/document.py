"""A document of headings, paragraphs, tables and charts, written as Markdown or as one HTML file."""

from __future__ import annotations

import html
import itertools
import json
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiledsched.core.errors import ConfigError
from tiledsched.core.extras import installing
from tiledsched.core.files import printable, write_whole
from tiledsched.core.text import NOTHING
from tiledsched.report.vega import titled

VEGA_LITE = "6.4"
CODE = re.compile("`([^`]+)`")
NUMBER = re.compile(r"[\d.,]+[%x]?|\[[\d., ]+\]|" + NOTHING)

PAPER_WIDTH = 560
"""Width of a chart in a file, in pixels, where the page decides its width on screen."""
DIGITS = string.digits + string.ascii_lowercase
"""What stands for a value in a column with few values: a number in base 36."""
CODES = [first + second for first in DIGITS for second in DIGITS]
"""Two digits, which stand for a value in a column with more values."""
LONG = 24
"""A figure of more letters is written smaller."""
FILTERED = 12
"""A table on an HTML page gets a search field if it has at least so many rows."""
CONFIG = {"background": "white", "font": "DejaVu Sans, sans-serif"}
"""Vega-Lite's configuration for charts that are written to files."""


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A heading."""

    text: str
    """Plain text."""
    level: int = 2
    """1, 2 or 3, as in HTML."""
    folded: bool = False
    """For level 2: whether the part below is closed until the reader clicks."""


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """A paragraph."""

    text: str
    """Plain text; text between backticks is code."""
    warning: bool = False
    """Whether the reader must not overlook it."""
    measured: bool = False
    """Whether it says that what follows was measured."""
    answer: bool = False
    """Whether it is what the reader came for."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. Columns that hold only numbers are aligned right."""

    head: Sequence[str]
    """Column titles."""
    rows: Sequence[Sequence[str]]
    """Cells of plain text; text between backticks is code."""

    def numeric(self, column: int) -> bool:
        """Whether the cells of a column are numbers or missing, and at least one is a number."""
        cells = [row[column] for row in self.rows]
        return all(NUMBER.fullmatch(cell) for cell in cells) and any(cell != NOTHING for cell in cells)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart, which the page draws and which is also written as SVG and PNG."""

    name: str
    """Name of its files, without their endings."""
    spec: Mapping[str, Any]
    """The chart in Vega-Lite."""
    text: str
    """What the chart shows, for readers who cannot see it."""


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class View:
    """A chart that is drawn for whichever case the reader chooses."""

    name: str
    """Name of its files, without their endings."""
    heading: str
    """Its title, on the page and in exported pictures."""
    caption: str
    """What it shows; text between backticks is code."""
    spec: Mapping[str, Any]
    """The chart in Vega-Lite; its data have the names of data sets, and no values."""
    main: str
    """The data set without which there is nothing to draw."""
    tall: bool = False
    """Whether it takes the height of two others, where views stand side by side."""


@dataclass(frozen=True, kw_only=True)
class ExplorerCase:
    """What views show for one choice of the reader."""

    values: Mapping[str, str]
    """Title of a choice -> its value for this case."""
    title: str
    """What the case is, for pictures."""
    source: str
    """Where its numbers come from, for pictures."""
    status: str
    """Whether its numbers were measured, in a sentence."""
    measured: bool
    """Whether they were."""
    next: str
    """The command to run next, as code, and what it does."""
    facts: Sequence[tuple[str, str, str]]
    """What a reader wants to know first: what it is, the figure, and what there is to add."""
    lead: Sequence[tuple[str, str]]
    """What else is to be said of it, each with its title; text between backticks is code."""
    target: str
    """The words of a command that name the kernel and the case."""
    pair: Sequence[str]
    """The two fields of `programs` that the map of pairs shows until the reader chooses others."""
    rows: Mapping[str, Rows | str]
    """Name of a data set -> its rows, or the name of a data set of the explorer's."""
    notes: Mapping[str, str]
    """Name of a view -> a sentence beneath its caption."""


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """Views of many cases, one case at a time: the reader chooses it by its values."""

    views: Sequence[View]
    """The views."""
    cases: Sequence[ExplorerCase]
    """The cases."""
    first: int
    """The place of the case that is shown until another is chosen, and that is written as SVG and PNG."""
    marks: str
    """What the marks in the views mean."""
    shared: Mapping[str, Rows]
    """Data sets that several cases share, by name."""

    def drawn(self) -> list[tuple[View, dict[str, Any]]]:
        """The views of the case shown first that have something to show, each with its whole chart."""
        case = self.cases[self.first]
        data = {name: self.shared[rows] if isinstance(rows, str) else rows for name, rows in case.rows.items()}
        return [
            (view, {**titled({**view.spec}, view.heading, case.title, case.source), "datasets": data})
            for view in self.views
            if data.get(view.main)
        ]

    def packed(self) -> dict[str, Any]:
        """All that the page needs; see `packed_rows`."""
        texts: dict[str, int] = {}
        cases = [
            {
                "values": case.values,
                "title": case.title,
                "source": case.source,
                "top": _top(case),
                "facts": _facts(case),
                "rows": {
                    name: rows if isinstance(rows, str) else packed_rows(rows, texts)
                    for name, rows in case.rows.items()
                },
                "notes": {
                    name: texts.setdefault(_inline(note), len(texts)) for name, note in case.notes.items() if note
                },
                "target": case.target,
                "pair": case.pair,
            }
            for case in self.cases
        ]
        views = {each.name: {"title": each.heading, "spec": each.spec, "main": each.main} for each in self.views}
        shared = {name: packed_rows(rows, texts) for name, rows in self.shared.items()}
        return {"first": self.first, "views": views, "cases": cases, "shared": shared, "texts": list(texts)}


def packed_rows(rows: Rows, texts: dict[str, int]) -> dict[str, Any]:
    """Rows as columns, for the page's code to read. A column of one value holds it once; one of few values holds one or two
    digits in base 36 for each row; one of texts holds their places in `texts`, to which new ones are added.
    """
    columns: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        values = [row.get(name) for row in rows]
        written = [json.dumps(value) for value in values]
        kinds = dict(zip(written, values, strict=True))
        if len(kinds) == 1:
            columns[name] = {"same": values[0]}
        elif len(kinds) <= min(len(CODES), len(rows) // 2):
            width = 1 if len(kinds) <= len(DIGITS) else 2
            codes = dict(zip(kinds, DIGITS if width == 1 else CODES, strict=False))
            at = "".join(codes[each] for each in written)
            columns[name] = {"of": [*kinds.values()], "at": at, "width": width}
        elif all(isinstance(value, str) for value in values):
            columns[name] = {"texts": [texts.setdefault(str(each), len(texts)) for each in values]}
        else:
            columns[name] = values
    return {"rows": len(rows), "columns": columns}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Links to the headings of level 2 that follow."""


Block = Heading | Paragraph | Table | Chart | Explorer | Contents


def write_document(
    folder: Path,
    blocks: Sequence[Block],
    *,
    title: str,
    markdown: str,
    page: str,
    more: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a document as Markdown and as a page, with its charts, and other text files beside it; returns all files.

    Without vl-convert, which draws the charts, a paragraph stands in their place. The folder is made where needed; files in it
    with other names are left alone.

    Args:
        folder: where the files go.
        blocks: the document.
        title: of the page.
        markdown: name of the Markdown file.
        page: name of the HTML file.
        more: the text of other files, by name.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    drawn = drawings(blocks)
    if drawn is None and any(isinstance(block, (Chart, Explorer)) for block in blocks):
        shown = [replace(block, views=()) if isinstance(block, Explorer) else block for block in blocks]
        text = f"The charts are left out: for them, run `{installing('report')}`."
        blocks = [block for block in shown if not isinstance(block, Chart)]
        blocks.insert(1, Paragraph(text=text))
    files: dict[str, bytes] = {
        markdown: to_markdown(blocks, drawn or ()).encode(),
        page: to_html(blocks, title=title).encode(),
        **{name: text.encode() for name, text in (more or {}).items()},
        **(drawn or {}),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; give another folder with --out") from error
    return [folder / name for name in files]


def drawings(blocks: Sequence[Block]) -> dict[str, bytes] | None:
    """The SVG and PNG files of all charts, by file name; None where vl-convert, which draws them, is not installed."""
    specs: dict[str, Mapping[str, Any]] = {}
    for one in blocks:
        if isinstance(one, Chart):
            specs[one.name] = one.spec
        elif isinstance(one, Explorer):
            specs |= {view.name: spec for view, spec in one.drawn()}
    try:
        return {
            f"{name}.{kind}": draw(spec)
            for name, spec in specs.items()
            for kind, draw in (("svg", as_svg), ("png", as_png))
        }
    except ImportError:
        return None


def as_svg(spec: Mapping[str, Any]) -> bytes:
    """A chart as an SVG file.

    Raises:
        ImportError: vl-convert is not installed.
    """
    import vl_convert

    return str(vl_convert.vegalite_to_svg(_on_paper(spec), vl_version=VEGA_LITE)).encode()


def as_png(spec: Mapping[str, Any]) -> bytes:
    """A chart as a PNG file, with one and a half pixels to a unit."""
    import vl_convert

    return bytes(vl_convert.vegalite_to_png(_on_paper(spec), vl_version=VEGA_LITE, scale=1.5))


def _on_paper(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The chart for a file, where there is no page whose width it could take."""
    width = {"width": PAPER_WIDTH} if spec.get("width") == "container" else {}
    return {**_shown(spec), "config": CONFIG, **width}


def to_markdown(blocks: Sequence[Block], drawn: Collection[str] = ()) -> str:
    """The document as GitHub-flavoured Markdown. HTML and links in texts are escaped.

    A chart is shown only if its SVG file is in `drawn`.
    """
    return "\n\n".join(text for block in blocks if (text := _markdown(block, drawn))) + "\n"


def _markdown(block: Block, drawn: Collection[str]) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {_plain(block.text)}"
    if isinstance(block, Paragraph):
        return _plain(block.text)
    if isinstance(block, Contents):
        return ""
    if isinstance(block, Chart):
        file = f"{block.name}.svg"
        return f"![{_plain(block.text)}]({file})" if file in drawn else ""
    if isinstance(block, Explorer):
        case = block.cases[block.first]
        pictures = [
            f"![{view.heading}]({view.name}.svg)\n\n{_plain(f'{view.caption} {case.notes.get(view.name, str())}')}"
            for view, _ in block.drawn()
            if f"{view.name}.svg" in drawn
        ]
        figures = Table(head=("", "", ""), rows=case.facts)
        said = [f"**{_plain(case.status)}**", f"Next: {_plain(case.next)}", f"# {_plain(case.title)}"]
        lead = [f"{title}: {_plain(text)}" for title, text in case.lead]
        return "\n\n".join([*said, _markdown(figures, drawn), *lead, *pictures])
    marks = ["---:" if block.numeric(column) else "---" for column in range(len(block.head))]
    lines = [block.head, marks, *block.rows]
    cells = ((_plain(cell).replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


def _plain(text: str) -> str:
    """One line of text whose only markup is code. Runs of backticks become one backtick, since Markdown pairs runs of
    equal length.
    """
    parts = CODE.split(re.sub("`+", "`", printable(" ".join(text.split()))))
    return "".join(_code(part) if place % 2 else _escaped(part) for place, part in enumerate(parts))


def _escaped(text: str) -> str:
    return html.escape(text.replace("\\", "\\\\"), quote=False).replace("](", "]\\(")


def _code(text: str) -> str:
    """Code. Nothing is escaped between backticks, so text that could end the cell or the code is written as HTML."""
    return f"<code>{_escaped(text).replace('|', '&#124;')}</code>" if set(text) & set("<>&|\\") else f"`{text}`"


def to_html(blocks: Sequence[Block], *, title: str) -> str:
    """The document as one HTML file that needs nothing else: it contains its style, its charts and the code that draws
    them.
    """
    own = Path(__file__).parent
    body: list[str] = []
    folded = False
    ids = unique_ids(blocks)
    for place, block in enumerate(blocks):
        if isinstance(block, Heading) and block.level < 3 and folded:
            body.append("</details>")
            folded = False
        if isinstance(block, Contents):
            links = ((at, each) for at, each in enumerate(blocks) if isinstance(each, Heading) and each.level == 2)
            items = "".join(f'<a href="#{ids[at]}">{_inline(each.text)}</a>' for at, each in links)
            body.append(f"<nav>{items}</nav>")
        elif isinstance(block, Heading) and block.folded:
            body.append(f'<details><summary id="{ids[place]}">{_inline(block.text)}</summary>')
            folded = True
        else:
            body.append(_html(block, ids.get(place, "")))
    if folded:
        body.append("</details>")
    code = _drawing_code() if any(isinstance(block, (Chart, Explorer)) for block in blocks) else ""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(printable(title))}</title>",
            f"<style>\n{(own / 'page.css').read_text()}</style>",
            "</head>",
            "<body>",
            *body,
            *([f'<script type="module">{code}\n{(own / "charts.js").read_text()}</script>'] if code else []),
            f"<script>{(own / 'page.js').read_text()}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _drawing_code() -> str:
    """The JavaScript that draws charts; empty where vl-convert, which contains it, is not installed."""
    try:
        import vl_convert
    except ImportError:
        return ""
    code = vl_convert.javascript_bundle(snippet=None, vl_version=VEGA_LITE)  # type: ignore[arg-type]
    return str(code).replace("</script", "<\\/script")


def unique_ids(blocks: Sequence[Block]) -> dict[int, str]:
    """The id of each heading and chart on the page, by its place among the blocks: its words and, where those words were
    taken before, a number.
    """
    found: dict[int, str] = {}
    for place, block in enumerate(blocks):
        if isinstance(block, (Heading, Chart, Explorer)):
            words = f"chart-{block.name}" if isinstance(block, Chart) else getattr(block, "text", "cases")
            stem = re.sub(r"\W+", "-", words.lower()).strip("-") or "part"
            free = (f"{stem}-{number}" if number > 1 else stem for number in itertools.count(1))
            found[place] = next(name for name in free if name not in found.values())
    return found


def _html(block: Heading | Paragraph | Table | Chart | Explorer, own_id: str = "") -> str:
    if isinstance(block, Heading):
        return f'<h{block.level} id="{own_id}">{_inline(block.text)}</h{block.level}>'
    if isinstance(block, Paragraph):
        names = " ".join(name for name in ("warning", "measured", "answer") if getattr(block, name))
        return f'<p class="{names}">{_inline(block.text)}</p>' if names else f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Chart):
        texts: dict[str, int] = {}
        values = packed_rows(block.spec["data"]["values"], texts) if "data" in block.spec else None
        packed = {**block.spec, "data": {"packed": values, "texts": [*texts]}} if values else block.spec
        place = f'<div class="chart" data-spec="{own_id}" role="img" aria-label="{html.escape(printable(block.text))}"></div>'
        return f"{_data(own_id, packed)}\n{place}"
    if isinstance(block, Explorer):
        case = block.cases[block.first]
        parts = [
            f'<div class="top">{_top(case)}</div>',
            '<div class="choices"></div>',
            f'<div class="facts">{_facts(case)}</div>',
            f'<div class="views">{"".join(map(_figure, block.views))}</div>',
            f'<div class="picked" hidden></div><p class="soft">{_inline(block.marks)}</p>' if block.views else "",
        ]
        return f'{_data(own_id, block.packed())}\n<section class="explorer" data-cases="{own_id}">{"".join(parts)}</section>'
    classes = [' class="number"' if block.numeric(column) else "" for column in range(len(block.head))]

    def row(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}{name}>{_inline(cell)}</{tag}>" for name, cell in zip(classes, cells, strict=True))

    body = "\n".join(f"<tr>{row('td', cells)}</tr>" for cells in block.rows)
    field = '<input class="filter" type="search" placeholder="filter rows" aria-label="filter rows">'
    head = f"{field if len(block.rows) >= FILTERED else ''}<table>\n<thead><tr>{row('th', block.head)}</tr></thead>"
    return f'<div class="scroll">{head}\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _top(case: ExplorerCase) -> str:
    """The first lines of a case: whether it was measured, what to run next, and what it is."""
    return (
        f'<p class="{"measured" if case.measured else "warning"}">{_inline(case.status)}</p>'
        f'<p class="next"><b>Next:</b> {_inline(case.next)}</p><h1>{_inline(case.title)}</h1>'
    )


def _facts(case: ExplorerCase) -> str:
    """What a reader wants to know first of a case, side by side."""

    def card(what: str, figure: str, more: str) -> str:
        size = ' class="long"' if len(figure) > LONG else ""
        return (
            f"<div><dt>{_inline(what)}</dt><dd><b{size}>{_inline(figure)}</b> <span>{_inline(more)}</span></dd></div>"
        )

    cards = "".join(card(*fact) for fact in case.facts)
    lead = "".join(f'<p class="lead"><b>{title}:</b> {_inline(text)}</p>' for title, text in case.lead)
    return f"<dl>{cards}</dl>{lead}"


def _figure(view: View) -> str:
    """The place of a view, with its caption."""
    return (
        f'<figure class="view{" tall" if view.tall else ""}" data-view="{view.name}">'
        f'<div class="chart" role="img" aria-label="{_inline(view.heading)}"></div>'
        f'<figcaption>{_inline(view.caption)} <span class="note"></span></figcaption></figure>'
    )


def _data(own_id: str, values: Any) -> str:
    """Values for the page's own code to read."""
    text = json.dumps(_shown(values), separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{own_id}">{text}</script>'


def _inline(text: str) -> str:
    return CODE.sub(r"<code>\1</code>", html.escape(printable(text)))


def _shown(spec: Any) -> Any:
    """A chart's values with every text printable: a control character has no place in an SVG file."""
    if isinstance(spec, str):
        return printable(spec)
    if isinstance(spec, (list, tuple)):
        return [_shown(value) for value in spec]
    return {_shown(key): _shown(value) for key, value in spec.items()} if isinstance(spec, Mapping) else spec
