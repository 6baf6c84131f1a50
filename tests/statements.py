"""Draws statements from a report, `explain` and `show`, and compares each with what `recomputed` finds in the files.

    python tests/statements.py [--db FILE] [--kernel K] [--arch A] [--count 200] [--seed N] [--report FOLDER]

It prints every wrong statement with what was said, what was found and where it stands, and then exits with 1. Sentences with a
figure or a name that no pattern of `readings` reads are counted and printed: a new sentence needs a new pattern.
"""

import argparse
import csv
import hashlib
import html
import io
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import readings
from recomputed import Evidence

from tiledsched import cli
from tiledsched.core import data_files
from tiledsched.core.schedule import Schedule
from tiledsched.core.text import format_problem, labels_of
from tiledsched.store.manifest import listed_files


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
    if isinstance(found, set):
        return said == found if isinstance(said, set) else said in found
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


def plain(text):
    """The text of some HTML, with code as in Markdown."""
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"</?code>", "`", text)))


def rows_of(packed, texts):
    """The rows that a page holds as columns: of one value, of few values under digits in base 36, of texts, or of all values."""
    found = []
    for column in packed["columns"].values():
        if isinstance(column, dict) and "of" in column:
            digits = re.findall("." * column["width"], column["at"])
            column = [column["of"][int(each, 36)] for each in digits]
        elif isinstance(column, dict):
            column = (
                [texts[place] for place in column["texts"]] if "texts" in column else [column["same"]] * packed["rows"]
            )
        found.append(column)
    return [dict(zip(packed["columns"], values, strict=True)) for values in zip(*found, strict=True)]


