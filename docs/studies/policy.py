r"""What the serving policy loses on problems held out, compared with other policies: tables of docs/results/serving.md.

    python -m docs.studies.policy tuning_db/landscapes/attention/*_burst_*.json.xz \
        --table docs/results/serving/sm_90_2026-11-20.json.xz

Every landscape in turn is the problem nobody measured. A policy sees the table without it (*one out*), or without every
entry of the same sequence lengths, head dimension and mask (*likes out*), and its choice is looked up in the landscape.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from docs.studies.flags import flag, parser_with
from docs.studies.landscapes import Landscape, read_landscape, shape_of
from docs.studies.model_agreement import evaluate
from tiledsched.core.device import ArchSpec, arch_spec
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.report.document import Heading, Paragraph, Table, to_markdown
from tiledsched.serve.transfer import NEAR_KIND, OTHER_KIND, ExpectedLoss, TransferParameters, transfer
from tiledsched.store.exchange import read_table
from tiledsched.store.records import Entry

Entries = Sequence[Entry]
Policy = Callable[[Problem, Entries], Schedule | None]
"""From a problem and the entries it may see to a schedule; None where it has none to offer."""
ANY = 99.0
"""A distance above all others."""
GRID = tuple(
    TransferParameters(neighbours=n, reach=r, unnamed=u, model=m)
    for n, r, u, m in itertools.product((3, 4, 6), (0.5, 1.0, 2.0), (0.05, 0.1, 0.2), (0.3, 0.5, 1.0))
)
"""Parameters to choose from. They are chosen for each problem by the other problems, to see how much choosing them on
all flatters.
"""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A policy's choice for one held-out problem."""

    problem: Problem
    """The problem held out."""
    schedule: Schedule
    """The schedule chosen."""
    loss: float
    """Its time over the best time, minus 1."""
    measured: bool
    """Whether this very program was measured there. If not, the loss is the median over the programs that differ in the
    fewest knobs.
    """
    distance: float
    """Distance to the nearest entry that the policy could see."""


