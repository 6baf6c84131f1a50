"""What learning inert changes is worth on recorded builds: ``python -m docs.studies.search.inert_changes builds.csv.xz``.

Each run's schedules are built in the order recorded, and again with those put off that are likely to be a program built already:
how many distinct programs the first builds come to, and how many programs that were not built are among what was put off.
With ``--collect FILE DATABASE...`` the builds of databases are written to a file.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import select

from tiledsched.core.files import write_whole
from tiledsched.core.schedule import Schedule
from tiledsched.store.db import TuningDB
from tiledsched.store.models import BuildRow, ScheduleRow
from tiledsched.tuning.inert import SURE, InertChanges

COLUMNS = ("run", "schedule", "fingerprint")
BATCH = 8
FEWEST = 24
"""Builds of a run worth looking at."""

Builds = dict[Schedule, str]
"""Fingerprints in the order in which schedules were built."""


def collect(databases: Iterable[Path]) -> dict[str, Builds]:
    """Builds that worked, by database and what of the problem machine code depends on."""
    runs: dict[str, Builds] = {}
    wanted = (
        select(BuildRow.kernel, BuildRow.arch, BuildRow.problem_class, BuildRow.fingerprint, ScheduleRow.knobs)
        .join(ScheduleRow, ScheduleRow.id == BuildRow.schedule_id)
        .where(BuildRow.failure_kind.is_(None))
        .order_by(BuildRow.id)
    )
    for path in databases:
        with TuningDB.open(str(path), read_only=True) as db, db.reading() as session:
            for kernel, arch, problem_class, fingerprint, knobs in session.execute(wanted):
                told = {key: value for key, value in problem_class.values.items() if key != "signature"}
                name = f"{path.stem} {kernel} {arch} {json.dumps(told, sort_keys=True)}"
                runs.setdefault(name, {}).setdefault(knobs, fingerprint)
    return {name: builds for name, builds in runs.items() if len(builds) >= FEWEST}


def replay(builds: Builds, most: int) -> tuple[int, int, int]:
    """Distinct programs among the first `most` builds as recorded, and with learning; programs wrongly put off."""
    inert, left, found, wrong = InertChanges(next(iter(builds))), dict(builds), set[str](), set[str]()
    while left and len(builds) - len(left) < most:
        chosen = inert.put_off("", list(left), min(BATCH, most - len(builds) + len(left)))
        last = list(left).index(next(reversed(chosen)))
        wrong |= {left[each] for each in list(left)[:last] if each not in chosen and inert.equal("", each) >= SURE}
        for schedule in chosen:
            found.add(left[schedule])
            inert.learn("", schedule, left.pop(schedule))
    return len(set(list(builds.values())[:most])), len(found), len(wrong - found)


def read(path: Path) -> dict[str, Builds]:
    """What `collect` found."""
    runs: dict[str, Builds] = {}
    for row in csv.DictReader(io.StringIO(lzma.decompress(path.read_bytes()).decode())):
        runs.setdefault(row["run"], {})[Schedule(json.loads(row["schedule"]))] = row["fingerprint"]
    return runs


def write(path: Path, runs: dict[str, Builds]) -> None:
    """As `read` reads it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(
        (name, json.dumps(schedule.to_json()), fingerprint)
        for name, builds in runs.items()
        for schedule, fingerprint in builds.items()
    )
    write_whole(path, lzma.compress(text.getvalue().encode(), preset=9))


def main() -> None:
    """Print a line for each run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--collect", nargs="+", type=Path, metavar="DATABASE", help="write the builds of these to the file"
    )
    parser.add_argument("--builds", type=int, default=64, help="how many are built (default: 64)")
    options = parser.parse_args()
    if options.collect:
        write(options.file, collect(options.collect))
    print("builds  programs  as recorded  learning  wrongly put off  run")
    for name, builds in read(options.file).items():
        most = min(options.builds, len(builds) * 3 // 4)
        before, after, wrong = replay(builds, most)
        print(f"{len(builds):6}  {len(set(builds.values())):8}  {before:5} of {most:<2}  {after:8}  {wrong:15}  {name}")


if __name__ == "__main__":
    main()
