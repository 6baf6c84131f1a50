"""A quick tune of many products with epilogues, whose kernels borrow the tables of plain products.

On each problem a few schedules race: what is served today, what won on near problems of the plain product, and schedules one or
two knobs away from these, the most promising of each shape by the losses that these problems predict. All programs are compiled
ahead, in the order of the problems, so that those of later problems are built while one is measured. Rivals are timed next to the
winner and may serve in its place. All is stored as it is measured.

`tiledsched tune` also searches, and runs each winner on small problems at the borders of its tiles. This leaves that to the GPU
suite, which does it with everything that ships.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tiledsched.build.pool import default_jobs
from tiledsched.core.config import load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import TiledschedError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.measure.runner import Measurement
from tiledsched.rivals.offers import measured_offers
from tiledsched.serve.entries import lent_entries
from tiledsched.serve.transfer import nearby
from tiledsched.store.records import Entry
from tiledsched.tuning.builder import Program
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.prior import Incumbents
from tiledsched.tuning.race import RaceResult, Rules
from tiledsched.tuning.resources import Tools
from tiledsched.tuning.search import ProblemSearch, TuneContext
from tiledsched.tuning.session import Session

HELD = ("GROUP_M", "LATENCY", "occupancy", "pdl", "PAD")
"""Knobs that make no shape of their own, and keep the values that won."""
LEADERS, SHAPES, STORED_BOTH_WAYS = 6, 7, 2
"""Winners whose neighbours are considered, shapes that race, and those of them that race with either way to store results."""
UNFINISHED = 2
"""Programs of a problem that are left out where they compile longer than all others."""
RULES = Rules(short_factor=2, most_rounds=30)
"""Half as many samples as a tune takes."""
RIVALS = ("torch", "torch_compile", "cublas_fused")
"""Columns for the kernel's rivals."""
REGIME = "burst"
Item = TypeVar("Item")


def promising(
    problem: Problem, served: Schedule, entries: Iterable[Entry], space: SearchSpace, device_name: str = ""
) -> list[Schedule]:
    """The schedules that race on a problem: what is served first, then the most promising.

    Args:
        problem: what is tuned.
        served: what is served today.
        entries: those of the plain product.
        space: of the arch.
        device_name: of the GPU.
    """
    kind = problem.declaration.similarity.kind
    alike = [each for each in entries if kind(each.problem) == kind(problem)]
    near = nearby(problem, alike, space, arch_spec(space.arch, device_name))
    if near is None:
        return [served]
    losses = {each: near.mean_loss(each) for _, named in near.namers for each in named}
    for each in sorted(losses, key=lambda each: (losses[each], each.id))[:LEADERS]:
        for other in space.neighbours(each, problem, pinned=HELD):
            if other not in losses and not space.violations(other, problem):
                losses[other] = near.mean_loss(other)
    shapes: dict[tuple[Any, ...], Schedule] = {}
    for each in sorted(losses, key=lambda each: (losses[each], each.id)):
        shapes.setdefault(tuple(value for name, value in each.items() if name not in (*HELD, "TMA_STORE")), each)
    found = [served, *list(shapes.values())[:SHAPES]]
    both_ways = found[1 : 1 + STORED_BOTH_WAYS] if "TMA_STORE" in served else []
    turned = (each.replace(TMA_STORE=not each["TMA_STORE"]) for each in both_ways)
    return list(dict.fromkeys([*found, *(each for each in turned if not space.unworkable(each, problem))]))


class QuickSearch(ProblemSearch):
    """One race, with fewer samples."""

    def race(self, programs: Sequence[Program], *, regime: str = "", **how: Any) -> RaceResult:
        """By the rules of this file."""
        return super().race(programs, regime=regime, **{"rules": RULES, **how})

    def failure_at_borders(self, winner: Measurement) -> None:
        """Left to the GPU suite."""