class Reader:
    """Reads what is printed about one kernel on one arch.

    Args:
        evidence: what is known of them.
        folder: the report's files.
        served: what `explain` serves for problems.
    """

    def __init__(self, evidence: Evidence, folder: Path, served: dict[Any, Any]) -> None:
        self.evidence, self.folder = evidence, folder
        self.unread: list[str] = []
        """Sentences and tables that no pattern reads."""
        self.by_text, self.by_id = defaultdict(list), {}
        self.most_hidden = 100
        """Of more problems it is not found anew what not tuning costs them all."""
        self._hidden: Hidden | None = None
        self._untuned: dict[Any, Any] = {}
        self._fitting = cache(lambda token: [self._fits(case, token) for case in evidence.cases])
        self.listed: dict[tuple[str, str], None] = {}
        """The problems in the order of the report."""
        for case in evidence.cases:
            self.by_text[str(case.problem)].append(case)
            self.by_id[case.problem.id, case.mode] = case
        evidence.answers |= served
        with (folder / "schedules.csv").open() as file:
            for row in csv.DictReader(file):
                key = row["problem_id"], row.get("accum_mode") or "fp32"
                self.listed.setdefault(key)
                evidence.timed_as(
                    self.by_id[key], row["schedule_id"]
                )  # what is served may stand for a program that was timed
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
                for row in rows_of(spec["data"]["packed"], spec["data"]["texts"]):
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
        text = re.sub("^Knobs [^:]*: ", "", plain(text))
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
        """The statements of report.md: its paragraphs, and the rows of its tables. The first screen is about one problem."""
        heading, group, head, seen = "", "", None, set()
        lines = (self.folder / "report.md").read_text().splitlines()
        titles = [line[2:].partition(" ")[2] for line in lines if line.startswith("# ")]
        case = next((self.by_text[title][0] for title in titles if self.by_text[title]), None)
        for line in lines:
            if line.startswith("#"):
                group = line.strip("# ") if line.startswith("###") else ""
                heading = heading if group else line.strip("# ")
                case = None if line.startswith("## ") else case
            if not line.startswith("|"):
                head = None
                if line and line[0] not in "#!" and line not in seen:
                    seen.add(line)
                    yield from self.sentences(line.strip("*"), f"report.md, {heading}", case)
                continue
            cells = [re.sub(r"^`([^`]*)`$", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if head is None:
                head, read = (
                    cells,
                    next((each for name, each in readings.TABLES.items() if re.match(name, heading)), None),
                )
                if read is None and any(head):
                    self.unread.append(f"table below {heading!r}: {', '.join(head)}")
            elif not any(head) and any(cells) and not set(line) <= set("|-: "):
                yield from self._made("first screen", f"report.md, {line}", readings.fact(self, case, *cells))
            elif read and not set(line) <= set("|-: "):
                yield from self._made(
                    f"table {heading.split(',')[0]}", f"report.md, {line}", read(self, group, head, cells)
                )

    def _cases(self):
        """The statements of the page's views of one problem."""
        data = self.page.get("cases", {"cases": ()})
        for each in data["cases"]:
            words, how = each["title"].partition(" ")[2], each["source"].split()[0]
            mode = each["values"].get("accumulators", "fp32")
            case = next(one for one in self.by_text[words] if (one.mode, one.provenance) == (mode, how))
            where = f"report.html, {words}"
            for text in re.findall(r"<p class=\"(?:measured|warning|lead)\">(.*?)</p>", each["top"] + each["facts"]):
                yield from self.sentences(text, where, case)
            for cells in re.findall(r"<dt>(.*?)</dt><dd><b.*?>(.*?)</b> ?(?:<span>(.*?)</span>)?</dd>", each["facts"]):
                yield from self._made("first screen", where, readings.fact(self, case, *map(plain, cells)))
            for name, packed in each["rows"].items():
                if name in readings.VIEWS and isinstance(packed, dict):
                    for row in rows_of(packed, data["texts"]):
                        yield from self._made(f"page {name}", where, readings.VIEWS[name](self, case, row))

    def case_of(self, words):
        """The case that words such as `S=64 B=256 H=8 D=32 float16, causal` are about: of several that with the fewest options."""
        tokens = [token for token in re.split(r",? |,(?=\w+$)", words) if token]
        fits = [self._fitting(token) for token in tokens]
        fitting = [case for case, *each in zip(self.evidence.cases, *fits, strict=True) if all(each)]

        def unnamed(case):
            """What the words do not name: flags that are set, options, and another accumulator."""
            flags = sum(value is True and name not in tokens for name, value in case.problem.values.items())
            return flags, len(case.problem.to_json()), case.mode != "fp32"

        return min(fitting, key=unnamed)

    def rule(self, knobs, parts):
        """A function that gives for how many problems a rule is right, and one value for all on problems left out."""

        def found():
            cases = [
                self.by_id[key]
                for key in self.listed
                if self.by_id[key].provenance == self.evidence.cases[0].provenance
            ]
            tables = [(case, self.evidence.best_by_value(case, knobs)) for case in cases]
            good = [
                (case, {value for value, cost in table.items() if cost <= case.tolerance}) for case, table in tables
            ]
            known = [(case, values) for case, values in good if values]
            order = list(dict.fromkeys(value for _, table in tables for value in table))
            constant = right = 0
            for place, (case, values) in enumerate(known):
                others = Counter(value for i, (_, each) in enumerate(known) if i % 10 != place % 10 for value in each)
                constant += max(order, key=lambda value: (others[value], -order.index(value))) in values
                named = next(words for words, condition in clauses if readings.holds(case.problem, condition))
                right += any("x".join(readings.value_text(each) for _, each in value) == named for value in values)
            return {"problems": len(known), "constant": constant, "right": right}

        clauses = [
            (
                part.partition(" where ")[0].removesuffix(" elsewhere").removesuffix(" (here)"),
                part.partition(" where ")[2],
            )
            for part in parts.split("; ")
        ]
        clauses = [(words.split(" or ")[0], condition) for words, condition in clauses]
        return found

    def untuned_choice(self, case):
        """The schedule that is served without tuning."""
        if case.problem not in self._untuned:
            if self._hidden is None:
                self._hidden = Hidden(self.evidence)
            self._untuned[case.problem] = self._hidden.served(case.problem)
        return self._untuned[case.problem]

    def untuned(self, case):
        """The same, as it was timed; None where it has no time."""
        chosen = self.untuned_choice(case)
        return case.timed_as(chosen) or self.evidence.timed_as(case, chosen.id)

    @property
    def untuned_costs(self):
        """What is served without tuning costs in each explored problem; None where it has no time."""
        return [case.cost(self.untuned(case)) for case in self.evidence.explored]

    def _fits(self, case, token):
        problem, (name, _, value) = case.problem, token.partition("=")
        values = problem.values
        if not value:
            return (
                token in {case.mode, "accumulators", case.device, *map(str, values.values())}
                or values.get(token) is True
            )
        own = [getattr(problem, each) for each in labels_of(self.evidence.kernel).get(name, (name,))]
        return "/".join(dict.fromkeys(readings.value_text(each) or "none" for each in own)) == value


def run(*arguments, db=None):
    """What a command prints."""
    command = [sys.executable, "-m", "tiledsched", *arguments, *(["--db", str(db)] if db else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)  # readline puts COLUMNS into C's own
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


def served_by_explain(evidence):
    """What `explain` serves for the problems of which other schedules are known."""
    problems = [case.problem for case in evidence.explored]
    chosen = [word for problem in problems for word in ("-p", format_problem(problem))]
    command = ["explain", evidence.kernel.name, "--arch", evidence.arch, "--json", *chosen]
    rows = json.loads(run(*command, db=evidence.db))["rows"] if problems else ()
    return {evidence.problem(row["problem"]): Schedule(row["schedule"]) for row in rows}


class Hidden:
    """A copy of the shipped data, from which the entries of a problem are taken away: what is served without tuning.

    Args:
        evidence: whose entries are hidden.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._temporary = tempfile.TemporaryDirectory()
        self.evidence, self.folder = evidence, Path(self._temporary.name)
        data, self._name = self.folder / "tuning_db", f"tables/{evidence.kernel.name}/{evidence.arch}.json"
        shutil.copytree(data_files.tuning_db(), data, ignore=shutil.ignore_patterns("landscapes"))
        self._data, self._manifest = data, data / "manifest.json"
        self._listed = json.loads(self._manifest.read_text())
        self._copy = (data / self._name).with_suffix(".serving")
        self._shipped = json.loads(self._copy.read_text()) if self._copy.exists() else None

    def served(self, problem):
        """What `explain` serves for a problem that was never measured, nor another one that is the same work."""
        alike, known = self.evidence.kernel.similarity, self.evidence.problem
        same = {
            entry["problem"]
            for entry in self.evidence.all_entries
            if alike.kind(entry["problem"]) == alike.kind(problem) and alike.distance(entry["problem"], problem) == 0
        } | {problem}
        if self._shipped:
            hidden = {place for place, (_, values, _) in enumerate(self._shipped["problems"]) if known(values) in same}
            entries = [
                each
                for each in self._shipped["entries"]
                if each["provenance"] == "modelled" or each["problem"] not in hidden
            ]
            text = json.dumps(self._shipped | {"entries": entries}).encode()
            self._copy.write_bytes(text)
            self._listed["files"][self._name]["serving"] = hashlib.sha256(text).hexdigest()
            self._manifest.write_text(json.dumps(self._listed))
        database = self.folder / "hidden.db"
        if self.evidence.db:
            shutil.copy(self.evidence.db, database)
            with sqlite3.connect(database) as connection:
                numbers = [(each.id,) for each in same]
                connection.executemany("delete from entries where provenance <> 'modelled' and problem_id = ?", numbers)
        command = ["explain", self.evidence.kernel.name, "--arch", self.evidence.arch, "-p", format_problem(problem)]
        listed_files.cache_clear()
        with patch.object(data_files, "tuning_db", lambda: self._data), redirect_stdout(io.StringIO()) as shown:
            status = cli.main([*command, "--json", "--db", str(database)])
        if status:
            raise SystemExit(f"{' '.join(command)} ends with {status}")
        return Schedule(json.loads(shown.getvalue())["schedule"])


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
    parser.add_argument(
        "--hide", type=int, default=100, help="problems to hide, a second each, for what is served without tuning"
    )
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        report = given.report or Path(folder)
        if given.report is None:
            run("report", given.kernel, "--arch", given.arch, "-o", str(report), db=given.db)
        evidence = Evidence(given.kernel, given.arch, given.db)
        reader = Reader(evidence, report, served_by_explain(evidence))
        reader.most_hidden = given.hide
        found = [*reader.report(), *listed(reader)]
        found += explained(reader, problems_to_explain(reader.evidence, given.seed))
    drawn = draw(found, given.count or len(found), given.seed)
    wrong = [(each, instead) for each in drawn if (instead := each.check())]
    for each, instead in wrong:
        print(f"{each.kind}\n  said        {each.said}\n  recomputed  {instead}\n  source      {each.where}")
    kinds = len({each.kind for each in found})
    print(
        f"{given.kernel} on {given.arch}: {len(drawn)} of {len(found):,} statements of {kinds} kinds; wrong: {len(wrong)}"
    )
    print(f"unread sentences: {len(reader.unread)}", *dict.fromkeys(reader.unread), sep="\n  ")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
