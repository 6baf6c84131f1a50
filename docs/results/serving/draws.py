"""The `tiledsched` command with two more suites of random problems, `drawn_24` and `drawn_25` (docs/results/serving.md).

    S="bench --suite drawn_24,drawn_25 --rounds 10"
    M=tiledsched,served,torch_cudnn,torch_flash,torch_efficient,flash_attention_4
    python -P docs/results/serving/draws.py $S --methods $M --csv after.csv
    python -P docs/results/serving/draws.py --before $S --methods tiledsched,torch_cudnn --csv before.csv

`--before` hides the entries tuned from 2026-11-26 on, which are thirty problems of the suite `coverage`.
"""

import sys
from datetime import date

from tiledsched.cli import main
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.suites import drawn
from tiledsched.serve import entries

ADDED = date(2026, 11, 26)
"""Entries of this day and later are hidden by `--before`."""

if __name__ == "__main__":
    arguments = sys.argv[1:]
    Attention.suites = Attention.suites | {f"drawn_{seed}": drawn(seed) for seed in (24, 25)}
    if arguments[:1] == ["--before"]:
        arguments = arguments[1:]
        combined = entries.combined
        entries.combined = lambda layers: [entry for entry in combined(layers) if entry.updated_at.date() < ADDED]
    sys.exit(main(arguments))
