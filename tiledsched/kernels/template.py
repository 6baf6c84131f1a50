"""What a kernel must tell so that it can be built, launched, checked and served."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tiledsched.problem import Problem, stable_id
from tiledsched.schedule import Schedule

if TYPE_CHECKING:
    import cuda.tile as ct
    from cuda.tile.compilation import KernelSignature

HINT_KNOBS = ("num_ctas", "occupancy", "opt_level", "num_worker_warps")
"""Knobs that reach cuTile as kernel hints; the rest are compile-time constants of the kernel."""


@dataclass(frozen=True, kw_only=True)
class ProblemClass:
    """All of a problem that the machine code depends on. Problems of one class share artifacts.

    Sequence lengths, batch and head counts are run-time values: they are not here, except through `even`.
    """

    head_dim: int
    """Columns of each array: a compile-time constant."""
    dtype: str
    """Element type of all four arrays."""
    causal: bool
    """Whether the causal mask is compiled in."""
    group: int
    """Query heads per key/value head: a compile-time constant."""
    even: bool
    """Whether seq_k is a multiple of the schedule's tile_n, so that no column mask is needed."""

    @property
    def id(self) -> str:
        """Stable id, part of the key under which a build is stored."""
        return stable_id(asdict(self))

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)


class KernelTemplate(ABC):
    """A kernel with its knobs: makes the cuTile kernel for schedules, says grid and arguments, names its reference."""

    name: str
    """As in search-space files and the database."""

    @property
    @abstractmethod
    def function(self) -> Callable[..., None]:
        """The undecorated kernel function."""

    @abstractmethod
    def constants(self, schedule: Schedule, problem: Problem) -> tuple[bool | int | float, ...]:
        """Compile-time arguments, in the order of the kernel's last parameters."""

    @abstractmethod
    def problem_class(self, schedule: Schedule, problem: Problem) -> ProblemClass:
        """The part of `problem` that `schedule`'s machine code depends on."""

    @abstractmethod
    def signature(self, schedule: Schedule, problem: Problem) -> KernelSignature:
        """Types and assumptions of every parameter, equal to what a launch on contiguous arrays infers."""

    @abstractmethod
    def grid(self, schedule: Schedule, problem: Problem, sm_count: int) -> tuple[int, int, int]:
        """Blocks to launch on a device of `sm_count` multiprocessors."""

    @abstractmethod
    def scalars(self, problem: Problem, scale: float | None = None) -> tuple[float, ...]:
        """Run-time scalar arguments, which follow the arrays; `scale` None means the kernel's usual one."""

    def kernel(self, schedules: Mapping[str, Schedule]) -> ct.kernel:
        """One kernel object that carries the hints of every arch in `schedules` as `ct.ByTarget` values.

        A hint of 0 leaves the choice to the compiler, except for `opt_level`, where 0 is a level.
        """
        import cuda.tile as ct

        hints = {}
        for knob in HINT_KNOBS:
            values = {arch: schedule.number(knob) for arch, schedule in schedules.items()}
            by_arch = {arch: value if value or knob == "opt_level" else None for arch, value in values.items()}
            first = next(iter(by_arch.values()))
            hints[knob] = ct.ByTarget(default=first, **by_arch)
        return ct.kernel(self.function, **hints)

    @property
    def source_hash(self) -> str:
        """Hash of the module's source: evidence measured on other code is told apart by it."""
        module = inspect.getmodule(self.function)
        assert module is not None
        return hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:12]
