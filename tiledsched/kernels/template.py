"""What a kernel must tell so that it can be built, launched, checked and served."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tiledsched.errors import ProblemError
from tiledsched.problem import Problem, stable_id
from tiledsched.schedule import Schedule

if TYPE_CHECKING:
    import cuda.tile as ct
    from cuda.tile.compilation import KernelSignature

    from tiledsched.build.cubin import Artifact

HINT_KNOBS = ("num_ctas", "occupancy", "opt_level", "num_worker_warps")
"""Knobs that reach cuTile as kernel hints; the rest are compile-time constants of the kernel."""


@dataclass(frozen=True, kw_only=True)
class ProblemClass:
    """All of a problem that the machine code depends on. Problems of one class share artifacts.

    Sequence lengths, batch and head counts are run-time values: they are not here, except through `even`.
    """

    head_dim: int
    """Columns of q and k, and of the others where value_dim is 0: a compile-time constant."""
    dtype: str
    """Element type of all four arrays."""
    causal: bool
    """Whether the causal mask is compiled in."""
    group: int
    """Query heads per key/value head: a compile-time constant."""
    even: bool
    """Whether seq_k is a multiple of the schedule's tile_n, so that no column mask is needed."""
    bottom_right: bool = False
    """Whether the causal mask is aligned at the bottom right."""
    value_dim: int = 0
    """Columns of v and the output where they are not head_dim."""
    lse: bool = False
    """Whether the log-sum-exp is stored."""
    wide: bool = False
    """Whether arrays are indexed with 64 bits."""

    @property
    def id(self) -> str:
        """Stable id, part of the key under which a build is stored."""
        return stable_id(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """A plain dict; what most problems do without is left out, so that ids stay as they were before it came."""
        return {name: value for name, value in asdict(self).items() if value or name not in RARE}


RARE = ("bottom_right", "value_dim", "lse", "wide")


@dataclass(frozen=True, kw_only=True)
class ExtraArray:
    """A contiguous array that a launch takes beside q, k, v and out."""

    name: str
    """Which one, e.g. lse."""
    shape: tuple[int, ...]
    """Elements along each axis."""
    dtype: str
    """Element type, as NumPy and torch call it: float32 or int32."""
    output: bool = False
    """Whether it is a result; else a workspace, which launches that may overlap in time must not share."""
    zeroed: bool = False
    """Whether it must hold zeros when the kernel starts. The kernel leaves zeros behind, so once is enough."""


class KernelTemplate(ABC):
    """A kernel with its knobs: makes the cuTile kernel for schedules, says grid and arguments, names its reference."""

    name: str
    """As in search-space files and the database."""

    modules: tuple[ModuleType, ...]
    """Every module with tile code of the kernel."""

    @property
    @abstractmethod
    def function(self) -> Callable[..., None]:
        """The entry of plain problems under plain schedules."""

    @abstractmethod
    def entry(self, schedule: Schedule, problem: Problem) -> Callable[..., None]:
        """The undecorated kernel function that is launched.

        Its parameters are, in this order: q, k, v, out, the arrays of :meth:`workspace`, :meth:`scalars`,
        :meth:`constants`. A launch takes them all; a built cubin has no parameters for the constants.
        """

    @abstractmethod
    def workspace(self, schedule: Schedule, problem: Problem) -> tuple[ExtraArray, ...]:
        """Arrays beside q, k, v and out, in the order of the kernel's parameters; none for plain problems and schedules."""

    @abstractmethod
    def constants(self, schedule: Schedule, problem: Problem) -> tuple[bool | int | float, ...]:
        """Compile-time arguments, in the order of the kernel's last parameters."""

    @abstractmethod
    def problem_class(self, schedule: Schedule, problem: Problem) -> ProblemClass:
        """The part of `problem` that `schedule`'s machine code depends on."""

    @abstractmethod
    def signature(self, schedule: Schedule, problem: Problem) -> KernelSignature:
        """Types and assumptions of every parameter; a launch on contiguous arrays infers these and more."""

    def assumed(self, signature: KernelSignature) -> KernelSignature:
        """What machine code is built on where a launch's arguments suggest `signature`: what :meth:`signature` says of them,
        so that what is launched is what was built and measured.
        """  # fmt: skip
        return signature

    @abstractmethod
    def grid(self, schedule: Schedule, problem: Problem, sm_count: int) -> tuple[int, int, int]:
        """Blocks to launch on a device of `sm_count` multiprocessors."""

    @abstractmethod
    def scalars(self, problem: Problem, scale: float | None = None) -> tuple[float, ...]:
        """Run-time scalar arguments, which follow the arrays; `scale` None means the kernel's usual one."""

    def unsound(self, schedule: Schedule, problem: Problem, artifact: Artifact) -> str | None:
        """Why the machine code must not be run, where the compiler is known to make it wrong; else None."""
        return None

    @abstractmethod
    def rows_per_tile(self, schedule: Schedule, problem: Problem) -> int:
        """Query rows of a head that one output tile holds: what accuracy is judged by."""

    def kernel(self, schedules: Mapping[str, Schedule], problem: Problem | None = None) -> ct.kernel:
        """One kernel object that carries the hints of every arch in `schedules` as `ct.ByTarget` values.

        Without a problem it is a kernel of the plain entry, `function`.
        A hint of 0 leaves the choice to the compiler, except for `opt_level`, where 0 is a level.

        Raises:
            ProblemError: the schedules need different entries; make a kernel of each.
        """
        import cuda.tile as ct

        entries = {self.entry(schedule, problem) if problem else self.function for schedule in schedules.values()}
        if len(entries) != 1:
            names = sorted(entry.__name__ for entry in entries)
            raise ProblemError(f"these schedules run different kernels ({', '.join(names)}); make one kernel of each")

        hints = {}
        for knob in HINT_KNOBS:
            values = {arch: schedule.number(knob) for arch, schedule in schedules.items()}
            by_arch = {arch: value if value or knob == "opt_level" else None for arch, value in values.items()}
            first = next(iter(by_arch.values()))
            hints[knob] = ct.ByTarget(default=first, **by_arch)
        return ct.kernel(entries.pop(), **hints)

    @property
    def source_hash(self) -> str:
        """Hash of the source of the tile code: evidence measured on other code is told apart by it."""
        text = "".join(inspect.getsource(module) for module in self.modules)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
