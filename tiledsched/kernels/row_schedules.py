"""What kernels over rows share on the host: knobs, constraints, constants, grid and a static model."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy

import tiledsched.core.fields as ts
from tiledsched.core import arrays
from tiledsched.core.arrays import Tolerance
from tiledsched.core.cost import COPY_SHARE, LAUNCH_US, WARPS_PER_GROUP, Cost, smooth_max
from tiledsched.core.device import REGISTERS_PER_SM, ArchSpec, ResourceFacts, ctas_per_sm, grid_blocks
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import Similarity
from tiledsched.core.sources import is_shipped

LOADS = ("plain", "tma", "gather")
"""How rows move; the kernel sees the index."""
WIDTHS = (1024, 2048, 3584, 4096, 5120, 8192, 16384)
ELEMENTS = 1 << 27
"""Elements of an array of the suites: 256 MiB in 16 bits, more than any L2 cache holds."""

KNOBS = {
    "TILE_ROWS": ts.knob((1, 2, 4, 8), about="rows of a tile", weight=0.4),
    "TILE_COLUMNS": ts.knob((4096, 512, 1024, 2048, 8192, 16384), about="columns of a tile", weight=0.4),
    "HOLD": ts.knob((True, False), about="whether the tiles of a row stay in registers"),
    "PERSISTENT": ts.knob((False, True), about="whether a block takes rows of every so many"),
    "loads": ts.knob(LOADS, about="how rows move", weight=1.0),
    "num_worker_warps": ts.knob((4, 8), about="warps that compute", weight=0.4),
    "occupancy": ts.knob((0, 1, 2, 4, 8), about="blocks an SM should hold; 0 leaves it to the compiler", weight=0.4),
}
CONSTRAINTS = {"columns <= 32 * TILE_COLUMNS": "a row's tiles are unrolled"}
EXPLORING = {
    "TILE_COLUMNS < 2 * columns or TILE_COLUMNS == 512": "less than half of the tile would be used",
    "HOLD or TILE_COLUMNS < columns": "a row of one tile is held in any case",
    "TILE_COLUMNS >= columns or 8 * TILE_COLUMNS >= columns": "more tiles of a row were not faster on the H200",
    "not HOLD or TILE_ROWS == 1 or TILE_ROWS * width <= 8192": "registers hold no more rows",
    "HOLD or TILE_ROWS == 1": "rows that are read twice are long",
    "num_worker_warps == 8 or width <= 8192 or not HOLD": "registers of four warps hold no more",
    "num_worker_warps == 4 or width >= 2048": "not enough elements for eight warps",
    "loads == 'tma' or (occupancy == 0 and not PERSISTENT)": "threads that load for themselves fill the SMs in a plain grid",
    "loads != 'tma' or occupancy > 0": "the compiler's choice is one block on an SM",
    "loads != 'tma' or TILE_COLUMNS >= columns": "TMA is tried where a row is one tile",
    "occupancy < 8 or width <= 2048": "of wide rows an SM holds fewer",
}
DERIVED = {"width": lambda p: 1 << (p.columns - 1).bit_length()}
"""A row's columns, rounded up to a power of two."""

# Published or counted.
LATENCY_CYCLES = 1500.0
"""From a request to device memory to its answer, under load."""
# Chosen, not fitted.
DUTY = 0.5
"""Share of its time in which a block without loads ahead of its work has them under way."""
DUTY_AHEAD = 0.8
"""Share of its time in which a persistent block has loads under way, where other warps load its next rows."""
BLOCK_CYCLES = 1200.0
"""Cycles of a block's start, reductions and end, which other blocks hide."""
FP32_PER_ELEMENT = 12.0
"""Instructions per element: conversions, sums, scales; exponentials count as some of them."""
SPILL_BYTES_PER_CYCLE = 32.0
OTHER_REGISTERS = 24
"""Registers of a thread for addresses and what is passed to it."""
# Read off 170 programs of cross entropy, gated units and layer normalisation on an H200 (2026-11-27).
FEW_BYTES_COST = 0.12
"""Share by which the time of a stream grows for each time that what is under way would fit once more into enough."""
FEW_WARPS_COST = 0.08
"""Share by which the time of a stream grows for each time that the warps on an SM would fit once more into `MANY_WARPS`."""
MANY_WARPS = 32
PERSISTENT_COST = 0.05
"""Share by which blocks that take one work tile after the other are slower than a plain grid."""
SURELY_FASTER = 0.85
"""A schedule with less than this share of the default's modelled time takes its place where nothing is measured."""
SPILL_COST = 1 / 200
"""Share by which each spilled byte a thread lengthens a stream."""


