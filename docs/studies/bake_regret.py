r"""What a baked tree loses beside the table on problems that it was not fitted to, timed on a GPU.

    python -m docs.studies.bake_regret --csv bake.csv --seconds 80
    python -m docs.studies.bake_regret --summary bake.csv
    python -m docs.studies.bake_regret --dry-run --choices bake.json --db bake.db

The last one needs no GPU, but the compiler: it leaves what was chosen and built in files, which a later run with the same two
flags takes, so that it only times.

A set of problems is baked, with 8 and 16 leaves and with as many as it takes. Then problems between them are drawn, for each of
which the table's choice and those of the trees are launched in turn, out of a cold cache. Sets take turns until the time is up,
which begins when everything is built.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import math
import random
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.studies.flags import flag, parser_with, positive
from tiledsched.bake.baking import Baking, choices
from tiledsched.core.config import load_settings
from tiledsched.core.errors import Failure, TiledschedError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.serve.entries import load_table
from tiledsched.tuning.session import Session

LEAVES = (8, 16, None)
"""The sizes of trees; None for what the table chooses on every problem of the set."""
ROUNDS, LEAST_ROUNDS, ENOUGH_US = 16, 5, 1e5
"""Samples of each choice, taken in turn, and how many suffice once they have taken so long together."""
COLUMNS = ("set", "problem", "choice", "schedule", "median_us", "ratio", "device", "compiler")
TABLE = "table"


@dataclass(frozen=True)
class Set:
    """Problems that are baked, and how others are drawn."""

    kernel: str
    """The kernel's name."""
    asked: Callable[[KernelClass], list[Problem]]
    """The problems of the set; none for all that were measured."""
    draw: Callable[[Problem, random.Random], dict[str, Any]]
    """From a problem of the set to the values that differ in one that is drawn."""


def _steps(first: int, last: int, octave: int, whole: int = 1) -> list[int]:
    """Sizes from one to another, `octave` of them in each octave, as multiples of `whole`."""
    steps = (step / octave for step in range(round(octave * math.log2(last / first)) + 1))
    return sorted({round(first * 2**step / whole) * whole for step in steps})


def _llama_products(kernel: KernelClass) -> list[Problem]:
    weights = sorted({(p.n, p.k) for p in kernel.suite("llama_8b")})
    rows = _steps(1, 16384, 3)
    return [kernel.problem(m=m, n=n, k=k, b_layout="column", dtype="bfloat16") for n, k in weights for m in rows]


def _llama_attention(kernel: KernelClass) -> list[Problem]:
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    prefill = [(b, s) for b in _steps(1, 16, 2) for s in _steps(512, 8192, 3, 64) if b * s <= 1 << 16]
    decode = itertools.product(_steps(1, 128, 2), _steps(1024, 16384, 2, 64))
    return [
        *(kernel.problem(batch=b, seq_q=s, seq_k=s, causal=True, **heads) for b, s in prefill),
        *(kernel.problem(batch=b, seq_q=1, seq_k=s, **heads) for b, s in decode),
    ]


def _between(size: int, rng: random.Random, whole: int = 1) -> int:
    """A size within half an octave of another one."""
    return max(whole, round(size * 2 ** rng.uniform(-0.5, 0.5) / whole) * whole)


def _other_rows(p: Problem, rng: random.Random) -> dict[str, Any]:
    return {"m": _between(p.m, rng)}


def _other_lengths(p: Problem, rng: random.Random) -> dict[str, Any]:
    length, batch = _between(p.seq_k, rng, 64 if p.seq_k % 64 == 0 else 1), _between(p.batch, rng)
    return {"batch": batch, "seq_k": length, "seq_q": length if p.seq_q == p.seq_k else p.seq_q}


SETS: Mapping[str, Set] = {
    "products of llama_8b": Set("matmul", _llama_products, _other_rows),
    "attention of llama_8b": Set("attention", _llama_attention, _other_lengths),
    "matmul, all measured": Set("matmul", lambda kernel: [], _other_rows),
    "rms_norm, all measured": Set("rms_norm", lambda kernel: [], lambda p, rng: {"rows": _between(p.rows, rng)}),
    "attention, all measured": Set("attention", lambda kernel: [], _other_lengths),
}


@dataclass
class Drawn:
    """A drawn problem, and what is chosen for it."""

    problem: Problem
    choices: dict[str, Schedule]


