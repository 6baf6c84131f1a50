"""What a newcomer's quick tune finds: ``python -m docs.studies.search.fresh --csv fresh.csv``, on a GPU.

For each problem, none of which is in a shipped table or landscape: what is served without tuning; what ``tiledsched tune --effort
quick`` finds from an empty database, and the seconds of its whole process; and what a thorough search with neighbours finds from
another empty database. Then all three are raced afresh, interleaved, so that their times may be compared.

With ``--seconds`` instead: only the seconds of the quick tunes; two at a time on one host hold each other up.
With ``--equal EFFORT``: what that effort finds with and without neighbours, from empty databases and of as many programs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from docs.studies.flags import flag, parser_with
from tiledsched.core.config import load_settings
from tiledsched.core.files import csv_text, write_whole
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.serve.entries import load_table
from tiledsched.store.db import TuningDB
from tiledsched.tuning import session as tuning
from tiledsched.tuning.options import EFFORTS

ARCH = "sm_90"
PROBLEMS = (
    "attention seq_q=6144,seq_k=6144,head_dim=128,dtype=float16,causal=no,batch=2,heads=16,kv_heads=16",
    "attention seq_q=6144,seq_k=6144,head_dim=128,dtype=float16,causal=yes,batch=2,heads=16,kv_heads=16",
    "attention seq_q=2111,seq_k=2111,head_dim=128,dtype=bfloat16,causal=yes,batch=4,heads=16,kv_heads=16",
    "attention seq_q=3333,seq_k=3333,head_dim=64,dtype=float16,causal=no,batch=2,heads=24,kv_heads=24",
    "attention seq_q=5000,seq_k=5000,head_dim=128,dtype=bfloat16,causal=yes,batch=1,heads=32,kv_heads=8",
    "attention seq_q=3072,seq_k=3072,head_dim=80,dtype=float16,causal=yes,batch=2,heads=20,kv_heads=20",
    "attention seq_q=5120,seq_k=5120,head_dim=96,dtype=bfloat16,causal=no,batch=1,heads=24,kv_heads=24",
    "attention seq_q=1,seq_k=12000,head_dim=128,dtype=float16,causal=no,batch=4,heads=32,kv_heads=8",
    "attention seq_q=1,seq_k=3000,head_dim=128,dtype=bfloat16,causal=no,batch=64,heads=32,kv_heads=8",
    "attention seq_q=4096,seq_k=77,head_dim=64,dtype=float16,causal=no,batch=2,heads=10,kv_heads=10",
    "matmul m=3000,n=4000,k=5000,dtype=bfloat16",
    "matmul m=777,n=8192,k=4096,dtype=float16,b_layout=column",
    "matmul m=6144,n=5120,k=7168,dtype=bfloat16",
    "matmul m=64,n=11008,k=4096,dtype=bfloat16,b_layout=column",
    "rms_norm rows=5000,columns=7168,dtype=bfloat16,residual=no",
    "softmax rows=10000,columns=3000,dtype=bfloat16",
)
COLUMNS = (
    "kernel",
    "problem",
    "served_before_us",
    "quick_us",
    "quick_seconds",
    "thorough_us",
    "thorough_seconds",
    "provenance_before",
    "device",
)

SECONDS_COLUMNS = ("kernel", "problem", "quick_seconds")
EQUAL_COLUMNS = (
    "kernel",
    "problem",
    "effort",
    "plain_us",
    "plain_seconds",
    "neighbours_us",
    "neighbours_seconds",
    "device",
)


def read_problem(words: str) -> Problem:
    """One of `PROBLEMS` as a problem."""
    name, text = words.split()
    given = (part.split("=") for part in text.split(","))
    flags = {"yes": True, "no": False}
    return kernel_named(name).problem(
        **{key: int(word) if word.isdigit() else flags.get(word, word) for key, word in given}
    )


def tune(words: str, db: Path, *flags: str, jobs: int) -> tuple[Schedule, float]:
    """The winner of a tune that starts from an empty database, and the seconds that its process took."""
    kernel, problem = words.split()
    started = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tiledsched",
            "tune",
            kernel,
            "--arch",
            ARCH,
            "--runner",
            "gpu",
            "--problem",
            problem,
            "--db",
            str(db),
            "--jobs",
            str(jobs),
            "--json",
            *flags,
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - started
    (entry,) = json.loads(done.stdout)["entries"]
    return Schedule(entry["schedule"]), seconds


def race(problem: Problem, schedules: Mapping[str, Schedule], folder: Path, jobs: int) -> tuple[dict[str, float], str]:
    """Time of each schedule in microseconds, from one interleaved race, and the device."""
    listed = folder / "candidates.json"
    listed.write_text(json.dumps([dict(each) for each in schedules.values()]))
    kernel = kernel_named(problem.kernel)
    tuning.tune(
        kernel,
        [problem],
        arch=ARCH,
        db=str(folder / "race.db"),
        candidates=listed,
        sampler="exhaustive",
        runner="gpu",
        jobs=jobs,
    )
    space = space_for(ARCH, kernel)
    with TuningDB.open(str(folder / "race.db"), read_only=True) as db:
        (line,) = db.landscapes()
        stored = db.measurements(problem, ARCH, line.device_name, "burst", latest=True)
        builds = {
            each.schedule: each.fingerprint
            for each in db.find_builds(kernel.name, kernel.source_hash(), stored[0].toolchain, ARCH).values()
        }
    times = {one.measurement.fingerprint: one.measurement.median_us for one in reversed(stored)}
    return {name: times[builds[space.complete(each)]] for name, each in schedules.items()}, line.device_name


def main() -> None:
    """Print a line for each problem, and write all lines to the file."""
    parser = parser_with(
        flag("--csv", required=True, type=Path),
        flag("--part", default="0/1", help="every how manieth problem, from which on, e.g. 0/2"),
        flag("--thorough-budget", default="40", help="seconds of the thorough search (default: 40)"),
        flag("--equal", metavar="EFFORT", choices=tuple(EFFORTS), help="compare with and without neighbours"),
        flag("--seconds", action="store_true", help="only time the quick tunes"),
        flag("--jobs", type=int, default=16, help="compile processes (default: 16)"),
        description=(__doc__ or "").splitlines()[0],
    )
    options = parser.parse_args()
    start, step = map(int, options.part.split("/"))
    columns = SECONDS_COLUMNS if options.seconds else EQUAL_COLUMNS if options.equal else COLUMNS
    rows = []
    for words in PROBLEMS[start::step]:
        try:
            if options.seconds:
                row = quick_seconds(words, options.jobs)
            elif options.equal:
                row = compare(words, options)
            else:
                row = measure(words, options.thorough_budget, options.jobs)
        except Exception as error:  # the others are still worth having
            print(f"{words}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        rows.append(row)
        write_whole(options.csv, csv_text(rows, columns))
        print(*row.values(), flush=True)


def measure(words: str, budget: str, jobs: int) -> dict[str, object]:
    """One row."""
    problem = read_problem(words)
    name, kernel = problem.kernel, problem.declaration
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        before = load_table(load_settings({"db": str(place / "none.db")}), kernel=kernel, archs={ARCH}).resolve(
            problem, ARCH
        )
        quick, quick_s = tune(words, place / "quick.db", "--effort", "quick", jobs=jobs)
        thorough, thorough_s = tune(
            words, place / "thorough.db", "--effort", "thorough", "--neighbours", "--budget", budget, jobs=jobs
        )
        times, device = race(problem, {"before": before.schedule, "quick": quick, "thorough": thorough}, place, jobs)
    return dict(
        zip(
            COLUMNS,
            (
                name,
                json.dumps(problem.to_json()),
                round(times["before"], 2),
                round(times["quick"], 2),
                round(quick_s, 1),
                round(times["thorough"], 2),
                round(thorough_s, 1),
                before.provenance,
                device,
            ),
            strict=True,
        )
    )


def quick_seconds(words: str, jobs: int) -> dict[str, object]:
    """How long a quick tune takes."""
    problem = read_problem(words)
    with tempfile.TemporaryDirectory() as folder:
        _, seconds = tune(words, Path(folder) / "quick.db", "--effort", "quick", jobs=jobs)
    return dict(zip(SECONDS_COLUMNS, (problem.kernel, json.dumps(problem.to_json()), round(seconds, 1)), strict=True))


def compare(words: str, options: argparse.Namespace) -> dict[str, object]:
    """One row of with and without neighbours."""
    problem = read_problem(words)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        plain, plain_s = tune(words, place / "plain.db", "--effort", options.equal, jobs=options.jobs)
        other, other_s = tune(words, place / "other.db", "--effort", options.equal, "--neighbours", jobs=options.jobs)
        times, device = race(problem, {"plain": plain, "neighbours": other}, place, options.jobs)
    found = (
        problem.kernel,
        json.dumps(problem.to_json()),
        options.equal,
        round(times["plain"], 2),
        round(plain_s, 1),
        round(times["neighbours"], 2),
        round(other_s, 1),
        device,
    )
    return dict(zip(EQUAL_COLUMNS, found, strict=True))


if __name__ == "__main__":
    main()
