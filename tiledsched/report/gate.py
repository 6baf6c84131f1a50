"""Judges a comparison by repeated runs: what became slower, given how much runs of this machine differ anyway.

A *run* is one process that measured. Runs of the same machine code (*A/A runs*) differ by chance. By how much is estimated from
the evidence itself: from the runs of each side, and from machine code that both sides share. The spread of one problem, which
has few runs, is drawn towards that of all (Smyth, "Linear Models and Empirical Bayes Methods for Assessing Differential
Expression in Microarray Experiments", 2004, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tiledsched.core.errors import ConfigError
from tiledsched.measure.estimate import Timing
from tiledsched.report.compare import ESTIMATED, Compared, Comparison, KnownTime, ProgramTime, joined_parts
from tiledsched.report.comparison_text import label_of, verdict_of
from tiledsched.report.document import Heading, Paragraph, Table, to_markdown

FALSE_ALARM = 0.01
"""Probability of an alarm, over all problems together, where nothing became slower."""
MISSED = 0.05
"""Probability of no alarm for a problem that became slower by the limit, where it is not called tied."""
BOUND = 0.01
"""A slow-down that is beyond doubt gives an alarm unless the limit is excluded at this level."""
SHARED_FREEDOM = 4
"""The noise of all problems counts as so many degrees of freedom in the estimate of one problem's noise."""


def judged_by_runs(found: Comparison, limit: float) -> Comparison:
    """Judge each problem of a comparison anew, by all runs that the two sides hold of what they serve.

    A problem is `slower` if its time grew beyond doubt (where nothing became slower, one comparison in 100 calls something
    slower) and by what may be `limit`; it is `tied` if a slow-down by the limit would be missed in more than 5 of 100
    comparisons; `faster` is what would be slower the other way round, and `same` is the rest. A problem of which only A
    holds runs of its own is unpaired, and fails.

    Args:
        found: what :func:`tiledsched.report.comparison_sources.compare_sources` found.
        limit: the slow-down that must be noticed, as a share of the time.

    Raises:
        ConfigError: times of two GPUs or of the performance model are compared, or nothing was measured twice.
    """
    from scipy.stats import chi2, t

    if any(row.verdict == ESTIMATED or row.a.device != row.b.device for row in found.rows):
        raise ConfigError("a gate compares measurements of one GPU; measure both sides on the same machine, in turns")
    pairs = [(row, _own_runs(row)) for row in found.rows]
    timed = [(row, sides) for row, sides in pairs if all(sides)]
    # What neither side measured for itself, such as the rest of a table that both imported, is no part of the check.
    lacking = [("A", row.a, "B holds no run of its own") for row, (own, others) in pairs if own and not others]
    unpaired = (*(each for each in found.unpaired if each[0] == "B" or each[1].runs), *lacking)
    logs = [[np.log([run.us for run in runs]) for runs in sides] for _, sides in timed]
    # One column for each problem; the two rows of `count` and `mean` are the sides.
    count, mean = (np.reshape([[of(each) for each in sides] for sides in logs], (-1, 2)).T for of in (np.size, np.mean))
    within = np.array([sum(each.var() * each.size for each in sides) for sides in logs])
    # What the samples of a run say of its variance, from the 95% interval of its median.
    widths = [[math.log(run.ci_high_us / run.ci_low_us) for runs in sides for run in runs] for _, sides in timed]
    sampling = np.array([np.mean(np.square(each)) / (2 * 1.96) ** 2 for each in widths])
    same = np.array([row.same_program for row, _ in timed], dtype=bool)
    grown, weight, freedom = mean[1] - mean[0], 1 / (1 / count).sum(0), count.sum(0) - 2
    known = freedom + same
    if not known.any():
        raise ConfigError(
            "the two sides hold no two runs of one program, so that nothing says how much runs of this machine differ; measure "
            "both again, each into its own database: tiledsched tune --effort served --db DB"
        )
    spread = (within + same * grown**2 * weight) / chi2.median(np.maximum(1, known))
    # A median, so that neither a disturbed run nor a problem that did become slower counts as noise of all others.
    noise = float(np.median(spread[known > 0]))
    shared = np.minimum(SHARED_FREEDOM, known.sum() - known)
    own = np.maximum(1, freedom + shared)
    variance = np.maximum(sampling, (within + shared * noise) / own)
    beyond, bound, missed, half = (
        t.isf(level, own) * np.sqrt(variance / weight)
        for level in (FALSE_ALARM / len(found.rows), BOUND, MISSED, 0.025)
    )
    alarm = np.maximum(beyond, math.log1p(limit) - bound)
    moved = [grown > alarm, alarm + missed > math.log1p(limit), -grown > alarm]
    verdicts = np.select(moved, ["slower", "tied", "faster"], "same")
    rows = [
        replace(
            row,
            a=_mean(row.a, sides[0], half[place] * math.sqrt(weight[place] / count[0, place])),
            b=_mean(row.b, sides[1], half[place] * math.sqrt(weight[place] / count[1, place])),
            ratio=math.exp(grown[place]),
            low=math.exp(grown[place] - half[place]),
            high=math.exp(grown[place] + half[place]),
            verdict=str(verdicts[place]),
            noticed=math.expm1(alarm[place] + missed[place]),
        )
        for place, (row, sides) in enumerate(timed)
    ]
    whole = replace(found, rows=tuple(rows), unpaired=unpaired)
    return replace(joined_parts([whole], found.a, found.b, limit), noise=math.sqrt(noise))


def gate_markdown(found: Comparison) -> str:
    """What :func:`judged_by_runs` gave as Markdown, for a comment on a pull request."""
    head = "verdict", "change", "noticed from", "before, us", "after, us", "runs", "problem"
    cells = [
        (
            row.verdict,
            f"{row.ratio - 1:+.1%}",
            f"{row.noticed:+.1%}",
            f"{row.a.us:.1f}",
            f"{row.b.us:.1f}",
            f"{len(row.a.runs)} and {len(row.b.runs)}",
            label_of(row.b, found),
        )
        for row in found.rows
    ]
    missing = [
        f"Not measured after the change: {label_of(one, found)} ({why})."
        for side, one, why in found.unpaired
        if side == "A"
    ]
    texts = [Paragraph(text=text) for text in (verdict_of(found), *missing, found.line())]
    return to_markdown([Heading(text="tiledsched compare", level=3), *texts, Table(head=head, rows=cells)])


def _mean(known: KnownTime, runs: Sequence[ProgramTime], half: float) -> KnownTime:
    """A time with the geometric mean of its runs, and the interval that reaches `half` to either side in logarithms."""
    us = math.exp(np.log([run.us for run in runs]).mean())
    timing = Timing(median_us=us, ci_low_us=us * math.exp(-half), ci_high_us=us * math.exp(half))
    return replace(known, timing=timing, uid=runs[0].uid, runs=tuple(runs))


def _own_runs(row: Compared) -> list[list[ProgramTime]]:
    """The runs of each side that the other does not hold as well."""
    both = {run.uid for run in row.a.runs} & {run.uid for run in row.b.runs}
    return [[run for run in side.runs if run.uid not in both] for side in (row.a, row.b)]
