"""Compares two sets of evidence: what became faster or slower, and which winners changed. Needs no GPU and no database."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from tiledsched.core.groups import firsts, nested, smallest
from tiledsched.core.text import class_words
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import Conditions, Device
from tiledsched.store.evidence import timed_as_now

VERDICTS = ("slower", "tied", "faster", "same")
"""Verdicts on B against A, in the order in which they are reported."""
ESTIMATED = "estimated"
"""Stands for the verdict where a side is an estimate of the performance model, which nobody measured: it decides nothing."""
THRESHOLD = 0.02
"""Differences up to this share of the time count as none. Two sessions on one GPU differ by less, two GPUs of a model
by up to 3.5%.
"""
Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KnownTime:
    """The time of one program of one problem, as one of the two sides knows it."""

    kernel: str
    """Name of the kernel; empty for a report, whose files do not name it."""
    arch: str
    """Architecture, e.g. sm_90."""
    device: str
    """Name of the GPU; empty for an estimate."""
    regime: str
    """burst or sustained; empty for an estimate."""
    accum_mode: str
    """fp32 or fp16 accumulators: two classes of accuracy, which are never compared."""
    problem_id: str
    """Id of the problem."""
    problem: str
    """The problem as people read it."""
    words: str
    """The problem as `--problem` takes it; empty for a report."""
    schedule_id: str
    """Id of the schedule."""
    schedule: str
    """The schedule as people read it."""
    fingerprint: str
    """Fingerprint of the machine code."""
    timing: Timing
    """The time."""
    uid: str
    """Id of the measurement, which is the same in every database; empty for a report."""
    compiler: str = ""
    """Version of the compiler, e.g. 13.4.92."""
    when: datetime | None = None
    """When it was measured, UTC."""
    gpu: Device | None = None
    """The GPU; None for a report, whose files name it only, and for an estimate."""
    conditions: Conditions | None = None
    """Clocks and the way of timing; None where `gpu` is None."""
    ties: frozenset[str] = frozenset()
    """Ids of schedules that the tune could not tell apart from this one."""
    modelled: bool = False
    """Whether the time is an estimate of the performance model. Its interval is then only its median."""
    runs: tuple[ProgramTime, ...] = ()
    """The time of its machine code in each run that measured it, with several samples. A report's files do not have them."""

    @property
    def us(self) -> float:
        """Median time in microseconds."""
        return self.timing.median_us

    @property
    def in_graphs(self) -> bool:
        """Whether it was timed in CUDA graphs, as nothing is today, and not launch by launch."""
        return self.conditions is not None and not timed_as_now(self.regime, self.conditions)

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        time = self.timing
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "device": self.device,
            "regime": self.regime,
            "accum_mode": self.accum_mode,
            "problem_id": self.problem_id,
            "problem": self.problem,
            "schedule_id": self.schedule_id,
            "schedule": self.schedule,
            "fingerprint": self.fingerprint,
            "us": time.median_us,
            "low_us": time.ci_low_us,
            "high_us": time.ci_high_us,
            "uid": self.uid,
            "compiler": self.compiler,
            "provenance": "modelled" if self.modelled else "measured",
        }