def races(
    kernel: KernelClass,
    cells: Sequence[tuple[str, Problem]],
    *,
    arch: str,
    database: str,
    ends_s: float,
    tools: Tools | None = None,
) -> Iterator[dict[str, Any]]:
    """Race on each problem that the database has no measured entry of; yield a row for each as it is stored.

    Args:
        kernel: a product with an epilogue.
        cells: name and problem of each product.
        arch: of the GPU.
        database: path or URL of the database that is written.
        ends_s: the `time.monotonic()` by which the last race is to end; see :func:`in_time`.
        tools: how a session's resources are made.
    """
    began, settings = time.monotonic(), load_settings({"db": database, "rivals": "serve"})

    def say(words: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {words}", file=sys.stderr, flush=True)

    # A core each is left to what measures and to what prepares.
    with Session(arch, settings=settings, jobs=max(1, default_jobs() - 2), tools=tools) as session:
        runner = session.open_runner(kernel, "gpu")
        assert runner is not None
        session.pool.start()
        space, builder, db = session.space(kernel), session.builder(kernel), session.db
        rivals, incumbents = session.open_rivals(kernel, REGIME), Incumbents(session, kernel, settings)
        lent, device_name = lent_entries(settings, {arch}, kernel), runner.device_name
        new = {
            problem: name
            for name, problem in cells
            if not db.entries(arch, kernel.name, problem=problem, provenance="measured")
        }
        say(f"{len(new)} of {len(cells)} products have no measured entry; {session.pool.jobs} compile processes")
        racing: dict[Problem, list[Schedule]] = {}
        keys: dict[Problem, list[tuple[str, str]]] = {}
        programs: dict[tuple[str, str], tuple[Schedule, Problem]] = {}
        for problem in new:
            default = space.default(problem)
            (served, *_) = [*incumbents(problem, device_name), default]
            racing[problem] = promising(problem, served, lent, space, device_name)
            # Programs are told apart by their key: what is built for one problem serves another one.
            wanted = {
                (each.id, builder.problem_class(problem, each).id): (each, problem)
                for each in dict.fromkeys([*racing[problem], default])
            }
            keys[problem], ahead = [*wanted], {key: each for key, each in wanted.items() if key not in programs}
            programs |= ahead
            builder.build_for_each(ahead.values(), leave=len(ahead))
        say(f"{len(programs)} programs are being compiled")
        with session.noted_run({"kernel": kernel.name, "study": "product_races"}) as run_id:
            context = TuneContext(
                builder,
                space,
                TuneOptions(effort="race", regime=REGIME),
                run_id=run_id,
                runner=runner,
                served=lambda problem, _: racing[problem],
                rivals=rivals.race if rivals else None,
            )
            if rivals and new:
                rivals.versions(next(iter(new)))  # torch is imported while programs are compiled
                say("the process that times rivals is there")
            for problem, name in in_time(new.items(), ends_s):
                at = time.monotonic()
                builder.build_for_each([programs[key] for key in keys[problem]], leave=UNFINISHED)
                racing[problem] = [each for each in racing[problem] if builder.record(each, problem)]
                built_s = time.monotonic() - at
                try:
                    result = QuickSearch(context, runner, problem, math.inf).run()
                except TiledschedError as error:
                    say(f"{name}: {error}")
                    continue
                seconds = time.monotonic() - at
                say(f"{name}: {seconds:.1f} s, of which {built_s:.1f} s for programs")
                yield {"product": name, **row_of(result.entry), "seconds": round(seconds, 1)}


def in_time(items: Iterable[Item], ends_s: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Item]:
    """The items, until one that takes as long as the longest so far would end after `ends_s` by the clock. The first, which
    imports and warms up what all need, does not count."""
    took: list[float] = []
    for item in items:
        at = clock()
        if at + max(took[1:], default=0.0) > ends_s:
            print(f"no time left for {item} and what follows", file=sys.stderr, flush=True)
            return
        yield item
        took.append(clock() - at)


def row_of(entry: Entry) -> dict[str, Any]:
    """What a race found: our time in microseconds, each rival's over ours, what serves, and the schedule."""
    times = {each.name: each for each in entry.rivals or ()}
    ours = [each.ours_us for each in times.values() if each.ours_us]
    serving = [*(each.name for each in measured_offers(entry, "")), "own"]
    return {
        "own_us": round(ours[0], 2) if ours else "",
        **{
            name: (round(times[name].ratio or 0.0, 4) if not times[name].failure else times[name].failure)
            if name in times
            else ""
            for name in RIVALS
        },
        "serves": serving[0],
        "programs": entry.candidates,
        "margin": round(entry.margin, 4) if entry.margin is not None else "",
        "schedule": entry.schedule.short(),
    }
