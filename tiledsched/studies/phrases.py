"""Sentences that the pages of several studies share."""

from __future__ import annotations

from collections.abc import Iterable

from tiledsched.core.text import joined
from tiledsched.report.document import Paragraph


def first_line(devices: Iterable[str], days: Iterable[str], what: str, timed: int) -> Paragraph:
    """The first line of a page: on which GPU and when it was measured, and what; or that nothing was.

    Args:
        devices: names of the GPUs.
        days: when each time was taken, as YYYY-MM-DD; empty where that was not recorded.
        what: what was measured, as the end of a sentence.
        timed: how many times there are.
    """
    if not timed:
        return Paragraph(text="Nothing was measured: every attempt failed, for the reasons below.", warning=True)
    known = sorted(filter(None, days))
    when = ", " + " to ".join(dict.fromkeys((known[0], known[-1]))) if known else ""
    return Paragraph(text=f"Measured on {joined(sorted({*devices}))}{when}: {what}.", measured=True)


def times_as_fast(ratio: float) -> str:
    """A ratio of times in words: `1.90 times as fast`, or `as fast` where the two differ by less than half a percent."""
    return "as fast" if abs(ratio - 1) < 0.005 else f"{ratio:.2f} times as fast"
