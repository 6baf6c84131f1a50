"""`--numerics same`: the numbers that a schedule must give to win, and what it costs that it must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core import ConfigError, Failure, FailureKind, Schedule
from tiledsched.measure.runner import Candidate, Measurement
from tiledsched.store.records import SAME_NUMBERS
from tiledsched.tuning.builder import Program


@dataclass(frozen=True, kw_only=True)
class WantedNumbers:
    """The numbers that a schedule must give to win, and the program that gives them."""

    program: Program
    """Wins whatever the bits are: they are its own."""
    accuracy: Accuracy
    """What the check of it told."""
    grids: Callable[[Schedule], tuple[tuple[int, int, int], ...]]
    """Gives the grids of a schedule's launches."""

    def __post_init__(self) -> None:
        if not self.accuracy.outputs:
            raise ConfigError(
                "these measurements do not tell whether outputs are the same bit for bit: they were recorded before that was "
                "noted; record them again, or leave out --numerics same"
            )

    def why_not(self, candidate: Candidate, accuracy: Accuracy) -> Failure | None:
        """Why a candidate that computes right must not win; None where its numbers are the wanted ones."""
        if (candidate.artifact.fingerprint, self.grids(candidate.schedule)) == self.program.key:
            return None
        how = "" if accuracy.repeatable else ": it gives other bits from run to run"
        message = f"differs from the incumbent's numbers ({self.program.schedule.short()}){how}"
        return (
            None if accuracy.same_numbers(self.accuracy) else Failure(kind=FailureKind.OTHER_NUMBERS, message=message)
        )

    def known(self, taken: Measurement) -> bool | None:
        """Whether a measurement in the store is of the wanted numbers; None where it does not tell. What was never checked, as it
        was far too slow, counts: it is checked before it may win.
        """
        accuracy = taken.accuracy
        if accuracy is None or taken.fingerprint == self.program.fingerprint:
            return True
        return accuracy.same_numbers(self.accuracy)


@dataclass(frozen=True, kw_only=True)
class NumbersKept:
    """That only what is served, and what computes the same bits, could win; and what that cost."""

    incumbent: Schedule
    """The schedule whose outputs all others' had to equal: what was served, or the default where nothing was."""
    repeatable: bool
    """Whether it gives the same bits each time. Where it does not, nothing equals it, and only itself could win."""
    refused: int
    """Programs that computed right results, and not these."""
    fastest: Schedule | None = None
    """The fastest of the refused, where one is faster than the winner."""
    gain: float | None = None
    """By what part of the winner's time that one takes less; 0 where none does; None where they were not timed."""

    def __str__(self) -> str:
        """In words, as an entry's source has it."""
        text = f"{SAME_NUMBERS}{self.incumbent.short()}"
        if not self.repeatable:
            text += ", which differ from run to run so that nothing else could win"
        if not self.refused:
            return f"{text}: no program that was checked has others"
        text += f": {self.refused} with others refused"
        if self.fastest is not None and self.gain is not None:
            return f"{text}, the fastest, {self.fastest.short()}, takes {self.gain:.1%} less time"
        return text + (", none of them faster" if self.gain is not None else ", and not timed: the budget ended first")

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        fastest = self.fastest.to_json() if self.fastest else None
        return {**vars(self), "incumbent": self.incumbent.to_json(), "fastest": fastest}
