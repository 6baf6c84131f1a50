"""Builds the programs that are served where nothing was measured, and writes down which of them spill registers or do not build:
`python -m docs.studies.served_programs FOLDER --arch sm_90 --problems 1500 --minutes 4.5`.

It needs a checkout and the compiler, and no GPU. It draws problems by a seed, looks up what would be served, and builds the first
choice; where that spills or does not build, the next one; and a copy of each such program for the other element type, if that is
of another class. Facts are of a schedule and a class of problems that spill alike (`Kernel.spill_class`), and hold for all of the
class. Run it under each compiler that the package takes, into one folder: a later run adds to `FOLDER/KERNEL/spills.json`. Copy
that file to `tuning_db/model/KERNEL/` and run `python -m tiledsched.store.shipped`; lookup reads it from there.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from docs.studies.flags import flag, parser_with
from tiledsched.build.compiler import BuildTask
from tiledsched.build.pool import BuildPool, default_jobs
from tiledsched.build.toolchain import installed_toolchain
from tiledsched.core.config import load_settings
from tiledsched.core.errors import Failure
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.serve.entries import load_table
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.spills import FILE, OF_THE_PROGRAM, classes_of, lost_bytes

Key = tuple[str, str]
"""(schedule id, id of the class of problems)"""
Outcomes = dict[Key, int]
"""What came of each build: the bytes that it spills, where these may cost time, else 0; `DOES_NOT_BUILD` where it failed."""
HEAD_DIMS = (40, 64, 64, 72, 80, 96, 96, 112, 128, 128, 128, 160, 192, 256)
FIRST = (
    {"batch": 4, "heads": 32, "kv_heads": 32, "seq_q": 1500, "seq_k": 1500, "head_dim": 96, "causal": True},
    {"batch": 3, "heads": 5, "kv_heads": 5, "seq_q": 777, "seq_k": 777, "head_dim": 128},
    {"batch": 3, "heads": 5, "kv_heads": 5, "seq_q": 3000, "seq_k": 3000, "head_dim": 64, "causal": True},
)
"""Problems of attention that are looked at before those that are drawn: untuned ones that were slow once."""


def attention(rng: random.Random) -> dict[str, Any]:
    """A problem of attention: square or with few rows, round lengths and odd ones, and in a third of all an optional feature."""
    kv_heads, group = rng.choice((1, 2, 4, 5, 8, 8, 12, 16, 24, 32)), rng.choice((1, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8))
    length = rng.choice((rng.randint(65, 9000), 64 * rng.randint(2, 256), rng.randint(65, 2000)))
    values: dict[str, Any] = {
        "batch": rng.choice((1, 1, 2, 3, 4, 8, 16, 32)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "seq_q": length,
        "seq_k": length,
        "head_dim": rng.choice(HEAD_DIMS),
        "dtype": rng.choice(("float16", "bfloat16")),
        "causal": rng.random() < 0.5,
    }
    shape = rng.random()
    if shape < 0.3:
        values |= {"seq_q": rng.choice((1, 1, 1, 2, 4, 8, 16)), "alignment": "bottom_right"}
    elif shape < 0.4:
        values |= {"seq_q": rng.randint(65, max(66, length)), "alignment": "bottom_right"}
    if rng.random() < 0.03:
        values["value_dim"] = rng.choice((64, 128, 256))
    feature = rng.random()
    if feature < 0.08 and values["causal"]:
        values["window"] = rng.choice((64, 128, 512, 1024, 4096))
    elif feature < 0.11:
        values["softcap"] = True
    elif feature < 0.14 and values["causal"]:
        values |= {"sinks": True, "window": rng.choice((0, 128))}
    elif feature < 0.18:
        values["lengths"] = True
    elif feature < 0.20:
        values["starts"] = True
    elif feature < 0.25 and shape >= 0.4:
        values |= {"packed": rng.choice((2, 4, 8, 16)), "batch": 1}
    elif feature < 0.32:
        page = rng.choice((16, 16, 32, 64, 128, 256))
        values |= {"page": page, "lengths": True, "seq_k": -(-length // page) * page, "alignment": "bottom_right"}
    elif feature < 0.36:
        values["lse"] = True
    return values


def matmul(rng: random.Random) -> dict[str, Any]:
    """A product: sizes from a few rows to 16k, round and odd, in every layout."""

    def size() -> int:
        exponent = rng.uniform(3, 14)
        return rng.choice((1 << round(exponent), 64 * max(1, round(2**exponent / 64)), round(2**exponent)))

    layouts = (rng.choice(("row", "row", "column")), rng.choice(("row", "row", "column")))
    values = {"m": size(), "n": size(), "k": size(), "dtype": rng.choice(("float16", "bfloat16"))}
    return {**values, "a_layout": layouts[0], "b_layout": layouts[1]}


def rows(rng: random.Random) -> dict[str, Any]:
    """A matrix whose rows are normalised: of widths that models have, and others."""
    columns = rng.choice((rng.randint(32, 16384), 128 * rng.randint(1, 256), rng.choice((768, 2048, 4096, 8192))))
    return {"rows": 1 << rng.randint(0, 15), "columns": columns, "dtype": rng.choice(("float16", "bfloat16"))}


def normalised(rng: random.Random) -> dict[str, Any]:
    """The sizes that `rows` draws, half of them with a residual."""
    return {**rows(rng), "residual": rng.random() < 0.5}


DRAWN: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "attention": attention,
    "matmul": matmul,
    "rms_norm": normalised,
    "softmax": rows,
}


def drawn(kernel: KernelClass, seed: int, count: int) -> Iterator[Problem]:
    """So many problems of a kernel, the same ones for one seed, each as lookup rounds it to answer for all of about its size."""
    rng = random.Random(f"{kernel.name} {seed}")
    firsts = FIRST if kernel.name == "attention" else ()
    drawn = (DRAWN[kernel.name](rng) for _ in range(count - len(firsts)))
    yield from (kernel.similarity.bucketed(kernel.problem(**values)) for values in (*firsts, *drawn))


def choices(table: LookupTable, problem: Problem, arch: str) -> tuple[Schedule, ...]:
    """The choices for a problem that was not measured, in order; none where one was, or there is no second choice."""
    served = table.resolve(problem, arch)
    return (served.schedule, *served.alternatives) if served.alternatives else ()


def build_all(
    kernel: KernelClass, arch: str, wanted: Sequence[tuple[Problem, tuple[Schedule, ...]]], pool: BuildPool, ends: float
) -> Outcomes:
    """What came of the programs that serve some problems: of each the choices in turn, until one is sound."""
    found = Outcomes()
    waiting: dict[Key, list[tuple[Problem, tuple[Schedule, ...]]]] = {}

    def key_of(problem: Problem, schedule: Schedule) -> Key:
        return schedule.id, classes_of(problem, schedule, arch)[0]

    def task_of(problem: Problem, schedule: Schedule) -> BuildTask:
        return BuildTask(kernel=kernel.locator(), schedule=schedule, problem=problem, arch=arch)

    left = [each for each in wanted if each[1]]
    while left:
        waiting.clear()
        for problem, each in left:
            waiting.setdefault(key_of(problem, each[0]), []).append((problem, each))
        # Those that serve most problems come first, in case that time runs out.
        fresh = sorted((key for key in waiting if key not in found), key=lambda key: (-len(waiting[key]), key))
        tasks = {task_of(waiting[key][0][0], waiting[key][0][1][0]): key for key in fresh}
        print(f"{kernel.name} {arch}: {len(left)} choices of problems, {len(tasks)} programs to build", flush=True)
        build(tasks, pool, found, ends)
        # A program that spills for one element type is built for the other, too: most spill for both.
        twins: dict[BuildTask, Key] = {}
        for task, key in tasks.items():
            if found.get(key):
                other = "bfloat16" if task.problem.values["dtype"] == "float16" else "float16"
                twin = task.problem.replace(dtype=other)
                if (its := key_of(twin, task.schedule)) not in found:
                    twins[task_of(twin, task.schedule)] = its
        build(twins, pool, found, ends)
        left = [(problem, rest) for key, of in waiting.items() if found.get(key) for problem, (_, *rest) in of if rest]  # type: ignore[misc]
        left = [(problem, tuple(rest)) for problem, rest in left]
        if time.monotonic() > ends:
            break
    return found


def build(tasks: dict[BuildTask, Key], pool: BuildPool, found: Outcomes, ends: float) -> None:
    """Build programs until `ends` (`time.monotonic()`), and note what came of them."""
    if not tasks or time.monotonic() > ends:
        return
    for built in pool.build(tasks):
        key = tasks[built.task]
        outcome = built.artifact.facts if built.artifact is not None else built.failure
        assert outcome is not None
        if isinstance(outcome, Failure):
            print(f"{built.task.problem} {built.task.schedule.short()}: {outcome.message}", flush=True)
        if not isinstance(outcome, Failure) or outcome.kind in OF_THE_PROGRAM:
            found[key] = lost_bytes(outcome)
        if time.monotonic() > ends:
            return


def add(path: Path, arch: str, compiler: str, outcomes: Outcomes) -> int:
    """Add what was found to a file of spills; returns how many programs it then names for the arch and compiler. What an
    earlier run found of other programs stays, and of programs built again the new outcome counts."""
    archs = json.loads(path.read_text())["archs"] if path.is_file() else {}
    known = archs.setdefault(arch, {}).setdefault(compiler, {})
    for (schedule, of), outcome in outcomes.items():
        if outcome:
            known.setdefault(schedule, {})[of] = outcome
        elif of in known.get(schedule, {}):
            del known[schedule][of]
    archs[arch][compiler] = {schedule: classes for schedule, classes in known.items() if classes}
    path.parent.mkdir(parents=True, exist_ok=True)
    in_order = json.loads(json.dumps(archs, sort_keys=True))
    path.write_text(json.dumps({"schema_version": 1, "archs": in_order}, indent=1) + "\n")
    return sum(map(len, archs[arch][compiler].values()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, look up, build and write."""
    parser = parser_with(
        flag("folder", type=Path, help="where KERNEL/spills.json is written, or added to"),
        flag("--arch", default="sm_90", help="archs, between commas (sm_90)"),
        flag("--kernel", default=",".join(DRAWN), help="kernels, between commas (all)"),
        flag("--problems", type=int, default=600, help="problems of each kernel to draw (600)"),
        flag("--seed", type=int, default=0, help="of the draw (0)"),
        flag("--jobs", type=int, default=default_jobs(), help="compile processes (one for each CPU)"),
        flag("--minutes", type=float, default=60.0, help="time after which no more is built (60)"),
        flag("--count", action="store_true", help="count the programs and build none"),
        prog="python -m docs.studies.served_programs",
        description="programs served by transfer that spill registers",
    )
    options = parser.parse_args(arguments)
    ends, compiler = time.monotonic() + 60 * options.minutes, installed_toolchain().tileiras
    with BuildPool(options.jobs) as pool:
        if not options.count:
            pool.start()
        for arch in options.arch.split(","):
            for kernel in map(load_kernel, options.kernel.split(",")):
                table = load_table(load_settings(), kernel=kernel, archs={arch})
                wanted = [
                    (problem, choices(table, problem, arch))
                    for problem in dict.fromkeys(drawn(kernel, options.seed, options.problems))
                ]
                if options.count:
                    firsts = {(s[0].id, classes_of(p, s[0], arch)[0]) for p, s in wanted if s}
                    print(f"{arch} {kernel.name}: {sum(bool(s) for _, s in wanted)} problems, {len(firsts)} programs")
                    continue
                outcomes = build_all(kernel, arch, wanted, pool, ends)
                named = add(options.folder / kernel.name / FILE, arch, compiler, outcomes)
                bad = sum(map(bool, outcomes.values()))
                print(f"{arch} {kernel.name} {compiler}: {len(outcomes)} built, {bad} spill or fail, {named} named")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