class OneFunction:
    """A kernel whose tile code is one function, called as the kernel, in the module `tiles` of its folder."""

    @classmethod
    def entry(cls, p: Problem, s: Schedule) -> Callable[..., None]:
        """The function of the kernel's name; cuTile is imported here, where a launch needs it."""
        home: Any = next(each for each in cls.__mro__ if is_shipped(each))  # a class of one's own may be made of it
        tiles = importlib.import_module(f"{home.__module__.rpartition('.')[0]}.tiles")
        found: Callable[..., None] = getattr(tiles, home.name)
        return found


class RowFields:
    """The fields of kernels over whole rows, and what each of their schedules must keep to; each is a :class:`Kernel`, too."""

    rows = ts.dim()
    columns = ts.dim(constant=True, most=65536)
    dtype = ts.dtype("bfloat16", "float16")

    constraints: ClassVar[Mapping[str, str]] = CONSTRAINTS
    derived: ClassVar[Mapping[str, Callable[[Any], Any]]] = DERIVED


class RowKernel(RowFields, OneFunction):
    """What the declarations of kernels over whole rows share; each is a :class:`Kernel`, too."""

    knobs: ClassVar[Mapping[str, Any]] = KNOBS
    exploring: ClassVar[Mapping[str, str]] = EXPLORING
    plain: ClassVar[Mapping[str, Any]] = MappingProxyType({"HOLD": True, "PERSISTENT": False})
    batch_dims: ClassVar[tuple[str, ...]] = ("rows",)

    @staticmethod
    def reduction_order(p: Problem, s: Schedule) -> tuple[Any, ...]:
        """What decides how elements lie in threads, which add up what they hold before they exchange it."""
        return tuple(s[name] for name in ("TILE_ROWS", "TILE_COLUMNS", "HOLD", "loads", "num_worker_warps"))

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """Parameters that are called like no knob."""
        return {"LOADS": LOADS.index(str(s["loads"]))}

    @staticmethod
    def grid(p: Problem, s: Schedule, device: Any) -> tuple[int]:
        """One block per tile of rows; as many as fit at once where blocks are persistent."""
        return (grid_blocks(-(-p.rows // s.number("TILE_ROWS")), s, device, persistent=bool(s["PERSISTENT"])),)


LARGEST, LEAST_HIGHEST = arrays.LARGEST["float8_e4m3fn"], 1e-12
"""Those of `rows`, whose tile code names them as numbers."""
ROUNDING_ERROR = 0.06
"""Largest relative error of rows over their scale: rounding to four significant bits costs at most 1/17 of a number. That holds
for each element, so for tiles of any size, and where an element lies between two numbers and is rounded either way.
"""
TEST_SCALE = 0.003
"""The scale given to tests: elements of more than 1.34 do not fit."""


class QuantizedRows(RowKernel):
    """What kernels add to whose rows are rounded to float8_e4m3fn; each is a :class:`Kernel`, too.

    A row's scale is its largest magnitude over 448, the largest float8_e4m3fn; or a scale is given, one for all rows. What is
    stored is the row over its scale, rounded to nearest even, and the largest number of its sign where an element does not fit.
    NaN stays NaN; a row with an infinity and a scale of its own becomes NaN.
    """

    static = ts.flag()
    Given = ts.array("1", dtype="float32", when="static")
    Out = ts.out("rows columns", dtype="float8_e4m3fn")
    Scale = ts.out("rows", dtype="float32")

    knobs: ClassVar[Mapping[str, Any]] = {
        **KNOBS,
        "TILE_COLUMNS": replace(KNOBS["TILE_COLUMNS"], choices=(2048, 1024, 512, 4096, 8192, 16384), default=2048),
        "num_worker_warps": replace(KNOBS["num_worker_warps"], default=8),
        "occupancy": ts.knob((2, 1, 3, 4, 8), about="blocks an SM should hold", weight=0.4),
    }
    constraints: ClassVar[Mapping[str, str]] = {
        **CONSTRAINTS,
        "HOLD or TILE_COLUMNS >= columns": "a row is held until its scale is known",
    }
    exploring: ClassVar[Mapping[str, str]] = {
        "TILE_COLUMNS < 2 * columns or TILE_COLUMNS == 512": "less than half of the tile would be used",
        "HOLD": "a row of one tile is held in any case",
        "TILE_COLUMNS >= columns or 16 * TILE_COLUMNS >= columns": "more tiles of a row were not tried",
        "TILE_ROWS == 1 or columns <= 1024": "several rows were slower on the H200, unless they are short",
        "loads == 'tma' or TILE_COLUMNS <= 1024 or columns > 4096": "several tiles of a row were faster on the H200",
        "num_worker_warps == 8 or TILE_COLUMNS <= 1024 or loads == 'tma' or static": "a thread loads at most 16 elements",
        "num_worker_warps == 4 or TILE_COLUMNS >= 2048": "a thread would load less than 16 bytes",
        "PERSISTENT == (loads == 'tma')": "threads that load for themselves fill the SMs in a plain grid",
        "loads != 'tma' or TILE_COLUMNS >= columns": "TMA is tried where a row is one tile",
        "occupancy == 1 or occupancy * (columns + 512 * num_worker_warps) <= 65536": "registers hold no more rows",
    }

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
        """A scale that is too small for some elements."""
        return {"Given": xp.full(1, TEST_SCALE, dtype=numpy.float32)}

    @classmethod
    def small(cls) -> list[Problem]:
        """Those of the kernel that does not quantise; half of them have a given scale."""
        plain = super().small()  # type: ignore[misc]
        return [cls.problem(**p.values, static=p.rows % 4 == 1) for p in plain]  # type: ignore[attr-defined]

    @staticmethod
    def tolerance(p: Problem, s: Schedule) -> Tolerance:
        """That of the types, and for 8-bit outputs that of one rounding, of numbers as exact as float32."""
        usual = Tolerance.of_types(["float32", str(p.dtype)], [p.dtype])
        return replace(usual, by_type=(*usual.by_type, ("float8_e4m3fn", ROUNDING_ERROR)))


def reference_quantized(xp: Any, rows: Any, Given: Any) -> tuple[Any, Any]:
    """(rows over their scale, before they are rounded; the scale of each row), by NumPy or CuPy."""
    highest = xp.abs(rows).max(-1) if rows.shape[1] else xp.zeros(len(rows))
    scale = xp.maximum(highest, LEAST_HIGHEST) / LARGEST if Given is None else Given + xp.zeros(len(rows))
    return xp.clip(rows / scale[:, None], -LARGEST, LARGEST), scale


def torch_quantized(rows: Any, Given: Any) -> tuple[Any, Any]:
    """(float32 rows as float8_e4m3fn, the scale of each row), by torch's functions."""
    from torch import float8_e4m3fn

    scale = rows.abs().amax(-1).clamp(min=LEAST_HIGHEST) / LARGEST if Given is None else Given.expand(len(rows))
    return (rows * (1.0 / scale)[:, None]).clamp(-LARGEST, LARGEST).to(float8_e4m3fn), scale.contiguous()


def row_coverage(p: Problem, s: Schedule) -> tuple[int, bool]:
    """(columns of the tiles that together cover a row, whether a row is read once: its tiles are held, or it is one tile)."""
    tile = s.number("TILE_COLUMNS")
    covered = -(-p.columns // tile) * tile
    return covered, bool(s["HOLD"]) or covered == tile


@dataclass(frozen=True, kw_only=True)
class TileDemand:
    """What a work tile of a stream takes."""

    count: int
    """Work tiles of the problem."""
    bytes: float
    """What it asks of memory before it waits for an answer."""
    instructions: float
    """Its float32 instructions, of all threads together."""
    live: float = 0.0
    """Float32 values that it holds in registers at once."""
    enough: float = 2.4
    """What all blocks of an SM should have asked of memory, in what memory answers within a latency: more where blocks pause."""
    again: float = 0.0
    """Bytes of the whole problem that are read once more."""


class RowModel(Cost):
    """The time of a kernel that streams rows through its blocks.

    The stream takes as long as its bytes at the rate of a copy, and longer where too little is under way. The blocks take turns
    on the SMs, which compute. The longer of the two counts. A subclass says what a work tile takes, and what the stream loses.
    """

    launches = 1
    """Launches of the kernel."""

    def work(self, p: Problem, s: Schedule) -> TileDemand:
        """What a work tile of a schedule takes."""
        raise NotImplementedError

    def slowdown(self, s: Schedule, work: TileDemand, facts: ResourceFacts, resident: int, answered: float) -> float:
        """How many times as long the stream takes as a copy, where memory answers `answered` bytes of an SM in a latency."""
        raise NotImplementedError

    def traffic(self, p: Problem, s: Schedule, work: TileDemand, slots: int, spec: ArchSpec) -> float:
        """Bytes of the stream, while `slots` blocks run at once."""
        return p.min_bytes + work.again

    def turns(self, p: Problem, s: Schedule, work: TileDemand, slots: int) -> float:
        """How many work tiles follow one another on an SM."""
        return float(math.ceil(work.count / slots)) if work.count <= 4 * slots else work.count / slots

    def latency(self, s: Schedule) -> float:
        """Cycles for which a work tile waits for its first bytes."""
        return LATENCY_CYCLES

    def spill_cycles(self, facts: ResourceFacts) -> float:
        """Cycles that spilled registers take of an SM, in each work tile."""
        return 0.0

    def model(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
        """Estimated time in microseconds. Only the order of estimates counts."""
        work, resident = self.work(p, s), facts.resident(spec.arch)
        slots, rate = spec.sm_count * resident, spec.dram_gbps * COPY_SHARE
        answered = LATENCY_CYCLES * rate / spec.sm_count / spec.clock_ghz
        stream = self.traffic(p, s, work, slots, spec) / (rate * 1e3)
        stream *= self.slowdown(s, work, facts, resident, answered)
        alone = work.instructions / min(spec.fp32_ops, facts.threads) + BLOCK_CYCLES + self.latency(s)
        busy = resident * (work.instructions / spec.fp32_ops + self.spill_cycles(facts))
        compute = self.turns(p, s, work, slots) * max(alone, busy) / (spec.clock_ghz * 1e3)
        return self.launches * LAUNCH_US + smooth_max(stream, compute)


class RowCost(RowModel):
    """The time of a kernel that reads and writes rows of 16-bit elements."""

    def work(self, p: Problem, s: Schedule) -> TileDemand:
        """A row that is neither held nor one tile is read again."""
        bytes_read = 2 * sum(each.role == "in" and len(each.shape) == 2 for each in p.declaration.arrays(p))
        rows, (covered, one_pass) = s.number("TILE_ROWS"), row_coverage(p, s)
        return TileDemand(
            count=-(-p.rows // rows),
            bytes=1.0 * rows * (covered if one_pass else s.number("TILE_COLUMNS")) * bytes_read,
            instructions=rows * covered * (1.0 if one_pass else 1.6) * FP32_PER_ELEMENT,
            again=0.0 if one_pass else float(p.rows * p.columns * bytes_read),
        )

    def traffic(self, p: Problem, s: Schedule, work: TileDemand, slots: int, spec: ArchSpec) -> float:
        """What is read again comes from the L2 cache for the most part, as long as it holds what is under way."""
        fits = slots * s.number("TILE_ROWS") * work.again / p.rows <= spec.l2_bytes / 2
        return p.min_bytes + work.again * (0.25 if fits else 1.0)

    def slowdown(self, s: Schedule, work: TileDemand, facts: ResourceFacts, resident: int, answered: float) -> float:
        """Few bytes under way lengthen the stream."""
        duty = DUTY_AHEAD if loads_ahead(s) else DUTY
        return float((1.0 + (answered / max(1.0, resident * work.bytes * duty)) ** 2) ** 0.5)

    def latency(self, s: Schedule) -> float:
        """Other warps load the next rows of a persistent block ahead."""
        return 0.0 if loads_ahead(s) else LATENCY_CYCLES

    def spill_cycles(self, facts: ResourceFacts) -> float:
        """Spilled registers are written and read once in each work tile."""
        return 2.0 * max(0, facts.spill_bytes - 32) * facts.threads / SPILL_BYTES_PER_CYCLE


def loads_ahead(s: Schedule) -> bool:
    """Whether warps of their own load the next rows of a persistent block."""
    return bool(s["PERSISTENT"]) and s["loads"] == "tma"


class StreamingCost(RowModel):
    """The time of a kernel that streams arrays through its blocks, also of machine code that is not built."""

    def expected(self, p: Problem, s: Schedule, spec: ArchSpec) -> ResourceFacts:
        """The resources of machine code that holds the values of a work tile in registers; those that do not fit spill."""
        threads = 32 * (s.number("num_worker_warps") or WARPS_PER_GROUP)
        needed = math.ceil(OTHER_REGISTERS + self.work(p, s).live / threads)
        allowed = REGISTERS_PER_SM // (threads * max(1, int(s.get("occupancy", 0)))) // 8 * 8
        registers = min(255, needed, allowed)
        return ResourceFacts(
            registers=registers,
            threads=threads,
            shared_bytes=0,
            spill_bytes=4 * max(0, needed - registers),
            num_ctas=1,
            code_bytes=0,
            ctas_per_sm=ctas_per_sm(spec.arch, registers, threads, 0),
        )

    def slowdown(self, s: Schedule, work: TileDemand, facts: ResourceFacts, resident: int, answered: float) -> float:
        """Few bytes and few warps under way lengthen the stream, and so do blocks that stay and registers that spill."""
        lack = FEW_BYTES_COST * max(0.0, work.enough * answered / (resident * work.bytes) - 1.0)
        lack += FEW_WARPS_COST * max(0.0, MANY_WARPS * 32 / (resident * facts.threads) - 1.0)
        return 1.0 + lack + PERSISTENT_COST * bool(s.get("PERSISTENT", False)) + SPILL_COST * facts.spill_bytes


@dataclass(frozen=True, kw_only=True)
class WholeRowCost(StreamingCost):
    """The time of a kernel that reads rows of 16-bit elements and writes them. A row that is not held is read again, from the L2
    cache for the most part.
    """

    arrays: int
    """Arrays of rows that are read."""
    instructions: float
    """Float32 instructions per element."""
    live: float = 2.0
    """Float32 values in registers for each element of a row that a block holds."""
    enough: float = 2.4
    """See :class:`TileDemand`."""

    def work(self, p: Problem, s: Schedule) -> TileDemand:
        """What a tile of rows takes."""
        rows, tile = s.number("TILE_ROWS"), s.number("TILE_COLUMNS")
        covered, held = row_coverage(p, s)
        return TileDemand(
            count=-(-p.rows // rows),
            bytes=2.0 * self.arrays * rows * min(covered if held else tile, p.columns),
            instructions=rows * covered * self.instructions * (1.0 if held else 1.6),
            live=rows * (covered if held else tile) * self.live,
            enough=self.enough,
            again=0.0 if held else 0.5 * self.arrays * p.rows * p.columns,
        )


class RowSimilarity(Similarity):
    """Problems whose flags and types differ move their rows alike: the winner of one is good for the others."""

    def kind(self, p: Problem) -> tuple[Any, ...]:
        """Nothing but sizes tells problems apart."""
        return ()

    def cold_start(
        self, p: Problem, default: Schedule, space: Any, estimate: Callable[[Schedule], float]
    ) -> Schedule | None:
        """The default, unless the model finds another schedule much faster: of code that is not built it knows little."""
        found = super().cold_start(p, default, space, estimate)
        return found if found is not None and estimate(found) < SURELY_FASTER * estimate(default) else default
