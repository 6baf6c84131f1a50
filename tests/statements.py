"""Draws statements from a report, `explain` and `show`, and compares each with what `recomputed` finds in the files.

    python tests/statements.py [--db FILE] [--kernel K] [--arch A] [--count 200] [--seed N] [--report FOLDER]

It prints every wrong statement with what was said, what was found and where it stands, and then exits with 1. Sentences with a
figure or a name that no pattern of `readings` reads are counted and printed: a new sentence needs a new pattern.
"""

import argparse
import csv
import html
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import readings
from recomputed import Evidence

from tiledsched.core.labels import format_problem, labels_of


@dataclass(frozen=True)
class Statement:
    """One figure or name that somebody reads, and how it is found anew."""

    kind: str
    where: str
    said: Any
    recompute: Callable[[], Any]

    def check(self) -> str:
        """What was found instead; empty where the statement holds."""
        try:
            found = self.recompute()
        except Exception as error:  # what cannot be found anew is not shown
            return f"cannot be found anew: {error!r}"
        return "" if agrees(self.said, found) else str(found)


def agrees(said, found) -> bool:
    """Whether something printed is what was found: numbers to the digits printed, of several names one."""
    if isinstance(found, (set, frozenset)):
        return said in found
    if isinstance(said, str) and isinstance(found, (int, float)) and not isinstance(found, bool):
        low, high = bounds(said)
        return low <= found <= high
    if isinstance(said, float) or isinstance(found, float):
        return said is not None and found is not None and abs(said - found) <= 1e-9 + 6e-6 * abs(found)
    return said == found


def bounds(text: str) -> tuple[float, float]:
    """The least and the largest number that is printed so: `3.8% longer` stands for 0.0375 to 0.0385."""
    if text.startswith("as long"):
        return -5.0e-4, 5.0e-4
    digits = re.search(r"[-+]?[\d,]*\.?\d+", text)[0].replace(",", "")
    number, half = float(digits), 0.5001 * 10.0 ** -len(digits.partition(".")[2])
    if len(digits) > 4 and "." not in digits:  # a time has at least four digits
        half = 0.5001
    if "%" in text:
        number, half = number / 100, half / 100
    number = -number if "less time" in text else number - 1 if "times as long" in text else number
    return number - half, number + half


