"""The model beside what others published about Blackwell: `python -m docs.studies.blackwell`.

Prints the tables of docs/results/blackwell.md from docs/results/blackwell: `figures.csv` has what was published, `sources.csv`
where and how it was timed, and `programs.json` what the machine code of the published schedules takes. `--build` compiles these
anew (a minute or two; no GPU), `--fit` fits the two constants of `sources.csv` anew, and `--csv FILE` writes every figure that
has a modelled counterpart.

Published times are those of calls in a row, whose arrays stay in the L2 cache where they fit, so the model leaves out the flush
that precedes our own measurements. Where events were recorded around single calls from Python, the host's time is in the figure.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from docs.studies.flags import flag, parser_with
from tiledsched.build.compiler import BuildTask
from tiledsched.build.pool import BuildPool
from tiledsched.build.toolchain import installed_toolchain
from tiledsched.core import data_files
from tiledsched.core.cost import LAUNCH_US
from tiledsched.core.device import ArchSpec, ResourceFacts, arch_spec
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.model import estimate_us
from tiledsched.kernels.attention.published import expected_us
from tiledsched.report.document import Table, to_markdown
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.transfer import log_us
from tiledsched.store.exchange import read_table
from tiledsched.store.manifest import published_figures

DATA = Path(__file__).parents[1] / "results" / "blackwell"
DEVICES = {
    "GB10": arch_spec("sm_121"),
    "B300": arch_spec("sm_103"),
    "GB300": arch_spec("sm_103"),
    "B200": arch_spec("sm_100"),
    "GB200": arch_spec("sm_100"),
    "RTX PRO 6000": arch_spec("sm_120"),
    "RTX 5090": arch_spec("sm_120", "NVIDIA GeForce RTX 5090"),
    "H100": arch_spec("sm_90"),
}
OURS = ("attention", "tiledattention")
"""What the figures call kernels in cuTile whose schedules ours has, too."""
TIE = 0.005
"""Two modelled times that differ by less are a tie."""
Tile = tuple[int, int, int, str]
"""(tile_m, tile_n, occupancy, accumulators)."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published figure."""

    source: str
    """Name of the source in `sources.csv`."""
    device: str
    """Short name of the GPU."""
    kernel: str
    """What was timed."""
    problem: str
    """The problem, as published."""
    schedule: str
    """The schedule, where one was published."""
    value: float
    """The figure."""
    unit: str
    """ms, TFLOP/s, cycles or a ratio."""

    @property
    def attention(self) -> Problem | None:
        """The attention problem; None where it is another kernel's, or not said."""
        found = {name: int(size) for name, size in re.findall(r"\b([BHKSD])=(\d+)", self.problem)}
        if not {"B", "H", "S", "D"} <= set(found):
            return None
        return Attention.problem(
            batch=found["B"],
            heads=found["H"],
            kv_heads=found.get("K", found["H"]),
            seq_q=found["S"],
            seq_k=found["S"],
            head_dim=found["D"],
            causal="causal" in self.problem,
            dtype="bfloat16" if "bfloat16" in self.problem else "float16",
        )

    @property
    def tile(self) -> Tile | None:
        """The published schedule; None where none of ours corresponds to it."""
        sides = re.match(r"(\d+)x(\d+)", self.schedule)
        if self.kernel not in OURS or sides is None:
            return None
        occupancy = re.search(r"occ=(\d+)", self.schedule)
        return (
            int(sides[1]),
            int(sides[2]),
            int(occupancy[1]) if occupancy else 1,
            "fp16" if "acc=fp16" in self.schedule else "fp32",
        )

    @property
    def us(self) -> float:
        """The published time in microseconds."""
        problem = self.attention
        if self.unit == "ms" or problem is None:
            return self.value * 1e3
        return problem.flops / self.value / 1e6


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How a source timed."""

    timed: str
    """graph (replays of a CUDA graph), events (around single calls), counters or nothing that is known."""
    clock_ghz: float
    """The SM clock, where it is known; else 0, which stands for the maker's."""
    host_us: float
    """Microseconds of the host in each time."""


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of one of the data files."""
    with (DATA / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def figures() -> tuple[Figure, ...]:
    """Every published figure that has a number."""
    return tuple(
        Figure(**{**row, "value": float(row["value"])})  # type: ignore[arg-type]
        for row in read_rows("figures.csv")
        if row["value"]
    )


@cache
def conditions() -> Mapping[str, Conditions]:
    """By source, how it timed."""
    return {
        row["source"]: Conditions(
            timed=row["timed"], clock_ghz=float(row["clock_ghz"] or 0), host_us=float(row["host_us"] or 0)
        )
        for row in read_rows("sources.csv")
    }


def program_key(device: ArchSpec, problem: Problem, tile: Tile) -> str:
    """What decides about the machine code of a published schedule, but for its element type, which changes no resource."""
    tile_m, tile_n, occupancy, accumulators = tile
    mask = "causal" if problem.causal else "full"
    return f"{device.arch} D={problem.head_dim} {mask} {tile_m}x{tile_n} occ={occupancy} {accumulators}"


@cache
def programs() -> Mapping[str, ResourceFacts]:
    """The resources of the published schedules' programs."""
    stored = json.loads((DATA / "programs.json").read_text(encoding="utf-8"))
    return {key: ResourceFacts(**facts) for key, facts in stored["programs"].items()}


