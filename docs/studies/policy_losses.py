r"""What a schedule chosen from other problems loses, by their distance. `explain` prints these losses and rivals are
judged by them.

    python -m docs.studies.policy_losses tuning_db/tables/attention/sm_90.json \
        --landscapes tuning_db/landscapes/attention/*_burst_*.json.xz --left-out docs/results/h200/left_out.csv \
        --medians docs/results/h200/{coverage_tuned,asked_tuned,both_regimes}.csv.xz

Every problem of which several programs were measured is held out, alone and with all entries of its lengths, width and
mask. Where the policy's choice was among them its loss is known; a choice that nobody measured is counted, and says
nothing. `--out` writes the losses.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from docs.studies.flags import flag, parser_with
from docs.studies.landscapes import Landscape, read_landscape, shape_of
from docs.studies.policy import ANY, Judged, Study, summary
from tiledsched.build.toolchain import release
from tiledsched.core.device import arch_spec, spilled
from tiledsched.core.files import write_whole
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.report.document import Table, to_markdown
from tiledsched.rivals.rows import read_rows
from tiledsched.serve.transfer import NEAR_KIND, ExpectedLoss, transfer
from tiledsched.store.evidence import for_compiler
from tiledsched.store.exchange import read_table, text_of
from tiledsched.store.records import Entry

Race = Mapping[str, float]
"""Short text of a schedule -> its time in microseconds."""
NEAR = 0.15
"""Distances up to this are between problems that differ in little more than the element type."""
FAR = 4.0
"""Beyond this distance no loss is promised."""
FEWEST = 5
"""Choices that a promised loss is based on, at least."""
RACES = ("tiledsched", "left_out")
"""Methods of the bench that show a loss: a tuned schedule, and what would be served had nobody tuned its suite."""


def medians(path: Path) -> list[tuple[str, dict[str, float]]]:
    """(problem as people read it, race) for each run in a CSV file of a tune's medians."""
    races: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in csv.DictReader(io.StringIO(text_of(path, path.read_bytes()))):
        if row.get("regime", "burst") == "burst" and not spilled(int(row.get("spill_bytes") or 0)):
            races[row["problem"], row.get("run", "")][row["schedule"]] = float(row["median_us"])
    return [(problem, race) for (problem, _), race in races.items()]


def bench_races(path: Path) -> list[tuple[str, dict[str, float]]]:
    """(problem as people read it, race) for each problem in a bench's CSV file, except where a rival was chosen."""
    races: dict[str, dict[str, float]] = defaultdict(dict)
    for row in read_rows(path):
        if row.method in RACES and row.median_us and row.provenance != "rival":
            races[str(row.problem)][row.schedule] = row.median_us
    return [(problem, race) for problem, race in races.items() if len(race) > 1]


def judged(entries: Sequence[Entry], races: Mapping[Problem, Sequence[Race]]) -> tuple[list[Judged], int]:
    """The choices that were measured, and the number of choices that were not."""
    kernel, arch = entries[0].problem.declaration, entries[0].arch
    space, spec = space_for(arch, kernel), arch_spec(arch)
    known = [e.replace(schedule=space.complete(e.schedule)) for e in entries]
    found: dict[tuple[Problem, Schedule, float], Judged] = {}
    unknown = 0
    for problem, likes_out in itertools.product(races, (False, True)):
        seen = [
            e
            for e in known
            if e.problem != problem
            and kernel.similarity.kind(e.problem) == kernel.similarity.kind(problem)
            and not (likes_out and shape_of(e.problem) == shape_of(problem))
        ]
        choice = transfer(problem, seen, space, spec, NEAR_KIND)
        if choice is None:
            continue
        short = choice.schedule.short()
        losses = [race[short] / min(race.values()) - 1.0 for race in races[problem] if short in race]
        unknown += not losses
        if losses:
            found[problem, choice.schedule, choice.distance] = Judged(
                problem=problem, schedule=choice.schedule, loss=max(losses), measured=True, distance=choice.distance
            )
    return list(found.values()), unknown


@dataclass(frozen=True, kw_only=True)
class LossBand:
    """The expected loss within a range of distances."""

    group: str
    """The kernel's name for the group of problems; empty for every problem."""
    other_kind: bool
    """Whether the neighbours are of another kind."""
    up_to: float
    """Largest distance of the nearest entry; bands are in rising order."""
    loss: ExpectedLoss
    """The loss measured there."""


