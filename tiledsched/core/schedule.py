"""How it is computed: one value for each knob."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from tiledsched.core.errors import SpaceError
from tiledsched.core.problem import stable_id

KnobValue = int | bool | str


PLAIN: dict[str, KnobValue] = {"num_ctas": 1, "opt_level": 3}
"""Values that go without saying when a schedule is written for people; of other knobs, 0 and false. Kernels add theirs."""


TILES = (("tile_m", "tile_n"), ("TILE_M", "TILE_N", "TILE_K"), ("TILE_M", "TILE_N"))
"""Knobs written as one, 128x64."""


SHORT = {
    "occupancy": "occ",
    "num_worker_warps": "warps",
    "num_ctas": "ctas",
    "latency_k": "latK",
    "latency_v": "latV",
    "opt_level": "O",
}
"""Knobs that have a shorter name in tables."""


class Schedule(Mapping[str, KnobValue]):
    """An immutable, hashable mapping from knob name to value, with canonical JSON and a stable id.

    Two schedules are equal when every knob has the same value and type: ``True`` is not ``1`` here, because the id is
    the hash of the JSON, where they differ.

    Raises:
        SpaceError: a value that is neither int, bool nor str.
    """

    __slots__ = ("_hash", "_id", "_values")
    _hash: int | None
    _id: str | None

    def __init__(self, values: Mapping[str, KnobValue] | None = None, /, **knobs: KnobValue) -> None:
        merged = dict(values or {}, **knobs)
        for name, value in merged.items():
            if not isinstance(value, (bool, int, str)):
                raise SpaceError(f"knob {name!r} must be an integer, true/false or a string, got {value!r}")
        self._values: dict[str, KnobValue] = {name: merged[name] for name in sorted(merged)}
        self._hash = self._id = None  # most schedules are never asked for them

    @classmethod
    def of_checked(cls, values: dict[str, KnobValue]) -> Schedule:
        """The schedule of `values` that are known to be right, in the order of their names: spaces are walked by the million."""
        made = cls.__new__(cls)
        made._values = values
        made._hash = made._id = None
        return made

    def __getitem__(self, name: str) -> KnobValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    # Those of Mapping, which are made of the two above, take many times as long.

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def keys(self) -> KeysView[str]:
        """Names of the knobs, in their order."""
        return self._values.keys()

    def values(self) -> ValuesView[KnobValue]:
        """Values of the knobs, in the order of their names."""
        return self._values.values()

    def items(self) -> ItemsView[str, KnobValue]:
        """Names and values."""
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
        """Stable 12-digit hex id of the canonical JSON."""
        if self._id is None:
            self._id = stable_id(self._values)
        return self._id

    def number(self, name: str) -> int:
        """The value of an integer knob."""
        return int(self._values[name])

    def replace(self, **changes: KnobValue) -> Schedule:
        """A copy with some knobs changed."""
        return Schedule(self._values, **changes)

    def to_json(self) -> dict[str, KnobValue]:
        """A plain dict; :meth:`from_json` inverts it."""
        return dict(self._values)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule `to_json` wrote."""
        return cls(dict(data))

    def short(self) -> str:
        """`128x64 occ=2 warps=8 ...`: the tile, then every knob that departs from the plain kernel, for tables."""
        tile = next((pair for pair in TILES if set(pair) <= set(self)), ())
        parts = ["x".join(str(self._values[name]) for name in tile)] if tile else []
        for name, value in self._values.items():
            plain = value == PLAIN.get(name, 0)
            if name in tile or plain:
                continue
            flag = name if value is True else f"no_{name}"
            parts.append(flag if isinstance(value, bool) else f"{SHORT.get(name, name)}={value}")
        return " ".join(parts)

    def __repr__(self) -> str:
        return f"Schedule({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"