@cache
def _defaults(arch: str) -> dict[str, Any]:
    return {name: knob.default for name, knob in space_for(arch, Attention).knobs.items()}


def our_schedule(device: ArchSpec, problem: Problem, tile: Tile) -> Schedule:
    """Our schedule that corresponds to a published one: the default but for its tile, and the mask in a loop of its own."""
    plain = _defaults(device.arch) | {"loop_split": problem.causal}
    warps = 8 if tile[0] == 256 else 4
    return Schedule(
        plain, tile_m=tile[0], tile_n=tile[1], occupancy=tile[2], accum_mode=tile[3], num_worker_warps=warps
    )


def modelled_us(problem: Problem, tile: Tile, device: str, at: Conditions, *, flushed: bool = False) -> float | None:
    """Modelled time of a published schedule under a source's conditions; None where its program was not compiled."""
    spec = DEVICES[device]
    facts = programs().get(program_key(spec, problem, tile))
    if facts is None:
        return None
    spec = replace(spec, clock_ghz=at.clock_ghz or spec.clock_ghz)
    return estimate_us(problem, our_schedule(spec, problem, tile), facts, spec, flushed=flushed) + at.host_us


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A published figure beside the model."""

    figure: Figure
    """The figure."""
    problem: Problem
    """Its problem."""
    tile: Tile
    """Its schedule."""
    us: float
    """Modelled time under the source's conditions."""
    plain_us: float
    """Modelled time as `tune` uses it: the maker's clock, the L2 cache flushed, no host."""

    @property
    def error(self) -> float:
        """Modelled over published time, minus 1."""
        return self.us / self.figure.us - 1


@cache
def scored() -> tuple[Scored, ...]:
    """Every time of a schedule that the model has a counterpart of."""
    found = []
    for figure in figures():
        problem, tile, at = figure.attention, figure.tile, conditions()[figure.source]
        if problem is None or tile is None or figure.unit not in ("ms", "TFLOP/s"):
            continue
        us = modelled_us(problem, tile, figure.device, at)
        plain = Conditions(timed="", clock_ghz=0, host_us=0)
        plain_us = modelled_us(problem, tile, figure.device, plain, flushed=True)
        if us is not None and plain_us is not None:
            found.append(Scored(figure=figure, problem=problem, tile=tile, us=us, plain_us=plain_us))
    return tuple(found)


def groups() -> dict[str, list[Scored]]:
    """The scored figures by what the page reports together."""
    found: dict[str, list[Scored]] = defaultdict(list)
    for each in scored():
        name = each.figure.source
        if name == "TiledAttention":
            short = "S below 2048" if each.problem.seq_q < 2048 else "S from 2048"
            name += f", {short}" if each.problem.head_dim in (64, 128) else ", D=96"
        found[name.rstrip(" 123") if "tiles" in name else name].append(each)
    return dict(found)


def mean_error(found: Iterable[Scored]) -> float:
    """Mean size of the errors."""
    errors = [abs(each.error) for each in found]
    return sum(errors) / len(errors)


def summary() -> Table:
    """One row for each group."""
    rows = []
    for name, found in groups().items():
        before = [abs(each.plain_us / each.figure.us - 1) for each in found]
        rows.append(
            (
                name,
                found[0].figure.device,
                str(len(found)),
                f"{sum(before) / len(before):.1%}",
                f"{mean_error(found):.1%}",
                f"{max((each.error for each in found), key=abs):+.1%}",
            )
        )
    return Table(
        head=("source", "GPU", "figures", "as `tune` models it", "under its conditions", "worst"), rows=tuple(rows)
    )