class Study:
    """The landscapes of one arch and the table tuned on it."""

    def __init__(self, landscapes: Sequence[Landscape], entries: Entries) -> None:
        archs = {one.arch for one in landscapes}
        if len(archs) != 1 or len({one.regime for one in landscapes}) != 1:
            raise ConfigError("the landscapes are not of one arch and one regime; give files of one of each")
        self.landscapes = list(landscapes)
        self.kernel, self.spec = landscapes[0].problem.declaration, arch_spec(landscapes[0].arch)
        self.space = space_for(self.spec.arch, self.kernel)
        self.entries = [
            entry.replace(schedule=self.space.complete(entry.schedule))
            for entry in entries
            if entry.provenance == "measured" and entry.accum_mode == "fp32"
        ]
        self._codes = {self._code(one.problem, p.schedule): p.fingerprint for one in landscapes for p in one.programs}
        self._codes |= {self._code(entry.problem, entry.schedule): entry.fingerprint for entry in self.entries}

    def judge(self, landscape: Landscape, schedule: Schedule, near: float) -> Judged:
        """Look a choice up: by its schedule, else by its machine code and grid, else by the programs most like it."""
        problem, best = landscape.problem, landscape.best_us
        by_schedule = {program.schedule: program.median_us for program in landscape.programs}
        by_program = {(program.fingerprint, program.grids): program.median_us for program in landscape.programs}
        code = self._codes.get(self._code(problem, schedule), "")
        program = code, self.kernel.grids(problem, schedule, self.spec)
        us = by_schedule.get(schedule, by_program.get(program))
        measured = us is not None
        if us is None:
            apart = {
                p.schedule: sum(p.schedule[name] != schedule[name] for name in schedule) for p in landscape.programs
            }
            fewest = min(apart.values())
            us = statistics.median(by_schedule[other] for other, count in apart.items() if count == fewest)
        return Judged(problem=problem, schedule=schedule, loss=us / best - 1.0, measured=measured, distance=near)

    def run(self, policy: Policy, *, likes_out: bool = False) -> list[Judged]:
        """The policy's choice for every landscape for which it has one."""
        judged = []
        for landscape in self.landscapes:
            seen = [
                e
                for e in self.entries
                if e.problem != landscape.problem
                and not (likes_out and shape_of(e.problem) == shape_of(landscape.problem))
            ]
            schedule = policy(landscape.problem, seen)
            if schedule is not None:
                near = min(
                    (
                        self.kernel.similarity.distance(e.problem, landscape.problem)
                        for e in seen
                        if _same_kind(e, landscape.problem)
                    ),
                    default=math.inf,
                )
                judged.append(self.judge(landscape, schedule, near))
        return judged

    def policy(self, parameters: TransferParameters = NEAR_KIND) -> Policy:
        """The policy that is served, restricted to problems of one kind."""
        return _among(_same_kind, self.space, self.spec, parameters)

    def policies(self) -> Mapping[str, Policy]:
        """Name -> policy: the one that is served, and those it is compared with."""
        return {
            "served": self.policy(),
            "without the model": self.policy(replace(NEAR_KIND, model=0.0)),
            "nearest entry only, with the model": self.policy(replace(NEAR_KIND, neighbours=1)),
            "winner of the nearest problem": self._nearest(self.kernel.similarity.distance),
            **{
                f"winner of the nearest by {word}": self._nearest(_octaves(of)) for word, of in self._features().items()
            },
            "tree on length and blocks": self._tree,
            "the default": lambda problem, _: self.space.default(problem),
        }

    def crossings(self) -> Mapping[str, Policy]:
        """Name -> the served policy, restricted to problems that differ in what the name says."""

        def tells(mask: bool, columns: bool) -> Callable[[Entry, Problem], bool]:
            return lambda e, p: ((e.problem.causal != p.causal), (e.problem.tile_d != p.tile_d)) == (mask, columns)

        only_attention = {"another mask": tells(True, False), "another head dimension": tells(False, True)}
        ways = {
            **(only_attention if "tile_d" in self.kernel.derived else {}),
            "any other kind": lambda e, p: not _same_kind(e, p),
            "another dtype only": lambda e, p: _same_kind(e, p) and e.problem.dtype != p.dtype,
            "the same dtype only": lambda e, p: _same_kind(e, p) and e.problem.dtype == p.dtype,
        }
        return {
            name: _among(way, self.space, self.spec, NEAR_KIND if name.endswith("only") else OTHER_KIND)
            for name, way in ways.items()
        }

    def nested(self, *, likes_out: bool) -> list[Judged]:
        """The served policy, with parameters that the other problems choose for each problem."""
        runs = [self.run(self.policy(parameters), likes_out=likes_out) for parameters in GRID]
        chosen = []
        for i in range(len(self.landscapes)):
            others = [sum(math.log1p(one.loss) for j, one in enumerate(run) if j != i) for run in runs]
            chosen.append(runs[int(np.argmin(others))][i])
        return chosen

    def _features(self) -> Mapping[str, Callable[[Problem], float]]:
        """Name -> feature by which the policies that were not taken compare problems."""
        lengths = {"key length": lambda p: float(p.seq_k)} if "seq_k" in self.kernel.fields else {}
        operations = {"operations": lambda p: float(p.flops)} if self.landscapes[0].problem.flops else {}
        return {**lengths, **operations, **({} if operations else {"bytes": lambda p: float(p.min_bytes)})}

    def _code(self, problem: Problem, schedule: Schedule) -> tuple[str, Schedule]:
        """What the machine code depends on."""
        from tiledsched.core.launches import problem_class

        return problem_class(self.kernel, problem, schedule, self.spec).id, schedule

    def _nearest(self, apart: Callable[[Problem, Problem], float]) -> Policy:
        def choose(problem: Problem, seen: Entries) -> Schedule | None:
            usable = [e for e in seen if _same_kind(e, problem) and not self.space.violations(e.schedule, problem)]
            return min(usable, key=lambda e: (apart(e.problem, problem), e.problem)).schedule if usable else None

        return choose

    def _tree(self, problem: Problem, seen: Entries) -> Schedule | None:
        """A policy that grows a tree of two leaves for each kind, on the losses in the landscapes that it may see."""
        known = {entry.problem for entry in seen}
        grown = [
            one
            for one in self.landscapes
            if one.problem in known and self.kernel.similarity.kind(one.problem) == self.kernel.similarity.kind(problem)
        ]
        winners = {
            e.schedule for e in seen if _same_kind(e, problem) and not self.space.violations(e.schedule, problem)
        }

        def leaf(members: Sequence[Landscape]) -> tuple[float, Schedule]:
            sums = {w: sum(math.log1p(self.judge(one, w, 0.0).loss) for one in members) for w in winners}
            best = min(sums, key=lambda w: (sums[w], w.id))
            return sums[best], best

        def halves(feature: Callable[[Problem], float], at: float) -> tuple[list[Landscape], list[Landscape]]:
            return [one for one in grown if feature(one.problem) <= at], [
                one for one in grown if feature(one.problem) > at
            ]

        if not grown or not winners:
            return None
        total, choice = leaf(grown)
        features = (
            [lambda p: p.seq_k, lambda p: p.seq_q * p.batch * p.heads]
            if "tile_d" in self.kernel.derived
            else [lambda p: p.min_bytes]
        )
        for feature in features:
            for at in sorted({feature(one.problem) for one in grown})[:-1]:
                (low_sum, low), (high_sum, high) = (leaf(half) for half in halves(feature, at))
                if low_sum + high_sum < total - 1e-9:
                    total, choice = low_sum + high_sum, low if feature(problem) <= at else high
        return choice


