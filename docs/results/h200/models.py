"""The other implementations that the shipped sm_90 table has times of, a CSV line for each problem and implementation.

python docs/results/h200/models.py > models.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from tiledsched.kernels.attention import Attention
from tiledsched.rivals.offers import pays
from tiledsched.store.exchange import read_table

TABLE = Path(__file__).parents[3] / "tuning_db" / "tables" / "attention" / "sm_90.json"
COLUMNS = (
    "suite",
    "problem",
    "left_out",
    "rival",
    "ours_us",
    "rival_us",
    "ratio",
    "ratio_low",
    "ratio_high",
    "ours_gbps",
    "serves",
    "versions",
)


def main() -> None:
    """Write the lines to stdout."""
    suites: dict[str, str] = {}
    for name in Attention.suites:
        if name != "models":
            suites |= {each.id: name for each in Attention.suite(name) if each.id not in suites}
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(COLUMNS)
    for entry in read_table(TABLE).entries:
        problem = entry.problem
        for each in entry.rivals or ():
            if each.ours_us:
                lines.writerow(
                    [
                        suites.get(problem.id, ""),
                        problem,
                        "no",
                        each.name,
                        round(each.ours_us, 2),
                        round(each.median_us or 0, 2),
                        round(each.ratio or 0, 4),
                        round(each.ratio_low or 0, 4),
                        round(each.ratio_high or 0, 4),
                        round(problem.gbps(each.ours_us)),
                        "yes" if pays(each, Attention) else "no",
                        f"{each.version} tileiras {entry.compiler}",
                    ]
                )


if __name__ == "__main__":
    main()