def lines(*sources: str) -> Table:
    """Every figure of some sources."""
    rows = [
        (
            each.figure.device,
            f"S={each.problem.seq_q}",
            each.figure.schedule,
            f"{each.problem.tflops(each.figure.us):.1f}",
            f"{each.problem.tflops(each.us):.1f}",
            f"{each.error:+.1%}",
        )
        for each in scored()
        if each.figure.source in sources
    ]
    return Table(head=("GPU", "B=4 H=32 D=128 causal", "schedule", "published", "modelled", "error"), rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Order:
    """Two schedules of one problem that a source, or several sessions of one author, timed."""

    problem: Problem
    """The problem."""
    names: tuple[str, str]
    """Both schedules."""
    published: tuple[float, ...]
    """Time of the first over that of the second, in each session."""
    noise: float
    """By how much such a ratio differed between sessions: largest over smallest, minus 1."""
    modelled: float
    """The model's ratio."""

    @property
    def verdict(self) -> str:
        """Right, wrong or a tie; undecidable where what was published is within its own noise."""
        ratio = math.prod(self.published) ** (1 / len(self.published))
        if max(ratio, 1 / ratio) - 1 <= self.noise:
            return "undecidable"
        if abs(self.modelled - 1) < TIE:
            return "a tie"
        return "right" if (ratio > 1) == (self.modelled > 1) else "wrong"


def orders() -> list[Order]:
    """Every pair of schedules that was timed on one problem in one session."""
    ratios: dict[tuple[str, Problem, tuple[str, str]], list[float]] = defaultdict(list)
    modelled: dict[tuple[str, Problem, tuple[str, str]], float] = {}
    sessions: dict[tuple[str, Problem], list[Scored]] = defaultdict(list)
    for each in scored():
        # Rungs 1 to 3 of the ladder are other code; 4 and 5 differ in nothing but the occupancy.
        if not re.search(r"rung [1236]", each.figure.schedule):
            sessions[each.figure.source, each.problem].append(each)
    for (source, problem), found in sessions.items():
        for one, two in itertools.combinations(sorted(found, key=lambda each: each.tile), 2):
            if one.tile == two.tile:
                continue
            key = source.rstrip(" 123") if "tiles" in source else source, problem, (_named(one), _named(two))
            ratios[key].append(one.figure.us / two.figure.us)
            modelled[key] = one.us / two.us
    noise = {
        key[1].seq_q: max(found) / min(found) - 1 for key, found in ratios.items() if len(found) > 1
    }  # of an author who repeated
    result = []
    for key, times in ratios.items():
        source, problem, names = key
        nearest = max((seq for seq in noise if seq <= problem.seq_q), default=min(noise))
        own = noise[nearest] if source.startswith("TiledAttention") else 66.5 / 66.3 - 1  # rungs 2 to 4 of the ladder
        result.append(Order(problem=problem, names=names, published=tuple(times), noise=own, modelled=modelled[key]))
    return result


def _named(each: Scored) -> str:
    return re.sub(r" rung \d", "", each.figure.schedule)


def order_table() -> Table:
    """Every pair, and whether the model agrees."""
    return Table(
        head=("problem", "schedules", "published ratio of times", "noise", "modelled", "verdict"),
        rows=tuple(
            (
                str(each.problem),
                " over ".join(each.names),
                ", ".join(f"{ratio:.3f}" for ratio in each.published),
                f"{each.noise:.1%}",
                f"{each.modelled:.3f}",
                each.verdict,
            )
            for each in orders()
        ),
    )


def cycle_table() -> Table:
    """Cycles that Nsight Compute counted, and the model's."""
    rows = []
    for figure in figures():
        problem, tile = figure.attention, figure.tile
        if figure.unit == "cycles" and problem is not None and tile is not None:
            spec = DEVICES[figure.device]
            us = modelled_us(problem, tile, figure.device, Conditions(timed="", clock_ghz=0, host_us=0)) or 0.0
            cycles = (us - LAUNCH_US) * spec.clock_ghz * 1e3
            rows.append((str(problem), f"{figure.value:.3g}", f"{cycles:.3g}", f"{cycles / figure.value - 1:+.1%}"))
    return Table(head=("problem", "counted", "modelled", "error"), rows=tuple(rows))


@cache
def _table(kernel: str, arch: str) -> LookupTable:
    path = data_files.tuning_db() / "tables" / kernel / f"{arch}.json"
    return LookupTable(read_table(path).entries, kernel_named(kernel))


def served_us(kernel: str, device: str, **sizes: Any) -> float:
    """Modelled time of what the shipped table serves for a problem of a kernel: the estimate of the entry, which knew the machine
    code, times what the model says of the step from the entry's problem to this one; without an entry the model's estimate."""
    spec, problem = DEVICES[device], kernel_named(kernel).problem(**sizes)
    served = _table(kernel, spec.arch).resolve(problem, spec.arch)
    us = math.exp(log_us(problem, served.schedule, spec))
    if served.entry is not None and served.entry.model_us:
        us *= served.entry.model_us / math.exp(log_us(served.entry.problem, served.schedule, spec))
    return us


def others() -> Table:
    """Other kernels: what was published of others' code, and the model's time of what the shipped table serves."""
    half = {"dtype": "float16"}
    causal = {"batch": 4, "heads": 32, "kv_heads": 32, "seq_q": 8192, "seq_k": 8192, "head_dim": 128, **half}
    rows = []
    for figure in figures():
        shape = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?: bfloat16)?|(\d+)x(\d+) bfloat16", figure.problem)
        kernel = figure.kernel.split()[0]
        if figure.source == "playbook ratios":
            sizes = {
                "FMHA causal 8192": ("attention", {**causal, "causal": True}),
                "FMHA full 8192": ("attention", causal),
                "MatMul 8192": ("matmul", {"m": 8192, "n": 8192, "k": 8192, **half}),
                "RMSNorm 4096": ("rms_norm", {"rows": 4096, "columns": 4096, **half}),
            }.get(figure.kernel)
            if sizes is None:
                continue
            ratio = served_us(sizes[0], "GB10", **sizes[1]) / served_us(sizes[0], "B300", **sizes[1])
            published, modelled = f"{figure.value:g}x", f"{ratio:.1f}x"
        elif figure.source == "arXiv 2604.23466" and figure.unit == "TFLOP/s":
            sizes_ = {**causal, "seq_q": 16384, "seq_k": 16384}
            rate = Attention.problem(**sizes_).tflops(served_us("attention", figure.device, **sizes_))
            published, modelled = f"up to {figure.value:.0f} TFLOP/s", f"{rate:.0f} TFLOP/s at S=16384, full"
        elif kernel == "matmul" and shape:
            m, n, k = map(int, shape.groups()[:3])
            us = served_us("matmul", figure.device, m=m, n=n, k=k, dtype="bfloat16")
            published, modelled = f"{figure.value:.0f} TFLOP/s", f"{2 * m * n * k / us / 1e6:.0f} TFLOP/s"
        elif kernel == "rms_norm" and shape:
            counts = [int(each) for each in shape.groups() if each]
            rows_, columns = math.prod(counts[:-1]), counts[-1]
            us = served_us("rms_norm", figure.device, rows=rows_, columns=columns, dtype="bfloat16")
            published, modelled = f"{figure.value * 1e3:.0f} us", f"{us:.0f} us"
        else:
            continue
        what = f"{figure.kernel} {figure.problem} {figure.schedule}".replace(" TileGym defaults", "").strip()
        rows.append(
            (figure.source, figure.device.replace("sm_103/sm_121", "B300 over GB10"), what, published, modelled)
        )
    return Table(head=("source", "GPU", "what", "published", "ours, modelled"), rows=tuple(rows))