def name_of(leaves: int | None) -> str:
    """What a tree is called."""
    return f"{leaves} leaves" if leaves else "all leaves"


def chosen(name: str, arch: str, count: int, seed: int) -> tuple[list[Drawn], list[str]]:
    """Drawn problems of a set with what the table and the trees choose, and what can be said of the trees without a GPU."""
    of = SETS[name]
    kernel, settings, rng = load_kernel(of.kernel), load_settings(), random.Random(seed)
    complete = space_for(arch, kernel).complete  # sources say nothing of a knob that all schedules leave at rest
    cases = choices(kernel, [arch], of.asked(kernel), settings, losses=True)
    problems = [case.problem for case in cases]
    functions: dict[str, Callable[..., Mapping[str, Any]]] = {}
    said = []
    for leaves in LEAVES:
        baking = Baking(kernel, cases, "docs.studies.bake_regret", leaves)
        text = baking.source()
        namespace: dict[str, Any] = {}
        exec(text, namespace)  # which was made here
        function = functions[name_of(leaves)] = namespace[f"{baking.name}_schedule"]
        facts = [case.names(with_arch=False) for case in cases]
        found = [complete(Schedule(function(**each))) for each in facts]
        kept = sum(schedule == case.served.schedule for schedule, case in zip(found, cases, strict=True))
        texts = [
            f"f({', '.join(f'{key}={value!r}' for key, value in each.items() if key in baking.needed_facts)})"
            for each in facts
        ]
        us = max(min(timeit.repeat(text, globals={"f": function}, number=2000, repeat=5)) * 500 for text in texts)
        said.append(
            f"{name}, {name_of(leaves)}: {baking.said}; {len(text.splitlines())} lines; chooses what the table chooses in "
            f"{kept} of {len(cases)}; at most {us:.2f} us a call"
        )
    table, drawn = load_table(settings, kernel=kernel, archs={arch}), dict[Problem, Drawn]()
    for _ in range(100 * count):
        near = rng.choice(problems)
        if len(drawn) == count:
            break
        try:
            problem = near.replace(**of.draw(near, rng))
        except TiledschedError:
            continue
        if problem in problems or problem in drawn:
            continue
        choices_of = {TABLE: table.resolve(problem, arch).schedule}
        for tree, function in functions.items():
            try:
                choices_of[tree] = complete(Schedule(function(**problem.values)))
            except ValueError:  # which says that no schedule fits
                continue
        drawn[problem] = Drawn(problem, choices_of)
    return list(drawn.values()), said


def build(session: Session, name: str, drawn: Sequence[Drawn]) -> None:
    """Build all choices of a set that are not built."""
    pairs = ((schedule, each.problem) for each in drawn for schedule in set(each.choices.values()))
    session.builder(load_kernel(SETS[name].kernel), 60).build_for_each(pairs)


def saved(drawn: Mapping[str, Sequence[Drawn]]) -> str:
    """Drawn problems of sets as JSON; :func:`loaded` reads it."""
    return json.dumps(
        {
            name: [
                [dict(each.problem.values), {tree: dict(one) for tree, one in each.choices.items()}] for each in some
            ]
            for name, some in drawn.items()
        }
    )


def loaded(text: str) -> dict[str, list[Drawn]]:
    """What :func:`saved` wrote."""
    return {
        name: [
            Drawn(
                load_kernel(SETS[name].kernel).problem(**values), {tree: Schedule(one) for tree, one in found.items()}
            )
            for values, found in some
        ]
        for name, some in json.loads(text).items()
    }