class Reader:
    """Reads what is printed about one kernel on one arch.

    Args:
        evidence: what is known of them.
        folder: the report's files.
    """

    def __init__(self, evidence: Evidence, folder: Path) -> None:
        self.evidence, self.folder = evidence, folder
        self.unread: list[str] = []
        """Sentences and tables that no pattern reads."""
        self.by_text, self.by_id = defaultdict(list), {}
        for case in evidence.cases:
            self.by_text[str(case.problem)].append(case)
            self.by_id[case.problem.id, case.mode] = case
        page = (folder / "report.html").read_text()
        found = re.findall(r'<script type="application/json" id="([^"]*)">(.*?)</script>', page, re.S)
        self.page = {name: json.loads(text) for name, text in found}
        self.tile = evidence.tile_knobs or self._map_knobs()

    def _map_knobs(self):
        """The knobs that the page's map is drawn over where none are named like a tile's rows and columns."""
        spec = json.dumps(self.page.get("cases", {}).get("views", {}).get("tile-map", {}))
        found = [re.search(rf'"field": "{axis}"[^{{}}]*"title": "(\w+)"', spec) for axis in ("rows", "columns")]
        return tuple(each[1] for each in found) if all(found) else None

    def report(self):
        """The statements of all files of the report."""
        yield from self._text()
        for name, read in readings.CSV_FILES.items():
            if (path := self.folder / name).exists():
                with path.open() as file:
                    for place, row in enumerate(csv.DictReader(file)):
                        yield from self._made(f"{name}", f"{name}, row {place + 2}", read(self, row))
        yield from self._cases()
        for name, spec in self.page.items():
            for kind in (kind for kind in readings.CHARTS if name.startswith(f"chart-{kind}")):
                for row in spec.get("data", {}).get("values", ()):
                    yield from self._made(f"page {kind}", f"report.html, {name}", readings.CHARTS[kind](self, row))

    def _made(self, kind, where, found):
        """The statements that a reading gives; one that stumbles is itself a statement that cannot be found anew."""
        try:
            for name, said, recompute in found:
                if said not in ("", "-", None):
                    yield Statement(f"{kind}: {name}", where, said, recompute)
        except Exception as error:
            yield Statement(f"{kind}: unreadable", where, repr(error), lambda: "a statement that is read")

    def sentences(self, text, where, case=None):
        """The statements of some sentences. `case` is the problem that they are about, where it is one."""
        text = html.unescape(re.sub(r"</?code>", "`", text))
        for sentence in re.split(r"(?<=[.;])\s+(?=[A-Z`])(?=(?:[^`]*`[^`]*`)*[^`]*$)", text):
            sentence = sentence.strip()
            for kind, (pattern, read) in readings.SENTENCES.items():
                if match := re.fullmatch(pattern, sentence):
                    yield from self._made(f"sentence {kind}", f"{where}: {sentence}", read(self, case, *match.groups()))
                    break
            else:
                if re.search(r"\d|`", sentence) and not re.match(readings.EXPLAINS, sentence):
                    self.unread.append(sentence)

    def _text(self):
        """The statements of report.md: its paragraphs, and the rows of its tables."""
        heading, group, head, seen = "", "", None, set()
        for line in (self.folder / "report.md").read_text().splitlines():
            if line.startswith("#"):
                group = line.strip("# ") if line.startswith("###") else ""
                heading = heading if group else line.strip("# ")
            if not line.startswith("|"):
                head = None
                if line and line[0] not in "#!" and line not in seen:
                    seen.add(line)
                    lead = re.match(r"\*\*(?:\S+) ([^*]*)\*\*, (?:measured|modelled)[^.]*\. (.*)", line)
                    case = self.by_text[lead[1]][0] if lead else None
                    yield from self.sentences(lead[2] if lead else line, f"report.md, {heading}", case)
                continue
            cells = [cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if head is None:
                head, read = cells, next((each for name, each in readings.TABLES.items() if re.match(name, heading)), None)
                if read is None:
                    self.unread.append(f"table below {heading!r}: {', '.join(head)}")
            elif read and not set(line) <= set("|-: "):
                yield from self._made(f"table {heading.split(',')[0]}", f"report.md, {line}", read(self, group, head, cells))

    def _cases(self):
        """The statements of the page's views of one problem."""
        data = self.page.get("cases", {"cases": ()})
        for each in data["cases"]:
            words, how = each["title"].partition(" ")[2], each["source"].split()[0]
            mode = each["values"].get("accumulators", "fp32")
            case = next(one for one in self.by_text[words] if (one.mode, one.provenance) == (mode, how))
            yield from self.sentences(each["lead"], f"report.html, {words}", case)
            for name, columns in each["rows"].items():
                if name in readings.VIEWS and isinstance(columns, dict):
                    texts = [[data["texts"][i] for i in of["texts"]] if isinstance(of, dict) else of for of in columns.values()]
                    for values in zip(*texts, strict=True):
                        row = dict(zip(columns, values, strict=True))
                        yield from self._made(f"page {name}", f"report.html, {words}", readings.VIEWS[name](self, case, row))

    def case_of(self, words):
        """The case that words such as `S=64 B=256 H=8 D=32 float16, causal` are about: of several that with the fewest options."""
        tokens = [token for token in re.split(r",? |,(?=\w+$)", words) if token]
        fitting = [case for case in self.evidence.cases if all(self._fits(case, token) for token in tokens)]

        def unnamed(case):
            """What the words do not name: flags that are set, options, and another accumulator."""
            flags = sum(value is True and name not in tokens for name, value in case.problem.values.items())
            return flags, len(case.problem.to_json()), case.mode != "fp32"

        return min(fitting, key=unnamed)

    def sensitivity(self, words, regime):
        """A function that gives what the tile is worth in the problems that some words name, of one regime of sizes."""

        def found():
            least, most = {"short": (0, 1024), "medium": (1025, 4096), "long": (4097, 1 << 62)}[regime]
            tokens = [token for token in words.split(", ") if token]
            members = []
            for case in self.evidence.cases:
                tiles = {each["tile"]: each["relative"] for each in case.tiles(self.tile) if each["searched"]}
                size = self.size(case)
                if len(tiles) > 1 and least <= size <= most and all(self._fits(case, token) for token in tokens):
                    members.append((size, tiles))
            shared = set.intersection(*(set(tiles) for _, tiles in members))
            mean = {tile: math.prod(tiles[tile] for _, tiles in members) ** (1 / len(members)) for tile in shared}
            first, second, *_ = ranked = sorted(shared, key=lambda tile: (mean[tile], tile))
            return {
                "sizes": sorted({size for size, _ in members}),
                "best": readings.tile_text(first),
                "second": readings.tile_text(second),
                "drop": mean[second] / mean[first] - 1,
                "spread": mean[ranked[-1]] / mean[first] - 1,
            }

        return found

    def size(self, case):
        """The size along which the kernel's tables run."""
        axes = self.evidence.kernel.axes or [
            name for name, each in self.evidence.kernel.fields.items() if isinstance(case.problem.values[name], int)
        ]
        alike = next((names for names in labels_of(self.evidence.kernel).values() if axes[0] in names), (axes[0],))
        return max(getattr(case.problem, name) for name in alike)

    def _fits(self, case, token):
        problem, (name, _, value) = case.problem, token.partition("=")
        values = problem.values
        if not value:
            return token in {case.mode, "accumulators", case.device, *map(str, values.values())} or values.get(token) is True
        own = [getattr(problem, each) for each in labels_of(self.evidence.kernel).get(name, (name,))]
        return "/".join(dict.fromkeys(map(readings.value_text, own))) == value


def run(*arguments, db=None):
    """What a command prints."""
    command = [sys.executable, "-m", "tiledsched", *arguments, *(["--db", str(db)] if db else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def explained(reader, problems):
    """The statements of `explain` on some problems, as JSON and as text."""
    evidence = reader.evidence
    chosen = [word for problem in problems for word in ("-p", format_problem(problem))]
    command = ["explain", evidence.kernel.name, "--arch", evidence.arch, *chosen]
    for row in json.loads(run(*command, "--json", db=evidence.db))["rows"]:
        problem = evidence.problem(row["problem"])
        yield from reader._made("explain --json", f"explain {problem}", readings.explained_json(reader, problem, row))
    by_text = {str(problem): problem for problem in problems}
    problem = None
    for line in run(*command, db=evidence.db).splitlines():
        if not line.startswith(" "):
            problem = by_text.get(line.rpartition(" on ")[0])
        elif problem is not None:
            name, text = line[2:14].strip(), line[14:].strip()
            if line.startswith("  evidence is for"):
                name, text = "evidence is for", line[18:].strip()
            found = readings.explained_line(reader, problem, name, text)
            yield from reader._made("explain", f"explain {problem}: {line.strip()}", found)


def listed(reader):
    """The statements of `show`, as JSON and as text."""
    evidence = reader.evidence
    command = ["show", evidence.kernel.name, "--arch", evidence.arch, "--compiler", "all"]
    for row in json.loads(run(*command, "--json", db=evidence.db))["entries"]:
        yield from reader._made("show --json", f"show {row['kernel']}", readings.shown_json(reader, row))
    lines = run(*command, db=evidence.db).splitlines()
    for line in lines[2:]:
        yield from reader._made("show", f"show: {line}", readings.shown_line(reader, line))
    for line in run("show", db=evidence.db).splitlines():
        yield from reader._made("show, summary", f"show: {line}", readings.summary_line(reader, line))


def draw(statements, count, seed):
    """Some statements of every kind, and others by chance, `count` in all where there are so many."""
    by_kind = defaultdict(list)
    for each in statements:
        by_kind[each.kind].append(each)
    dice, drawn = random.Random(seed), []
    for members in by_kind.values():
        dice.shuffle(members)
    kinds = [by_kind[kind] for kind in sorted(by_kind)]
    dice.shuffle(kinds)
    while len(drawn) < count and any(kinds):
        for members in kinds:
            if members and len(drawn) < count:
                drawn.append(members.pop())
    return drawn


def problems_to_explain(evidence, seed, most=12):
    """Problems with entries, and some without: sizes between those that were tuned."""
    dice = random.Random(seed)
    known = [entry["problem"] for entry in evidence.entries if entry["regime"] in ("", evidence.regime)]
    return dice.sample(known, min(most, len(known)))


def main(argv=None):
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", type=Path, help="a SQLite database whose statements are checked, beside what ships")
    parser.add_argument("--kernel", default="attention")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--count", type=int, default=200, help="statements to draw; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="a report that is there already (default: it is written anew)")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = given.report or Path(folder)
        if given.report is None:
            run("report", given.kernel, "--arch", given.arch, "-o", str(report), db=given.db)
        reader = Reader(Evidence(given.kernel, given.arch, given.db), report)
        found = [*reader.report(), *listed(reader)]
        found += explained(reader, problems_to_explain(reader.evidence, given.seed))
    drawn = draw(found, given.count or len(found), given.seed)
    wrong = [(each, instead) for each in drawn if (instead := each.check())]
    for each, instead in wrong:
        print(f"{each.kind}\n  said        {each.said}\n  recomputed  {instead}\n  source      {each.where}")
    kinds = len({each.kind for each in found})
    print(f"{given.kernel} on {given.arch}: {len(drawn)} of {len(found):,} statements of {kinds} kinds; wrong: {len(wrong)}")
    print(f"unread sentences: {len(reader.unread)}", *dict.fromkeys(reader.unread), sep="\n  ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