def held_out() -> Table:
    """How well published times are expected from the others of the same GPU, rival, mask and columns, with one length hidden; and
    of TiledAttention's own schedule, whether the rival then serves where it was faster by the margin."""
    rows = []
    for name, device in published_figures("attention").items():
        errors: list[float] = []
        agreed = [0, 0, 0]
        for hidden in device["times"]:
            rival, mask, columns, seq, heads, us = hidden
            problem = Attention.problem(
                batch=1, heads=heads, kv_heads=heads, seq_q=seq, seq_k=seq, head_dim=columns, causal=mask == "causal"
            )
            rest = [each for each in device["times"] if each[2] == columns and each != hidden]
            lengths = [each[3] for each in rest if each[:2] == [rival, mask]]
            expected = expected_us(problem, rival, rest, DEVICES[name].sm_count)
            if expected is None or not min(lengths) < seq < max(lengths):
                continue
            errors.append(expected / us - 1)
            for each in scored():
                if each.figure.source == "TiledAttention" and each.problem == problem and columns != 96:
                    said, true = (
                        ours > them * (1 + device["margin"])
                        for ours, them in ((each.us, expected), (each.figure.us, us))
                    )
                    agreed[0 if said == true else 1 if said else 2] += 1
        if errors:
            mean = sum(map(abs, errors)) / len(errors)
            worst = max(errors, key=abs)
            judged = (
                f"{agreed[0]} right, {agreed[1]} in vain, {agreed[2]} missed"
                if any(agreed)
                else "not timed beside ours"
            )
            rows.append((name, str(len(errors)), f"{mean:.1%}", f"{worst:+.1%}", judged))
    return Table(head=("GPU", "times hidden", "mean error", "worst", "hand-overs"), rows=tuple(rows))


