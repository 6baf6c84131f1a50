"""What is computed: one case of a kernel, as the name of the kernel and a value for each of its fields."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiledsched.core.errors import ConfigError, ProblemError
from tiledsched.core.fields import Value

if TYPE_CHECKING:
    from tiledsched.core.kernel import Kernel


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def canonical_json(value: Any) -> str:
    """The one JSON text of `value`: sorted keys, no spaces. Ids are hashes of this."""
    return _encode(value)


def stable_id(value: Any, length: int = 12) -> str:
    """First `length` hex digits of SHA-256 over the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


class Problem:
    """One case of a kernel. Immutable; equal where kernel and values are.

    `Kernel.problem(...)` and :meth:`from_json` make them. A value is read as an attribute (`problem.rows`), and so is what
    the kernel derives from the values. What its name stands for the kernel tells: FLOPs, bytes and the words of `str`.
    """

    kernel: str
    """The kernel's name."""
    values: Mapping[str, Value]
    """A value for each field, in the order the kernel declares them."""

    def __init__(self, kernel: str, values: Mapping[str, Value], *, omitted: frozenset[str] = frozenset()) -> None:
        plain = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if name not in omitted
        }
        # Values are plain attributes, which serving and search read by the hundred for every problem. What is derived joins them.
        self.__dict__.update(
            values if _OWN.isdisjoint(values) else {name: values[name] for name in values.keys() - _OWN}
        )
        self.__dict__.update(
            kernel=kernel,
            values=dict(values),
            _id="",
            _json={"kernel": kernel, **plain},
            _hash=hash((kernel, tuple(values.items()))),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a problem cannot be changed; use problem.replace({name}=...)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        derived = self.declaration.derived
        if name not in derived:
            raise AttributeError(f"{self.kernel} has no field {name!r}; it has {', '.join([*self.values, *derived])}")
        found = self.__dict__[name] = derived[name](self)
        return found

    @property
    def declaration(self) -> type[Kernel]:
        """The kernel.

        Raises:
            ConfigError: this process does not know it.
        """
        from tiledsched.core.registry import kernel_named

        return kernel_named(self.kernel)

    @property
    def known(self) -> bool:
        """Whether this process knows the kernel."""
        try:
            return bool(self.declaration)
        except ConfigError:
            return False

    @property
    def names(self) -> dict[str, Any]:
        """Everything that constraints may read of it: values, and what is derived from them."""
        derived = self.declaration.derived
        for name in derived:
            if name not in self.__dict__:
                self.__dict__[name] = derived[name](self)
        return {**self.values, **{name: self.__dict__[name] for name in derived}}

    @property
    def flops(self) -> float:
        """Floating-point operations; 0 where the kernel states none, or is not known here."""
        return self._kept("flops", lambda kernel: float(kernel.flops(self)))

    @property
    def min_bytes(self) -> int:
        """Least device-memory traffic: every input read once and every output written once; 0 where that is not known."""
        return self._kept("min_bytes", lambda kernel: kernel.bytes_moved(self))

    def _kept(self, name: str, work_out: Callable[[type[Kernel]], Any]) -> Any:
        """What the kernel says, worked out once: the static model asks with every schedule. 0 of an unknown kernel."""
        kept = "_" + name
        if kept not in self.__dict__:
            if not self.known:
                return 0
            self.__dict__[kept] = work_out(self.declaration)
        return self.__dict__[kept]

    def tflops(self, median_us: float) -> float:
        """Rate in TFLOP/s at `median_us` microseconds."""
        return self.flops / median_us / 1e6

    def gbps(self, median_us: float) -> float:
        """Least traffic over time, GB/s."""
        return self.min_bytes / median_us / 1e3

    def to_json(self) -> dict[str, Any]:
        """A plain dict: the kernel's name and the values; :meth:`from_json` inverts it.

        Fields that came later are left out at their defaults, so that ids stored before there were any stay valid.
        """
        return dict(self._json)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """The problem `to_json` wrote. Of a kernel that this process does not know, the values are taken as they stand.

        Raises:
            ProblemError: a key is missing, unknown or has a wrong value.
        """
        from tiledsched.core.registry import kernel_named

        values = dict(data)
        kernel = values.pop("kernel", None)
        if not isinstance(kernel, str):
            raise ProblemError(f'a problem needs the name of its kernel, got {data!r}; add "kernel"')
        try:
            declaration = kernel_named(kernel)
        except ConfigError:
            plain = {name: tuple(value) if isinstance(value, list) else value for name, value in sorted(values.items())}
            return cls(kernel, plain)
        return declaration.problem(**values)

    @property
    def id(self) -> str:
        """Stable 12-digit hex id: equal problems have equal ids in every process and version."""
        if not self._id:
            self.__dict__["_id"] = stable_id(self._json)
        return str(self._id)

    def replace(self, **changes: Any) -> Problem:
        """A copy with `changes` applied."""
        return self.declaration.problem(**{**self.values, **changes})

    def __reduce__(self) -> Any:
        omitted = frozenset(set(self.values) - set(self._json))
        return _restored, (self.kernel, self.values, omitted)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Problem)
            and self._hash == other._hash
            and self.kernel == other.kernel
            and self.values == other.values
        )

    def __hash__(self) -> int:
        return int(self._hash)

    def __lt__(self, other: Problem) -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[Any, ...]:
        return self.kernel, tuple((type(value).__name__, value) for value in self.values.values())

    def __str__(self) -> str:
        return self.declaration.describe(self) if self.known else describe_values(self.values)

    def __repr__(self) -> str:
        return f"Problem({self.kernel}: {describe_values(self.values)})"


_OWN = frozenset(dir(Problem))
"""What every problem has, whatever its kernel calls its fields."""


def _restored(kernel: str, values: Mapping[str, Value], omitted: frozenset[str]) -> Problem:
    return Problem(kernel, values, omitted=omitted)


@dataclass(frozen=True)
class ProblemClass:
    """All of a problem and a schedule that machine code depends on beside the knobs: problems of one class share artifacts."""

    values: Mapping[str, Any]
    """The compile-time fields of the problem, for people, and `signature`, a hash of every assumption."""

    def __hash__(self) -> int:
        return hash(self.id)

    @functools.cached_property
    def id(self) -> str:
        """Stable id, part of the key under which a build is stored."""
        return stable_id(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """A plain dict; :meth:`from_json` inverts it."""
        return dict(self.values)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProblemClass:
        """What `to_json` wrote."""
        return cls(dict(data))


def unit_of(problem: Problem) -> str:
    """What rates are given in: TFLOP/s, or GB/s where the problem has no FLOPs."""
    return "TFLOP/s" if problem.flops else "GB/s"


def rate_of(problem: Problem, us: float) -> float:
    """The rate at `us` microseconds, in the problem's unit."""
    return problem.tflops(us) if problem.flops else problem.gbps(us)


def rate_text(problem: Problem, us: float, places: int = 0) -> str:
    """`612 TFLOP/s`."""
    return f"{rate_of(problem, us):.{places}f} {unit_of(problem)}"


def describe_values(values: Mapping[str, Value]) -> str:
    """`rows=4096 columns=8192 float16`: types and words by themselves, flags by their name where they are true."""
    parts = []
    for name, value in values.items():
        if isinstance(value, bool):
            parts.extend([name] if value else [])
        elif isinstance(value, str):
            parts.append(value if name == "dtype" else f"{name}={value}")
        else:
            parts.append(f"{name}={','.join(map(str, value))}" if isinstance(value, tuple) else f"{name}={value}")
    return " ".join(parts)
