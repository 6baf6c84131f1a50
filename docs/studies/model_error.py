"""How far the model is off on times that it was not fitted to: `python -m docs.studies.model_error [--out tuning_db/model]`.

Estimates are made as a tune makes them: at the maker's clock, out of an emptied L2 cache, without the host's time. They are
compared with

- figures of Blackwell GPUs that others published (docs/results/blackwell), by size, head dimension and, where there are
  enough figures of one, by tile;
- the landscapes in `held_out`, to which nothing was fitted (docs/landscapes.md): programs up to 1.3 times as slow as the best;
- the winners that ship for sm_90 of kernels over rows whose times the constants of their model were not read off.

A row of `tuning_db/model/KERNEL/error.json` says for which arch and which values of a problem it holds: a range of sizes that
was compared, or half the least to twice the largest of them where all are alike.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.studies import blackwell
from docs.studies.flags import flag, parser_with
from docs.studies.landscapes import landscape_of, read_landscape
from tiledsched.core import data_files
from tiledsched.core.device import arch_spec, spilled
from tiledsched.core.problem import Problem
from tiledsched.report.analysis import WITHIN
from tiledsched.report.document import Table, to_markdown
from tiledsched.store.exchange import read_table

COMMAND = "python -m docs.studies.model_error --out tuning_db/model"
FEWEST = 4
"""A row needs as many figures."""
LONG = 2048
"""The published figures are split at this length."""
FREE = ("batch", "heads", "kv_heads")
"""Fields that decide how many blocks there are, and no more."""
EXACT = ("head_dim",)
"""Sizes of which another value is another program."""
ALIKE = ("bfloat16", "float16")
"""Element types of one speed."""
ROW_KERNELS = ("rms_norm", "rms_norm_backward", "rope", "softmax", "softmax_backward")
"""Kernels over rows that are not among the three that the constants of their model were read off
(kernels/row_schedules.py)."""

Row = dict[str, Any]


def row_of(arch: str, errors: Sequence[float], where: dict[str, Any], source: str, tile: str = "") -> Row:
    """One row: errors are estimate over measured time, minus 1."""
    worst: float = max(errors, key=abs)
    return {
        "arch": arch,
        "where": where,
        "tile": tile,
        "figures": len(errors),
        "mean": round(statistics.fmean(map(abs, errors)), 4),
        "worst": round(worst, 4),
        "source": source,
    }


def published_rows() -> Iterator[Row]:
    """The rows of figures that others published."""
    cells: dict[tuple[str, bool, bool], list[blackwell.Scored]] = defaultdict(list)
    for each in blackwell.scored():
        # D=96 is another kernel's padding; B300 has too few figures to split them.
        device, problem = each.figure.device, each.problem
        long = problem.seq_q >= LONG and device == "GB10"
        cells[device, long, problem.head_dim == 96].append(each)
    for (device, _, _), found in sorted(cells.items()):
        where = where_of([each.problem for each in found], double=False)
        tiles: dict[str, list[float]] = defaultdict(list)
        for each in found:
            error = each.plain_us / each.figure.us - 1
            tiles["x".join(map(str, each.tile[:2]))].append(error)
        every = {"": [error for errors in tiles.values() for error in errors], **(tiles if len(tiles) > 1 else {})}
        for tile, errors in every.items():
            if len(errors) >= FEWEST:
                yield row_of(blackwell.DEVICES[device].arch, errors, where, f"published figures of {device}", tile)


def held_out_rows(kernel: str) -> Iterator[Row]:
    """The rows of landscapes that nothing was fitted to."""
    folder = data_files.tuning_db() / "landscapes" / kernel / "held_out"
    for path in sorted(folder.glob("*_burst_*.json.xz")):
        one = read_landscape(path)
        errors = (one.modelled_us / one.measured_us - 1)[one.measured_us <= WITHIN * one.best_us]
        yield row_of(one.arch, errors.tolist(), where_of([one.problem]), "programs of one problem on an H200")


def winner_rows(kernel: str) -> Iterator[Row]:
    """The row of the winners on sm_90 that ship of a kernel over rows."""
    table = read_table(data_files.tuning_db() / "tables" / kernel / "sm_90.json")
    facts = {each.fingerprint: each.facts for each in table.artifacts}
    by_problem: dict[Problem, list[Any]] = defaultdict(list)
    for stored in table.measurements:
        own = stored.measurement
        known = facts.get(own.fingerprint)
        if own.regime == "burst" and known is not None and not spilled(known.spill_bytes):
            by_problem[own.problem].append(own)
    errors = [
        us / own.median_us - 1
        for found in by_problem.values()
        for one in [landscape_of(found, facts)]
        for own, us in zip(one.programs, one.modelled_us.tolist(), strict=True)
    ]
    if len(errors) >= FEWEST:
        yield row_of(arch_spec("sm_90").arch, errors, where_of([*by_problem]), "winners of searches on an H200")


def where_of(problems: Sequence[Problem], *, double: bool = True) -> dict[str, Any]:
    """The values for which errors found on these problems hold: None for any, ranges of sizes, or a list of values.

    Args:
        problems: the problems that were compared.
        double: whether half the least and twice the largest size count as alike; otherwise sizes reach up to `LONG` where all
            are below it.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in problems for name in each.to_json() if name != "kernel"):
        values: list[Any] = sorted({each.values[name] for each in problems})
        if name in FREE:
            found[name] = None
        elif type(values[0]) is int and name not in EXACT:
            least, most = (max(1, values[0] // 2), values[-1] * 2) if double else (values[0], values[-1])
            found[name] = [[least, LONG - 1 if not double and most < LONG else most]]
        else:
            found[name] = [*ALIKE] if {*values} & {*ALIKE} else values
    return found


def rows() -> dict[str, list[Row]]:
    """The rows of every kernel."""
    folder = data_files.tuning_db() / "landscapes"
    kernels = sorted({*ROW_KERNELS, *(path.parent.name for path in folder.glob("*/held_out"))})
    found: dict[str, list[Row]] = {}
    for kernel in kernels:
        own = [*(published_rows() if kernel == "attention" else ()), *held_out_rows(kernel)]
        own += [*(winner_rows(kernel) if kernel in ROW_KERNELS else ())]
        if own:
            found[kernel] = own
    return found


def table(found: dict[str, list[Row]]) -> Table:
    """All rows, for people."""

    def words(where: dict[str, Any]) -> str:
        parts = []
        for name, allowed in where.items():
            if allowed is not None:
                each = (f"{one[0]} to {one[1]}" if isinstance(one, list) else str(one) for one in allowed)
                parts.append(f"{name} {' or '.join(each)}")
        return ", ".join(parts)

    return Table(
        head=("kernel", "arch", "problems", "tile", "figures", "mean", "worst", "of"),
        rows=tuple(
            (
                kernel,
                row["arch"],
                words(row["where"]),
                row["tile"] or "all",
                str(row["figures"]),
                f"{row['mean']:.1%}",
                f"{row['worst']:+.1%}",
                row["source"],
            )
            for kernel, own in found.items()
            for row in own
        ),
    )


def write(found: Mapping[str, Iterable[Row]], folder: Path, date: str) -> None:
    """Write the files of every kernel."""
    for kernel, own in found.items():
        lines = ",\n".join(f"  {json.dumps(row)}" for row in own)
        head = f' "schema_version": 1,\n "command": {json.dumps(COMMAND)},\n "date": {json.dumps(date)},\n'
        (folder / kernel).mkdir(exist_ok=True)
        (folder / kernel / "error.json").write_text(f'{{\n{head} "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def main() -> None:
    """Print the rows, and write them where wanted."""
    parser = parser_with(
        flag("--out", type=Path, help="write KERNEL/error.json into this folder (tuning_db/model)"),
        flag("--date", default="", help="the day to write down, such as 2026-11-28"),
        description=__doc__,
    )
    given = parser.parse_args()
    found = rows()
    if given.out:
        write(found, given.out, given.date)
    print(to_markdown([table(found)]), end="")


if __name__ == "__main__":
    main()