class ProgramTime(NamedTuple):
    """The time of a program as far as it is compared: there may be a million."""

    schedule: str
    """The schedule as people read it."""
    fingerprint: str
    """Fingerprint of the machine code."""
    us: float
    """Median time in microseconds."""
    ci_low_us: float
    """Lower end of its 95% interval."""
    ci_high_us: float
    """Upper end of that interval."""
    uid: str
    """Id of the measurement, which is the same in every database; empty for a report."""

    @property
    def timing(self) -> Timing:
        """The time."""
        return Timing(median_us=self.us, ci_low_us=self.ci_low_us, ci_high_us=self.ci_high_us)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two sets of evidence, or what one of them knows of some problems."""

    name: str
    """The SOURCE or SELECTOR as the user gave it."""
    best: Mapping[Key, KnownTime]
    """For each key of :func:`key_of` the time of what is served, or of the fastest program where nothing is served."""
    programs: Mapping[Key, Mapping[str, ProgramTime]]
    """The newest time of every program, by key and then by its machine code, or its schedule where that is not known."""
    estimates: Mapping[Key, KnownTime] = field(default_factory=dict)
    """Estimates of the performance model. Only a side without any measurement is compared by them."""

    def by_problem(self) -> dict[str, Side]:
        """What is known of each problem, by the problem's id."""
        parts: dict[str, list[dict[Key, Any]]] = defaultdict(lambda: [{}, {}, {}])
        for place, known in enumerate((self.best, self.programs, self.estimates)):
            for key, one in known.items():
                parts[key[0]][place][key] = one
        return {
            problem: Side(name=self.name, best=best, programs=programs, estimates=estimates)
            for problem, (best, programs, estimates) in parts.items()
        }


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One problem that both sides know. Ratios are B's time over A's."""

    a: KnownTime
    """Best time of A."""
    b: KnownTime
    """Best time of B."""
    ratio: float
    """B's time over A's: above 1 where B is slower."""
    low: float
    """Lower end of the ratio's 95% interval."""
    high: float
    """Upper end of that interval."""
    verdict: str
    """One of VERDICTS, or ESTIMATED."""
    old_winner: ProgramTime | None = None
    """B's time of the schedule that was A's best, where B timed it."""
    new_winner: ProgramTime | None = None
    """A's time of the schedule that is B's best, where A timed it."""
    noticed: float | None = None
    """The least slow-down, as a share of the time, of which 95 in 100 are called slower; None where runs do not decide."""

    @property
    def one_measurement(self) -> bool:
        """Whether both sides hold the very same measurement, so that nothing was timed anew."""
        return _one_measurement(self.a, self.b)

    @property
    def same_program(self) -> bool:
        """Whether both times are of the same machine code. What differs then is the GPU or the day, not the program."""
        return bool(self.a.fingerprint) and self.a.fingerprint == self.b.fingerprint

    @property
    def winner_differs(self) -> bool:
        """Whether the two best schedules differ in a knob that is not at its usual value, and in their machine code. The ids of
        equal schedules differ where one was written before the kernel had all knobs of today."""
        return self.a.schedule != self.b.schedule and not self.same_program

    @property
    def winner_tied(self) -> bool:
        """Whether the two best schedules differ, and A or B cannot tell them apart."""
        timed = ((self.a, self.new_winner), (self.b, self.old_winner))
        overlap = any(other and other.timing.ci_low_us <= best.timing.ci_high_us for best, other in timed)
        tied = overlap or self.a.schedule_id in self.b.ties or self.b.schedule_id in self.a.ties
        return self.winner_differs and tied

    @property
    def winner_changed(self) -> bool:
        """Whether B has another best schedule than A, and no tie."""
        return self.winner_differs and not self.winner_tied

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        a, b = self.a.to_json(), self.b.to_json()
        shared = {name: b[name] for name in ("kernel", "arch", "regime", "accum_mode", "problem_id", "problem")}
        return {
            **shared,
            "verdict": self.verdict,
            "ratio": self.ratio,
            "ratio_low": self.low,
            "ratio_high": self.high,
            "winner_changed": self.winner_changed,
            "winner_tied": self.winner_tied,
            "same_program": self.same_program,
            **(
                {}
                if self.noticed is None
                else {"noticed": self.noticed, "a_runs": len(self.a.runs), "b_runs": len(self.b.runs)}
            ),
            **{f"a_{name}": value for name, value in a.items() if name not in shared},
            **{f"b_{name}": value for name, value in b.items() if name not in shared},
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of all problems that both sides know."""

    a: str
    """Name of side A."""
    b: str
    """Name of side B."""
    rows: tuple[Compared, ...]
    """One row for each problem: slower ones first, the most slower at the top."""
    drift: tuple[float, ...]
    """B's time over A's for each program that both measured. The machine code is the same, so this is how the sessions
    differ.
    """
    threshold: float
    """Differences up to this share of the time count as none."""
    unpaired: tuple[tuple[str, KnownTime, str], ...] = ()
    """Times that could not be compared, each with its side, A or B, and why it could not."""
    noise: float | None = None
    """Standard deviation of the time of one program from run to run, as a share; None where runs do not decide."""

    @cached_property
    def several(self) -> tuple[bool, ...]:
        """Whether its rows are of several regimes, accuracy classes, archs and kernels."""
        names = "regime", "accum_mode", "arch", "kernel"
        return tuple(len({getattr(row.b, name) for row in self.rows}) > 1 for name in names)

    @property
    def counts(self) -> dict[str, int]:
        """Number of problems for each verdict."""
        found = Counter(row.verdict for row in self.rows)
        return {verdict: found[verdict] for verdict in (*VERDICTS, *([ESTIMATED] if found[ESTIMATED] else []))}

    @property
    def modelled(self) -> bool:
        """Whether a side is estimated and not measured."""
        return any(row.verdict == ESTIMATED for row in self.rows)

    @property
    def mean(self) -> float | None:
        """Geometric mean of the ratios; None without rows."""
        return statistics.geometric_mean([row.ratio for row in self.rows]) if self.rows else None

    @property
    def regressed(self) -> bool:
        """Whether any problem is slower, or where runs decide, has no time in B."""
        return any(row.verdict == "slower" for row in self.rows) or (self.noise is not None and bool(self.only("A")))

    def only(self, side: str) -> list[KnownTime]:
        """Times of problems that only A or only B knows."""
        return [one for name, one, _ in self.unpaired if name == side]

    def line(self) -> str:
        """The whole comparison in one line, for logs of CI."""
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        slowest = max(self.rows, key=lambda row: row.ratio, default=None)
        worst = f"; worst {slowest.ratio - 1:+.1%} ({slowest.b.problem})" if slowest else ""
        only = "".join(f", {len(found)} only in {name}" for name in "AB" if (found := self.only(name)))
        noise = "" if self.noise is None else f"; runs differ by {self.noise:.2%}"
        return f"{counts}{only}{worst}{noise}; threshold {self.threshold:.1%}: {'FAIL' if self.regressed else 'ok'}"

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "a": self.a,
            "b": self.b,
            "threshold": self.threshold,
            "counts": self.counts,
            "mean_ratio": self.mean,
            "drift": statistics.geometric_mean(self.drift) if self.drift else None,
            "programs_on_both": len(self.drift),
            **({} if self.noise is None else {"noise": self.noise}),
            "regressed": self.regressed,
            "line": self.line(),
            "rows": [row.to_json() for row in self.rows],
            "only_a": [one.problem for one in self.only("A")],
            "only_b": [one.problem for one in self.only("B")],
        }


def key_of(known: KnownTime) -> Key:
    """What two times must have in common to be compared: the problem, the accuracy class, the regime, the way of timing, the
    arch and the GPU.
    """
    timed = "graphs" if known.in_graphs else ""
    return known.problem_id, known.accum_mode, known.regime, timed, known.arch, known.device


ON_ONE_GPU, ON_ANY_GPU, ESTIMATES = 6, 4, 2
"""How many parts of :func:`key_of` two times have in common."""


def side_of(
    name: str, served: Iterable[KnownTime], programs: Iterable[KnownTime], estimates: Iterable[KnownTime] = ()
) -> Side:
    """A side: for each problem what is served, or the fastest program where nothing is served.

    Args:
        name: the SOURCE or SELECTOR as the user gave it.
        served: at most one of each key counts, the first.
        programs: everything measured, newest first.
        estimates: what the performance model says.
    """
    newest: dict[Key, dict[str, KnownTime]] = {}
    for one in programs:
        newest.setdefault(key_of(one), {}).setdefault(one.fingerprint or one.schedule_id, one)
    fastest = ((key, min(of.values(), key=lambda each: each.us)) for key, of in newest.items())
    best = firsts(itertools.chain(((key_of(one), one) for one in served), fastest))
    light = {
        key: {
            program: ProgramTime(
                one.schedule, one.fingerprint, one.us, one.timing.ci_low_us, one.timing.ci_high_us, one.uid
            )
            for program, one in of.items()
        }
        for key, of in newest.items()
    }
    return Side(name=name, best=best, programs=light, estimates=_fastest(estimates, ON_ONE_GPU))


@dataclass(frozen=True, kw_only=True)
class ComparisonTerms:
    """How two sides are compared, which what they know of all problems decides."""

    width: int
    """How many parts of :func:`key_of` two times have in common."""
    modelled: tuple[bool, bool]
    """Whether nothing is measured on A, and on B: such a side takes part with its estimates."""

    @classmethod
    def of(cls, measured: Sequence[Collection[Key]], estimated: Sequence[Collection[Key]]) -> ComparisonTerms:
        """The terms for two sides, given the keys of what is measured and of what is estimated on each.

        Problems are matched on the same GPU model; where the two share none, on any.
        """
        a, b = ({key[ON_ANY_GPU:] for key in keys or others} for keys, others in zip(measured, estimated, strict=True))
        nothing = not measured[0], not measured[1]
        width = ESTIMATES if nothing[0] != nothing[1] else ON_ONE_GPU if a & b else ON_ANY_GPU
        return cls(width=width, modelled=nothing)


def joined_parts(parts: Iterable[Comparison], a: str, b: str, threshold: float) -> Comparison:
    """One comparison of those of different problems."""
    parts = list(parts)
    rows = [row for part in parts for row in part.rows]
    rows.sort(key=lambda row: ((*VERDICTS, ESTIMATED).index(row.verdict), -row.ratio, row.b.problem))
    unpaired = [one for part in parts for one in part.unpaired]
    return Comparison(
        a=a,
        b=b,
        threshold=threshold,
        rows=tuple(rows),
        drift=tuple(ratio for part in parts for ratio in part.drift),
        unpaired=tuple(sorted(unpaired, key=lambda one: one[0])),
    )


def compare_parts(a: Side, b: Side, terms: ComparisonTerms, threshold: float) -> Comparison:
    """Compare what two sides know of some problems, on the terms for all of them. The rows are in no order."""
    width = terms.width
    known = [side.estimates if nothing else side.best for side, nothing in zip((a, b), terms.modelled, strict=True)]
    first, second = (_fastest(side.values(), width) for side in known)
    rows = [
        judged(
            first[key],
            second[key],
            threshold,
            old_winner=_program_of(b, key, second[key].device, first[key].schedule),
            new_winner=_program_of(a, key, first[key].device, second[key].schedule),
        )
        for key in first
        if key in second
    ]
    others = nested((key[:width], program, one) for key, of in b.programs.items() for program, one in of.items())
    drift = (
        theirs.us / one.us
        for key, of in a.programs.items()
        if (there := others.get(key[:width]))
        for program, one in of.items()
        if one.fingerprint and (theirs := there.get(program)) and not _one_measurement(one, theirs)
    )
    return Comparison(
        a=a.name,
        b=b.name,
        rows=tuple(rows),
        drift=tuple(drift),
        threshold=threshold,
        unpaired=(
            *(
                ("A", one, why_unpaired(one, "B", b, terms.modelled[1]))
                for key, one in first.items()
                if key not in second
            ),
            *(
                ("B", one, why_unpaired(one, "A", a, terms.modelled[0]))
                for key, one in second.items()
                if key not in first
            ),
        ),
    )


def _program_of(side: Side, begin: Key, device: str, schedule: str) -> ProgramTime | None:
    """The time of a schedule on a GPU, of the keys that begin like this."""
    found = None
    for key, of in side.programs.items():
        if key[: len(begin)] == begin and key[-1] == device:
            found = next((one for one in reversed([*of.values()]) if one.schedule == schedule), found)
    return found


def _fastest(known: Iterable[KnownTime], width: int) -> dict[Key, KnownTime]:
    """The best time of each problem, by the first parts of its key."""
    return smallest(((key_of(one)[:width], one) for one in known), key=lambda each: each.us)


def why_unpaired(one: KnownTime, name: str, other: Side, modelled: bool) -> str:
    """Why a time has no partner on the other side, whose name is A or B, and on which all is modelled or some is measured."""
    there = [each for each in other.best.values() if each.problem_id == one.problem_id]
    if not there:
        if not modelled and any(each.problem_id == one.problem_id for each in other.estimates.values()):
            return f"{name} has an estimate of this problem only, and no measurement"
        return f"{name} has no time of this problem"
    aspects: tuple[tuple[str, Callable[[KnownTime], str]], ...] = (
        ("with {}", lambda each: class_words(each.accum_mode)),
        ("in the {} regime", lambda each: each.regime),
        ("timed {}", lambda each: "in CUDA graphs" if each.in_graphs else "launch by launch"),
        ("on {}", lambda each: each.device),
    )
    for words, aspect in aspects:
        alike = [each for each in there if aspect(each) == aspect(one)]
        if not alike:
            its = ", ".join(sorted({aspect(each) or "an unknown GPU" for each in there}))
            return f"{name} has this problem only {words.format(its)}; here it is {words.format(aspect(one))}"
        there = alike
    return f"{name} has no time of this problem under the same conditions"


def judged(a: KnownTime, b: KnownTime, threshold: float, **winners: Any) -> Compared:
    """Compare two times of one problem: is B slower, faster, the same within `threshold`, or are the two tied?

    The two medians are independent: their relative 95% half-widths add in quadrature. Slower and faster are what lies beyond the
    threshold and whose two intervals are apart; the same is what lies within the threshold with its whole interval. Tied is the
    rest: the two intervals overlap, or the ratio lies within the threshold and its interval does not.

    Args:
        a: the time in A.
        b: the time in B.
        threshold: differences up to this share of the time count as none.
        winners: `old_winner` and `new_winner` of :class:`Compared`.
    """
    again, estimated = not _one_measurement(a, b), a.modelled or b.modelled
    ratio, limit = b.us / a.us if again or estimated else 1.0, 1 + threshold
    half = math.hypot(*(math.log(one.timing.ci_high_us / one.timing.ci_low_us) / 2 * again for one in (a, b)))
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    verdicts = {
        ESTIMATED: estimated,
        "slower": ratio > limit and b.timing.ci_low_us > a.timing.ci_high_us,
        "faster": ratio < 1 / limit and b.timing.ci_high_us < a.timing.ci_low_us,
        "same": high <= limit and low >= 1 / limit,
        "tied": True,
    }
    verdict = next(name for name, holds in verdicts.items() if holds)
    return Compared(a=a, b=b, ratio=ratio, low=low, high=high, verdict=verdict, **winners)


def _one_measurement(a: KnownTime | ProgramTime, b: KnownTime | ProgramTime) -> bool:
    """Whether both sides hold the very same measurement.

    The files of a report do not identify a measurement; there, three times that agree in six digits do.
    """
    if a.uid and b.uid:
        return a.uid == b.uid
    times = zip(astuple(a.timing), astuple(b.timing), strict=True)
    return a.fingerprint == b.fingerprint and all(math.isclose(one, other, rel_tol=1e-5) for one, other in times)
