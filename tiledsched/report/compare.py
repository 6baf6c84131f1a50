"""Two sets of evidence side by side: what became faster, what slower, and which winners changed. No GPU, no database."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

VERDICTS = ("slower", "undecided", "faster", "same")
"""Of B against A, in the order they are told."""
THRESHOLD = 0.02
"""Differences up to this part of the time are none. Two sessions on one GPU differ by less, two GPUs of a kind by up to 3.5%."""
Key = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KnownTime:
    """The time of one program of one problem, as one side knows it."""

    kernel: str
    """Its name; empty where a report's files do not tell."""
    arch: str
    """e.g. sm_90."""
    device: str
    """The GPU."""
    regime: str
    """burst or sustained."""
    accum_mode: str
    """fp32 or fp16: two classes of accuracy, never compared."""
    problem_id: str
    """What is computed."""
    problem: str
    """The same for people."""
    words: str
    """The same as `--problem` takes it; empty where a report's files do not tell."""
    schedule_id: str
    """How."""
    schedule: str
    """The same for people."""
    fingerprint: str
    """Its machine code."""
    us: float
    """Median, in microseconds."""
    low_us: float
    """Lower end of the median's 95% interval."""
    high_us: float
    """Upper end."""
    uid: str
    """The measurement's name in every database; empty where a report's files do not tell."""
    compiler: str = ""
    """What built it, e.g. 13.4.92."""
    when: datetime | None = None
    """UTC."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two."""

    name: str
    """As it was asked for."""
    best: Mapping[Key, KnownTime]
    """What is served, or else the fastest, by :func:`key_of`."""
    programs: Mapping[tuple[Key, str], KnownTime]
    """The newest time of every program, by key and machine code."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One problem on both sides. Ratios are B's time / A's."""

    a: KnownTime
    """A's best."""
    b: KnownTime
    """B's best."""
    ratio: float
    """Above 1 where B is slower."""
    low: float
    """Lower end of its 95% interval."""
    high: float
    """Upper end."""
    verdict: str
    """One of VERDICTS."""

    @property
    def winner_changed(self) -> bool:
        """Whether another schedule is best."""
        return self.a.schedule_id != self.b.schedule_id

    @property
    def same_program(self) -> bool:
        """Whether it is the same machine code: what differs then is the GPU or the day."""
        return bool(self.a.fingerprint) and self.a.fingerprint == self.b.fingerprint

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        shared = {
            name: getattr(self.b, name) for name in ("kernel", "arch", "regime", "accum_mode", "problem_id", "problem")
        }
        sides = {
            f"{side}_{name}": value
            for side, one in (("a", self.a), ("b", self.b))
            for name, value in asdict(one).items()
            if name not in (*shared, "words", "when")
        }
        return {
            **shared,
            "verdict": self.verdict,
            "ratio": self.ratio,
            "ratio_low": self.low,
            "ratio_high": self.high,
            "winner_changed": self.winner_changed,
            "same_program": self.same_program,
            **sides,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All problems that both sides know."""

    a: str
    """What A was."""
    b: str
    """What B was."""
    rows: tuple[Compared, ...]
    """Slower ones first, by how much."""
    only_a: tuple[KnownTime, ...]
    """What only A knows."""
    only_b: tuple[KnownTime, ...]
    """What only B knows."""
    drift: tuple[float, ...]
    """B's time / A's of the same machine code measured on both sides: the two sessions, not the schedules."""
    threshold: float
    """Differences up to this are none."""

    @property
    def counts(self) -> dict[str, int]:
        """Problems by verdict."""
        found = Counter(row.verdict for row in self.rows)
        return {verdict: found[verdict] for verdict in VERDICTS}

    @property
    def mean(self) -> float | None:
        """Geometric mean of the ratios; None without any."""
        return statistics.geometric_mean([row.ratio for row in self.rows]) if self.rows else None

    @property
    def regressed(self) -> bool:
        """Whether any problem is slower beyond the threshold."""
        return any(row.verdict == "slower" for row in self.rows)

    def line(self) -> str:
        """All of it in one line, for CI."""
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items())
        slowest = max(self.rows, key=lambda row: row.ratio, default=None)
        worst = f"; worst {slowest.ratio - 1:+.1%} ({slowest.b.problem})" if slowest else ""
        only = "".join(
            f", {len(found)} only in {name}" for name, found in (("A", self.only_a), ("B", self.only_b)) if found
        )
        return f"{counts}{only}{worst}; threshold {self.threshold:.1%}: {'FAIL' if self.regressed else 'ok'}"

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
            "regressed": self.regressed,
            "line": self.line(),
            "rows": [row.to_json() for row in self.rows],
            "only_a": [one.problem for one in self.only_a],
            "only_b": [one.problem for one in self.only_b],
        }


def key_of(known: KnownTime) -> Key:
    """What is compared with each other."""
    return known.problem_id, known.regime, known.accum_mode, known.arch, known.device


def side_of(name: str, served: Iterable[KnownTime], programs: Iterable[KnownTime]) -> Side:
    """One side: of each problem what is served, or where nothing is, the fastest of its programs.

    Args:
        name: as it was asked for.
        served: at most one of each key counts, the first.
        programs: everything measured, newest first.
    """
    newest: dict[tuple[Key, str], KnownTime] = {}
    for one in programs:
        newest.setdefault((key_of(one), one.fingerprint or one.schedule_id), one)
    best: dict[Key, KnownTime] = {}
    for one in served:
        best.setdefault(key_of(one), one)
    chosen = set(best)
    for (key, _), one in newest.items():
        if key not in chosen and (key not in best or one.us < best[key].us):
            best[key] = one
    return Side(name=name, best=best, programs=newest)


def compare(a: Side, b: Side, threshold: float = THRESHOLD) -> Comparison:
    """B against A, over the problems that both know.

    Problems are matched on the same GPU model; where the two share none, on any.
    """
    first, second, width = a.best, b.best, 5
    if not {key[3:] for key in first} & {key[3:] for key in second}:
        first, second, width = _anywhere(first), _anywhere(second), 3
    rows = [judged(first[key], second[key], threshold) for key in first if key in second]
    rows.sort(key=lambda row: (VERDICTS.index(row.verdict), -row.ratio, row.b.problem))
    others = {(key[:width], program): one for (key, program), one in b.programs.items()}
    drift = []
    for (key, program), one in a.programs.items():
        other = others.get((key[:width], program))
        if other is not None and one.fingerprint and not _one_measurement(one, other):
            drift.append(other.us / one.us)
    return Comparison(
        a=a.name,
        b=b.name,
        rows=tuple(rows),
        drift=tuple(drift),
        threshold=threshold,
        only_a=tuple(one for key, one in first.items() if key not in second),
        only_b=tuple(one for key, one in second.items() if key not in first),
    )


def _anywhere(best: Mapping[Key, KnownTime]) -> dict[Key, KnownTime]:
    """Without the GPU, the fastest of each."""
    found: dict[Key, KnownTime] = {}
    for key, one in best.items():
        if key[:3] not in found or one.us < found[key[:3]].us:
            found[key[:3]] = one
    return found


def judged(a: KnownTime, b: KnownTime, threshold: float) -> Compared:
    """Whether B is slower, faster, the same within `threshold`, or not decided by what was measured.

    The two medians are independent: their relative 95% half-widths add in quadrature. Slower and faster are what lies beyond the
    threshold and whose interval leaves 1 out; the same is what lies within the threshold with its whole interval.
    """
    if _one_measurement(a, b):
        return Compared(a=a, b=b, ratio=1.0, low=1.0, high=1.0, verdict="same")
    ratio = b.us / a.us
    half = math.hypot(*(math.log(one.high_us / one.low_us) / 2 for one in (a, b)))
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    limit = 1 + threshold
    if ratio > limit and low > 1:
        verdict = "slower"
    elif ratio < 1 / limit and high < 1:
        verdict = "faster"
    elif high <= limit and low >= 1 / limit:
        verdict = "same"
    else:
        verdict = "undecided"
    return Compared(a=a, b=b, ratio=ratio, low=low, high=high, verdict=verdict)


def _one_measurement(a: KnownTime, b: KnownTime) -> bool:
    """Whether both sides hold the very same measurement. A report's files do not name it; six digits of three times do."""
    if a.uid and b.uid:
        return a.uid == b.uid
    times = ((a.us, b.us), (a.low_us, b.low_us), (a.high_us, b.high_us))
    return a.fingerprint == b.fingerprint and all(math.isclose(one, other, rel_tol=1e-5) for one, other in times)


def rows_to_show(comparison: Comparison, *, everything: bool = False) -> Sequence[Compared]:
    """The rows worth a look: all but those that stayed the same with the same winner."""
    return [row for row in comparison.rows if everything or row.verdict != "same" or row.winner_changed]