def near_bands(seen: Iterable[Judged]) -> list[LossBand]:
    """Loss bands: near problems form one group; farther ones are grouped, where there are enough choices."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for each in seen:
        group = each.problem.declaration.similarity.loss_group(each.problem)
        if group and each.distance <= FAR:
            groups["" if each.distance <= NEAR else group].append(each)
    return [
        LossBand(
            group=group,
            other_kind=False,
            up_to=max(each.distance for each in choices) if group else NEAR,
            loss=summary(choices),
        )
        for group, choices in sorted(groups.items())
        if len(choices) >= FEWEST
    ]


def to_json(bands: Sequence[LossBand]) -> str:
    """The text of `tuning_db/model/KERNEL/transfer.json`."""
    rows = [
        {
            "arch": band.loss.arch,
            "group": band.group,
            "other_kind": band.other_kind,
            "up_to": round(band.up_to, 3),
            "mean": round(band.loss.mean, 4),
            "worst": round(band.loss.worst, 4),
            "cases": band.loss.cases,
        }
        for band in bands
    ]
    return json.dumps({"schema_version": 1, "bands": rows}, indent=1) + "\n"


def read_races(
    table: Path, landscapes: Sequence[Path], medians_of: Sequence[Path], left_out: Sequence[Path]
) -> tuple[list[Entry], list[Landscape], dict[Problem, list[Race]]]:
    """The entries of the table's newest compiler, the landscapes, and all races of the table's problems."""
    known = [
        e
        for e in read_table(table).entries
        if e.provenance == "measured" and e.accum_mode == "fp32" and e.regime == "burst"
    ]
    entries = list(for_compiler(known, max((e.compiler for e in known), key=release)))
    by_words = {str(entry.problem): entry.problem for entry in entries}
    recorded = [read_landscape(path) for path in landscapes]
    races: dict[Problem, list[Race]] = defaultdict(list)
    for one in recorded:
        races[one.problem].append({program.schedule.short(): program.median_us for program in one.programs})
    told = [medians(path) for path in medians_of]
    told += [bench_races(path) for path in left_out]
    for words, race in itertools.chain.from_iterable(told):
        if words in by_words:
            races[by_words[words]].append(race)
    return entries, recorded, races


def all_bands(
    table: Path, landscapes: Sequence[Path], medians_of: Sequence[Path], left_out: Sequence[Path]
) -> tuple[list[LossBand], int]:
    """The loss bands of all files together, and the number of choices that nobody had measured."""
    entries, recorded, races = read_races(table, landscapes, medians_of, left_out)
    seen, unknown = judged(entries, races)
    bands = near_bands(seen)
    if recorded:
        crossed = (study := Study(recorded, entries)).run(study.crossings()["any other kind"])
        bands.append(LossBand(group="", other_kind=True, up_to=ANY, loss=summary(crossed)))
    kernel, arch = entries[0].kernel, entries[0].arch
    return [replace(band, loss=replace(band.loss, kernel=kernel, arch=arch)) for band in bands], unknown


def _row(band: LossBand) -> tuple[str, ...]:
    group = band.group or ("from another kind" if band.other_kind else "any")
    up_to = "any" if band.up_to == ANY else f"{band.up_to:.2f}"
    return group, up_to, f"{band.loss.mean:.1%}", f"{band.loss.worst:.1%}", str(band.loss.cases)


def main() -> None:
    """Print the losses."""
    parser = parser_with(
        flag("table", type=Path, help="the table of an arch"),
        *(
            flag(f"--{name}", nargs="*", type=Path, default=[], help=words)
            for name, words in (
                ("landscapes", "recorded landscapes of the arch"),
                ("medians", "CSV files of tunes' medians"),
                ("left-out", "CSV files of the bench's method left_out"),
            )
        ),
        flag("--out", type=Path, help="also write them here (tuning_db/model/KERNEL/transfer.json)"),
        prog="python -m docs.studies.policy_losses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = parser.parse_args()
    bands, unknown = all_bands(asked.table, asked.landscapes, asked.medians, asked.left_out)
    rows = tuple(_row(band) for band in bands)
    print(to_markdown([Table(head=("problems", "distance up to", "mean", "worst", "choices"), rows=rows)]), end="")
    print(f"\n{unknown} choices were not among the programs measured.")
    if asked.out:
        write_whole(asked.out, to_json(bands))


if __name__ == "__main__":
    main()