def timed(session: Session, name: str, drawn: Sequence[Drawn]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each problem, which are timed as they are asked for."""
    kernel = load_kernel(SETS[name].kernel)
    builder = session.builder(kernel, 60)
    runner = session.open_runner(kernel, "gpu")
    assert runner is not None
    for each in drawn:
        different = list(dict.fromkeys(each.choices.values()))
        times = dict.fromkeys(different, math.nan)
        programs = builder.programs(different, each.problem, runner.device)
        candidates = builder.candidates(programs)
        if len(candidates) == 1:
            times = dict.fromkeys(programs[0].schedules, 1.0)
        elif candidates:
            runner.begin(each.problem)
            probed = [(one, runner.probe(one)) for one in candidates]
            ready = [one for one, us in probed if not isinstance(us, Failure)]
            spent = sum(us for _, us in probed if not isinstance(us, Failure))
            rounds = min(ROUNDS, max(LEAST_ROUNDS, round(ENOUGH_US / max(spent, 1.0))))
            batches = runner.sample(ready, rounds=rounds, regime="burst")
            for one, batch in zip(ready, batches, strict=True):
                program = next(every for every in programs if every.schedule == one.schedule)
                if not isinstance(batch, Failure):
                    times |= dict.fromkeys(program.schedules, statistics.median(batch.samples_us))
        yield [
            {
                "set": name,
                "problem": str(each.problem),
                "choice": choice,
                "schedule": schedule.short(),
                "median_us": times.get(schedule, math.nan),
                "ratio": times.get(schedule, math.nan) / times.get(each.choices[TABLE], math.nan),
                "device": runner.device.name,
                "compiler": session.toolchain.tileiras,
            }
            for choice, schedule in each.choices.items()
        ]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each set and tree: the time beside the table's choice."""
    lines = [
        "|set|tree|problems|same program|geometric mean|worst|at most 1%|no time|",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, tree in dict.fromkeys((row["set"], row["choice"]) for row in rows if row["choice"] != TABLE):
        mine = [float(row["ratio"]) for row in rows if (row["set"], row["choice"]) == (name, tree)]
        known = [each for each in mine if not math.isnan(each)] or [math.nan]
        mean = statistics.geometric_mean(known)
        lines.append(
            f"|{name}|{tree}|{len(mine)}|{sum(each == 1 for each in known)}|{mean:.4f}|{max(known):.3f}|"
            f"{sum(each <= 1.01 for each in known)}|{len(mine) - len(known)}|"
        )
    return "\n".join(lines)


def main() -> None:
    """Time the sets and print the summary."""
    parser = parser_with(
        flag("--csv", type=Path, help="rows are written here as they are known"),
        flag("--summary", type=Path, help="only print what such a file says; no GPU"),
        flag("--sets", nargs="+", default=list(SETS), choices=list(SETS), help="only these sets"),
        flag("--count", type=positive, default=60, help="problems drawn for each set"),
        flag("--seed", type=positive, default=1, help="of the draws"),
        flag("--seconds", type=positive, default=80, help="for timing, in all"),
        flag("--choices", type=Path, help="file of what is chosen; it is written where it does not exist"),
        flag("--db", type=Path, help="database in which builds are kept"),
        flag("--dry-run", action="store_true", help="only say what is chosen, and build it with --db; no GPU"),
        flag("--arch", default="sm_90", help="e.g. sm_90"),
        prog="python -m docs.studies.bake_regret",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = parser.parse_args()
    if asked.summary:
        with open(asked.summary, encoding="utf-8", newline="") as file:
            print(summary(list(csv.DictReader(file))))
        return
    if asked.choices and asked.choices.exists():
        drawn = loaded(asked.choices.read_text(encoding="utf-8"))
    else:
        drawn = {}
        for name in asked.sets:
            drawn[name], said = chosen(name, asked.arch, asked.count, asked.seed)
            print(*said, f"{name}: {len(drawn[name])} problems drawn", sep="\n", flush=True)
        if asked.choices:
            asked.choices.write_text(saved(drawn), encoding="utf-8")
    if asked.dry_run and not asked.db:
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        session = opened.enter_context(
            Session(asked.arch, settings=load_settings({"db": str(asked.db or f"{folder}/bake.db")}))
        )
        for name, some in drawn.items():
            build(session, name, some)
        if asked.dry_run:
            return
        file = opened.enter_context(open(asked.csv, "w", encoding="utf-8", newline=""))
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        running = {name: timed(session, name, some) for name, some in drawn.items()}
        began, left = time.monotonic(), dict(running)
        print("everything is built", flush=True)
        # A runner serves one kernel at a time, and changing it takes a second: sets take turns in shares of the time.
        for number, (name, each) in enumerate(running.items(), 1):
            until = began + asked.seconds * number / len(running)
            while name in left and time.monotonic() < until:
                found = next(each, None)
                if found is None:
                    del left[name]
                    break
                rows += found
                table.writerows(found)
                file.flush()
    print(summary(rows))


if __name__ == "__main__":
    main()
