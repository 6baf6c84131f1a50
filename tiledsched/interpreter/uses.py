"""How launches cut their arrays into tiles: seen while they run, whatever the kernel calls its knobs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tiledsched.interpreter.values import EndlessError


@dataclass(kw_only=True)
class TileUses:
    """The tiles that loads, stores, gathers, scatters and atomics took of each axis of each array."""

    places: dict[tuple[str, int], dict[int, set[int]]] = field(default_factory=dict)
    """(name of the array, axis) -> elements of a tile along the axis -> the indices of the tiles taken.

    Indices are counted in the array that was cut: in a slice of an array they begin at the slice's first element.
    """
    calls: int = 0
    """Calls of `ct.*` functions so far: a measure of the work that does not depend on the machine."""
    elements: int = 0
    """Elements of the tiles that these calls made."""
    most_calls: int | None = None
    """Calls after which a run is given up."""

    def count_call(self) -> None:
        """Count one call of a `ct.*` function.

        Raises:
            EndlessError: there were more than `most_calls`.
        """
        self.calls += 1
        if self.most_calls is not None and self.calls > self.most_calls:
            raise EndlessError(
                f"no end after {self.most_calls:,} calls of ct functions; a loop may wait for another block"
            )

    def note(self, array: str, axis: int, side: int, index: int) -> None:
        """Note one tile of `side` elements along `axis`. Arrays of a list, which are named `X[0]`, count as one."""
        name = re.sub(r"\[.*", "", array) if array.endswith("]") else array
        self.places.setdefault((name, axis), {}).setdefault(side, set()).add(index)

    def filled(self, other: TileUses) -> TileUses:
        """These tiles, and those of `other` along axes that were not cut here."""
        return TileUses(places={**other.places, **self.places}, calls=self.calls)

    def side(self, array: str, axis: int) -> int:
        """Elements of the longest tile along an axis."""
        return max(self.places[array, axis])

    def count(self, array: str, axis: int) -> int:
        """How many different tiles of that length were taken."""
        return len(self.places[array, axis][self.side(array, axis)])
