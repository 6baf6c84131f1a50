"""A schedule: how a problem is computed, as one value for each knob."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import SpaceError, UnknownKnobError, did_you_mean

KnobValue = int | bool | str
COMPILER_HINTS: Mapping[str, Sequence[int]] = {
    "num_ctas": (0, 1, 2, 4, 8, 16),
    "occupancy": range(33),
    "opt_level": range(4),
    "num_worker_warps": (0, 1, 2, 4, 8, 16, 32),
}
"""Knobs that reach cuTile as kernel hints, and the values that the compiler (13.4) accepts. 0 leaves the choice to the compiler,
except for `opt_level`, where 0 is a level.
"""
HINT_KNOBS: Mapping[str, Sequence[int]] = {**COMPILER_HINTS, "pdl": (0, 1, 2)}
"""Those, and how the launches of a schedule overlap (:mod:`tiledsched.core.chains`). Every other knob is a compile-time constant
of the kernel.
"""

PLAIN: dict[str, KnobValue] = {"num_ctas": 1, "opt_level": 3}
"""Knob values that are left out when a schedule is written for people. Kernels add theirs; of other knobs, 0 and false are."""


TILES = (("tile_m", "tile_n"), ("TILE_M", "TILE_N", "TILE_K"), ("TILE_M", "TILE_N"))
"""Knobs that are written together, as in 128x64."""


SHORT = {
    "occupancy": "occ",
    "num_worker_warps": "warps",
    "num_ctas": "ctas",
    "latency_k": "latK",
    "latency_v": "latV",
    "opt_level": "O",
}
"""Knobs that have a shorter name in tables."""


def allowed_hints(name: str) -> str:
    """The values of a hint knob, for people: `0, 4, 8` or `0 to 32`."""
    values = HINT_KNOBS[name]
    return f"{values[0]} to {values[-1]}" if isinstance(values, range) else ", ".join(map(str, values))


class Schedule(Mapping[str, KnobValue]):
    """An immutable, hashable mapping from knob name to value, with canonical JSON and a stable id.

    A knob is read as `s["TILE"]` or `s.TILE`; one that is called like a method of a mapping, such as `items`, as the first only.

    Two schedules are equal when every knob has the same value and type: ``True`` is not ``1`` here, because the id is
    the hash of the JSON, where they differ.

    Raises:
        SpaceError: a value that is neither int, bool nor str, or text that cannot be printed.
    """

    __slots__ = ("_hash", "_id", "_values")
    _hash: int | None
    _id: str | None

    def __init__(self, values: Mapping[str, KnobValue] | None = None, /, **knobs: KnobValue) -> None:
        merged = dict(values or {}, **knobs)
        for name, value in merged.items():
            if not isinstance(value, (bool, int, str)):
                raise SpaceError(f"knob {name!r} must be an integer, true/false or a string, got {value!r}")
            if isinstance(value, str) and not value.isprintable():
                raise SpaceError(
                    f"knob {name!r} is text that cannot be printed: {value!r}; take out what is not a letter or mark"
                )
        self._values: dict[str, KnobValue] = {name: merged[name] for name in sorted(merged)}
        self._hash = self._id = None  # most schedules are never asked for them

    @classmethod
    def of_checked(cls, values: dict[str, KnobValue]) -> Schedule:
        """The schedule of `values`, which are valid and sorted by name. No check is made: spaces are walked by the million."""
        made = cls.__new__(cls)
        made._values = values
        made._hash = made._id = None
        return made

    def __getitem__(self, name: str) -> KnobValue:
        try:
            return self._values[name]
        except KeyError:
            raise UnknownKnobError(self._unknown(name)) from None

    def __getattr__(self, name: str) -> KnobValue:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(self._unknown(name), name=name, obj=self)
        return self._values[name]

    def _unknown(self, name: str) -> str:
        return f"the schedule has no knob {name!r}; its knobs are {', '.join(self)}{did_you_mean(name, self)}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    # Mapping would derive the next five from the two above, and take many times as long.

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a knob, or the default where the schedule has none of this name."""
        return self._values.get(name, default)

    def keys(self) -> KeysView[str]:
        """Names of the knobs, in alphabetical order."""
        return self._values.keys()

    def values(self) -> ValuesView[KnobValue]:
        """Values of the knobs, in the order of their names."""
        return self._values.values()

    def items(self) -> ItemsView[str, KnobValue]:
        """Pairs of name and value, in the order of their names."""
        return self._values.items()

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple(self._values.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Schedule)
            and self._values == other._values
            and [*map(type, self._values.values())] == [*map(type, other._values.values())]
        )

    def __reduce__(self) -> tuple[type[Schedule], tuple[dict[str, KnobValue]]]:
        return (Schedule, (self._values,))

    @property
    def id(self) -> str:
        """Stable 12-digit hex id of the canonical JSON, without `pdl` where that is 0: what was stored and built before kernels
        had this knob keeps its id, by which ties are broken, too.
        """
        if self._id is None:
            self._id = stable_id(dict(each for each in self._values.items() if each != ("pdl", 0)))
        return self._id

    def number(self, name: str) -> int:
        """The value of an integer knob."""
        return int(self[name])

    def replace(self, **changes: KnobValue) -> Schedule:
        """A copy of the schedule with some knobs changed."""
        return Schedule(self._values, **changes)

    def to_json(self) -> dict[str, KnobValue]:
        """A plain dict; :meth:`from_json` inverts it."""
        return dict(self._values)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule that :meth:`to_json` wrote."""
        return cls(dict(data))

    def short(self) -> str:
        """The schedule in short, for tables: the tile and each knob that is not plain, `128x64 occ=2 ...`."""
        tile = next((pair for pair in TILES if set(pair) <= set(self)), ())
        parts = ["x".join(str(self._values[name]) for name in tile)] if tile else []
        for name, value in self._values.items():
            usual = PLAIN.get(name, 0)
            if name in tile or value == usual or (value is False and usual is not True):
                continue
            flag = name if value is True else f"no_{name}"
            parts.append(flag if isinstance(value, bool) else f"{SHORT.get(name, name)}={value}")
        return " ".join(parts)

    def __repr__(self) -> str:
        return f"Schedule({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


def named_tile(knobs: Iterable[str]) -> tuple[str, str] | None:
    """The two knobs whose names say that they are a tile's rows and columns, such as tile_m and tile_n, or BLOCK_M and
    BLOCK_N; None where there are none.
    """
    known = list(knobs)
    pairs = ((name, name[:-1] + ("n" if name.endswith("m") else "N")) for name in known if name.lower().endswith("_m"))
    return next((pair for pair in pairs if pair[1] in known), None)
