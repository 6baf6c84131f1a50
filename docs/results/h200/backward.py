"""What the bench of attention's backward pass shows, as Markdown, and whether each claim holds.

python docs/results/h200/backward.py [backward.csv]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tiledsched.rivals.rows import BenchRow, Cell, read_rows

OURS, SERVED, FIXED = "tiledsched", "served", "deterministic"
CUDNN, FLASH, FLASH_4 = "torch_cudnn", "torch_flash", "flash_attention_4"
RIVALS = (CUDNN, FLASH, FLASH_4)
NOISE = 1.05
"""An error counts as no larger than another's up to this factor."""
Cells = Mapping[Cell, Mapping[str, BenchRow]]


def main() -> None:
    """Write the tables to stdout."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".csv")
    cells: dict[Cell, dict[str, BenchRow]] = {}
    for row in read_rows(path):
        cells.setdefault(row.cell, {})[row.method] = row
    print("|regime|claim|cells|mean|median|least|most|below|holds|\n|---|---|---|---|---|---|---|---|---|")
    for regime in dict.fromkeys(regime for regime, _ in cells):
        own = {cell: found for cell, found in cells.items() if cell[0] == regime}
        for name, (ratios, mean, least) in claims(own).items():
            print(claim_line(regime, name, ratios, mean, least))
    print("\nRates in TFLOP/s, bfloat16, 16k tokens of 2048 columns: ours / cuDNN / FlashAttention-4 / flash\n")
    print(rates(cells))
    print("\nMean relative error of each gradient, and in how many cells it is larger than flash's\n")
    print(errors(cells))
    failed = [f"{regime} {problem} {row.method}: {row.status}" for (regime, problem), row in untimed(cells)]
    print("\n".join(["\nWithout a time:", *failed]) if failed else "\nEvery method has a time in every cell.")


def claims(cells: Cells) -> dict[str, tuple[list[tuple[float, str]], float, float]]:
    """Claim -> the ratios with their problems, the geometric mean that is claimed, and the least ratio."""
    best = [
        (min(found[name].median_us or 1e9 for name in RIVALS if name in found) / found[SERVED].median_us, str(cell[1]))
        for cell, found in cells.items()
        if SERVED in found and found[SERVED].median_us
    ]
    found = {
        "cuDNN's time over ours": (ratios(cells, CUDNN, OURS), 1.05, 0.90),
        "FlashAttention-4's time over ours": (ratios(cells, FLASH_4, OURS), 0.92, 0.85),
        "the fastest rival's time over what is served": (best, 0.0, 0.995),
        "our time over that of a fixed order of sums": (ratios(cells, OURS, FIXED), 1 / 1.15, 0.0),
    }
    return {name: each for name, each in found.items() if each[0]}


def ratios(cells: Cells, above: str, below: str) -> list[tuple[float, str]]:
    """The time of one method over another's, in each cell that has both, with the problem."""
    pairs = [(cell[1], found.get(above), found.get(below)) for cell, found in cells.items()]
    return [(a.median_us / b.median_us, str(p)) for p, a, b in pairs if a and b and a.median_us and b.median_us]


def claim_line(regime: str, name: str, found: list[tuple[float, str]], mean: float, least: float) -> str:
    """A line of the table of claims. That of a fixed order of sums is about the median, the others about the mean."""
    values = [ratio for ratio, _ in found]
    middle = statistics.median(values)
    reached = middle if name.endswith("sums") else statistics.geometric_mean(values)
    short = sorted(each for each in found if each[0] < least)
    holds = "yes" if reached >= mean and not short else "no"
    named = f"{len(short)}" + (
        f": {'; '.join(f'{problem} {ratio:.3f}' for ratio, problem in short[:3])}" if short else ""
    )
    figures = (statistics.geometric_mean(values), middle, min(values), max(values))
    return f"|{regime}|{name}|{len(values)}|{'|'.join(f'{each:.3f}' for each in figures)}|{named}|{holds}|"


def rates(cells: Cells) -> str:
    """The rates of large problems in bfloat16."""
    lengths = sorted({p.seq_q for _, p in cells})
    lines = [f"|regime, problem|{'|'.join(f'S={each}' for each in lengths)}|", "|---" * (len(lengths) + 1) + "|"]
    kinds: dict[str, dict[int, str]] = {}
    for (regime, p), found in cells.items():
        if p.dtype == "bfloat16" and p.batch * p.seq_q == 16384 and p.heads * p.head_dim == 2048:
            name = f"{regime}, D={p.head_dim} {'causal' if p.causal else 'full'}"
            order = (OURS, CUDNN, FLASH_4, FLASH)
            text = "/".join(
                f"{found[each].tflops:.0f}" if each in found and found[each].tflops else "-" for each in order
            )
            kinds.setdefault(name, {})[p.seq_q] = text
    lines += [f"|{name}|{'|'.join(found.get(each, '') for each in lengths)}|" for name, found in kinds.items()]
    return "\n".join(lines)


def errors(cells: Cells) -> str:
    """The mean error of each gradient by method and type, and the cells in which it is larger than flash's."""
    lines = ["|method|type|dQ|dK|dV|", "|---|---|---|---|---|"]
    for method in (OURS, FIXED, *RIVALS):
        for dtype in ("float16", "bfloat16"):
            pairs = [
                (apart(found[method]), apart(found[FLASH]) if FLASH in found else {})
                for (_, p), found in cells.items()
                if p.dtype == dtype and method in found and found[method].output_errs
            ]
            if pairs:
                columns = (
                    column([(own[name], flash.get(name)) for own, flash in pairs]) for name in ("dQ", "dK", "dV")
                )
                lines.append(f"|{method}|{dtype}|{'|'.join(columns)}|")
    return "\n".join(lines)


def apart(row: BenchRow) -> dict[str, float]:
    """The error of each gradient."""
    return {name: float(error) for name, error in (each.split("=") for each in row.output_errs.split())}


def column(pairs: list[tuple[float, float | None]]) -> str:
    """The mean of some errors, and how many are larger than flash's."""
    larger = sum(other is not None and own > NOISE * other for own, other in pairs)
    return f"{statistics.geometric_mean(own for own, _ in pairs):.3g} ({larger} of {len(pairs)})"


def untimed(cells: Cells) -> Iterable[tuple[Cell, BenchRow]]:
    """The rows without a time."""
    return [(cell, row) for cell, found in cells.items() for row in found.values() if not row.median_us]


if __name__ == "__main__":
    main()