def fit(found: Sequence[Scored]) -> tuple[float, float]:
    """The clock and the host's time with the smallest mean error of the logarithms."""
    best = (math.inf, 0.0, 0.0)
    for step in range(51):
        clock = 2.3 + step / 100
        at = Conditions(timed="events", clock_ghz=clock, host_us=0)
        times = [modelled_us(each.problem, each.tile, each.figure.device, at) or 0.0 for each in found]
        for half in range(61):
            error = sum(abs(math.log((us + half / 2) / each.figure.us)) for us, each in zip(times, found, strict=True))
            best = min(best, (error, clock, half / 2))
    return best[1], best[2]


def fits() -> Table:
    """The two constants, fitted to parts of the figures of TiledAttention, and the mean error on the rest."""
    cells = [each for each in scored() if each.figure.source == "TiledAttention" and each.problem.head_dim in (64, 128)]
    parts = {
        "all 40": lambda each: True,
        "D=64": lambda each: each.problem.head_dim == 64,
        "D=128": lambda each: each.problem.head_dim == 128,
        "full": lambda each: not each.problem.causal,
        "causal": lambda each: each.problem.causal,
    }
    rows = []
    for name, chosen in parts.items():
        clock, host_us = fit([each for each in cells if chosen(each)])
        at = Conditions(timed="events", clock_ghz=clock, host_us=host_us)
        rest = [
            replace(each, us=modelled_us(each.problem, each.tile, each.figure.device, at) or 0.0)
            for each in cells
            if not chosen(each) or name == "all 40"
        ]
        rows.append((name, f"{clock:.2f} GHz", f"{host_us:.1f} us", f"{mean_error(rest):.1%}"))
    return Table(head=("fitted to", "clock", "host", "mean error on the others"), rows=tuple(rows))


def build() -> None:
    """Compile the programs of the published schedules, and write down what they take."""
    wanted = {}
    for figure in figures():
        problem, tile = figure.attention, figure.tile
        if problem is not None and tile is not None and problem.head_dim <= 128:
            wanted[program_key(DEVICES[figure.device], problem, tile)] = DEVICES[figure.device], problem, tile
    keys = {}
    for key, (spec, problem, tile) in wanted.items():
        task = BuildTask(
            kernel=Attention.locator(), schedule=our_schedule(spec, problem, tile), problem=problem, arch=spec.arch
        )
        keys[task] = key
    found: dict[str, Any] = {}
    with BuildPool() as pool:
        for built in pool.build(keys):
            found[keys[built.task]] = asdict(built.artifact.facts) if built.artifact else None
    text = json.dumps({"tileiras": installed_toolchain().tileiras, "programs": dict(sorted(found.items()))}, indent=1)
    (DATA / "programs.json").write_text(text + "\n", encoding="utf-8")


def write_csv(path: Path) -> None:
    """Write every figure that has a modelled counterpart."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("source", "device", "problem", "schedule", "published_us", "modelled_us", "error"))
        for each in scored():
            figure = each.figure
            row = figure.source, figure.device, figure.problem, figure.schedule, f"{figure.us:.5g}"
            out.writerow((*row, f"{each.us:.5g}", f"{each.error:+.3f}"))


def tables() -> Iterator[Table]:
    """The tables of the page."""
    yield summary()
    yield cycle_table()
    yield lines("playbook B300", "playbook TileGym", "playbook ladder")
    yield order_table()
    yield others()
    yield held_out()


def main() -> None:
    """Print the tables."""
    parser = parser_with(
        flag("--build", action="store_true", help="compile the published schedules anew"),
        flag("--fit", action="store_true", help="print what the two constants are by parts of the figures"),
        flag("--csv", type=Path, help="write every figure that has a modelled counterpart"),
        description=__doc__,
    )
    given = parser.parse_args()
    if given.build:
        build()
    if given.csv:
        write_csv(given.csv)
    print("\n".join(to_markdown([each]) for each in ([fits()] if given.fit else tables())), end="")


if __name__ == "__main__":
    main()
