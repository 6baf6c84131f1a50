"""How far the outputs of one candidate are from the reference, as it is stored. Reading a table needs no NumPy for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiledsched.core.canonical import OMIT_DEFAULT


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How far one candidate's whole outputs are from the high-precision reference, on random inputs."""

    max_abs_error: float
    """Largest absolute difference of any element."""
    worst_tile_error: float
    """Largest relative Frobenius error of any tile, |out - ref| / |ref|, of outputs that are judged by it; of a kernel that
    has no such output, the largest absolute error, or number of unequal elements.
    """
    worst_tile: tuple[int, ...]
    """Index of the outer axes, row tile and, where a tile does not hold whole rows, column tile of that error."""
    repeatable: bool
    """Whether two launches, and launches in a row, gave the same bits."""
    adversarial_tile_error: float = 0.0
    """Largest error on the adversarial inputs, likewise; 0 in records from before there were any."""
    outputs: str = field(default="", metadata=OMIT_DEFAULT)
    """A digest of the inputs of all cases, a point, and one of all outputs, in hexadecimal digits: it is the same for programs
    whose outputs have the same bits. Empty in records from before it was taken.
    """

    def same_numbers(self, other: Accuracy) -> bool | None:
        """Whether the outputs of both have the same bits each time; None where that is not known, because they are of
        other inputs or from before digests were taken.
        """
        inputs = {each.outputs.partition(".")[0] for each in (self, other)}
        if len(inputs) > 1 or "" in inputs:
            return None
        return self.repeatable and other.repeatable and self.outputs == other.outputs
