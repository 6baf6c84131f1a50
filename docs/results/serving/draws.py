"""tiledsched with two more suites, drawn_24 and drawn_25, of problems that nobody looked at.

    S="bench --suite drawn_24,drawn_25 --rounds 10"
    M=tiledsched,served,torch_cudnn,torch_flash,torch_efficient,flash_attention_4
    python -P docs/results/serving/draws.py $S --methods $M --csv after.csv
    python -P docs/results/serving/draws.py --before $S --methods tiledsched,torch_cudnn --csv before.csv

`--before` hides the thirty problems that `coverage` got on 2026-11-26.
"""

import sys

from tiledsched.cli import main
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.suites import drawn
from tiledsched.serve import entries

BEFORE = 137
"""Problems of `coverage` until then."""

if __name__ == "__main__":
    arguments = sys.argv[1:]
    Attention.suites |= {f"drawn_{seed}": drawn(Attention.problem, seed) for seed in (24, 25)}
    if arguments[:1] == ["--before"]:
        arguments = arguments[1:]
        hidden, read = set(Attention.suite("coverage")[BEFORE:]), entries.read_entries
        entries.read_entries = lambda path: [entry for entry in read(path) if entry.problem not in hidden]
    sys.exit(main(arguments))