def _among(
    tells: Callable[[Entry, Problem], bool], space: SearchSpace, spec: ArchSpec, parameters: TransferParameters
) -> Policy:
    def choose(problem: Problem, seen: Entries) -> Schedule | None:
        found = transfer(problem, [e for e in seen if tells(e, problem)], space, spec, parameters)
        return found.schedule if found else None

    return choose


def _same_kind(entry: Entry, problem: Problem) -> bool:
    kind = problem.declaration.similarity.kind
    return bool(kind(entry.problem) == kind(problem))


def _octaves(of: Callable[[Problem], float]) -> Callable[[Problem, Problem], float]:
    return lambda a, b: abs(math.log2(of(a) / of(b)))


def summary(judged: Sequence[Judged]) -> ExpectedLoss:
    """Geometric mean and maximum of the losses."""
    losses = [one.loss for one in judged]
    return ExpectedLoss(
        mean=math.exp(statistics.fmean(map(math.log1p, losses))) - 1.0, worst=max(losses), cases=len(losses)
    )


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def _row(name: str, one_out: Sequence[Judged], likes_out: Sequence[Judged]) -> tuple[str, ...]:
    cells = [name]
    for judged in (one_out, likes_out):
        sure = [one for one in judged if one.measured]
        cells += [
            str(len(sure)),
            _percent(summary(sure).mean) if sure else "-",
            _percent(summary(sure).worst) if sure else "-",
            _percent(summary(judged).mean),
            _percent(summary(judged).worst),
        ]
    return tuple(cells)


HEAD = (
    "policy",
    "one out: looked up",
    "mean",
    "worst",
    "mean of all",
    "worst of all",
    "likes out: looked up",
    "mean",
    "worst",
    "mean of all",
    "worst of all",
)


def document(study: Study) -> str:
    """All tables, as Markdown."""
    rows = [
        _row(name, study.run(policy), study.run(policy, likes_out=True)) for name, policy in study.policies().items()
    ]
    rows.insert(
        1, _row("served, parameters chosen by the others", study.nested(likes_out=False), study.nested(likes_out=True))
    )
    first = [one.regret[1] for one in evaluate(study.landscapes, held_out=True)]
    alone = math.exp(statistics.fmean(map(math.log1p, first))) - 1.0
    crossed = [
        _row(name, study.run(policy), study.run(policy, likes_out=True)) for name, policy in study.crossings().items()
    ]
    each = {
        label: study.run(study.policy(), likes_out=likes) for label, likes in (("one out", False), ("likes out", True))
    }
    choices = [
        (
            label,
            str(one.problem),
            f"{one.distance:.2f}",
            one.schedule.short(),
            _percent(one.loss),
            "yes" if one.measured else "no",
        )
        for label, judged in each.items()
        for one in judged
    ]
    return to_markdown(
        [
            Heading(text="Policies"),
            Table(head=HEAD, rows=tuple(rows)),
            Paragraph(
                text=f"The model alone, choosing among the built programs of each landscape with factors fitted to the other "
                f"problems: mean {_percent(alone)}, worst {_percent(max(first))}."
            ),
            Heading(text="Crossing kinds"),
            Table(head=HEAD, rows=tuple(crossed)),
            Heading(text="Each choice"),
            Table(head=("set", "problem", "distance", "schedule", "loss", "measured there"), rows=tuple(choices)),
        ]
    )


def main() -> None:
    """Print the tables."""
    parser = parser_with(
        flag("files", nargs="+", type=Path, help="landscape files of one arch and regime"),
        flag("--table", required=True, type=Path, help="the table of the arch"),
        prog="python -m docs.studies.policy",
        description=__doc__,
    )
    arguments = parser.parse_args()
    study = Study([read_landscape(path) for path in arguments.files], read_table(arguments.table).entries)
    print(document(study), end="")


if __name__ == "__main__":
    main()
