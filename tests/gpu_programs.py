"""The programs of the GPU suite, and their bundle: what the tables of sm_90 serve, by themselves and by transfer, and the sizes that
each program is run on. It needs the compiler and no GPU; `gpu_suite` runs the bundle.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import json
import lzma
import math
import pickle
import random
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import tiledsched
from tiledsched.core import data_files
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import TiledschedError
from tiledsched.core.launches import steps
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import SHIPPED, kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.store.records import Entry
from tiledsched.store.shipped import read_shipped_entries

ROOT = Path(__file__).parent.parent
PACKAGE = Path(str(tiledsched.__file__)).parent
ARCH = "sm_90"
FOLDER = ROOT / ".gpu_suite"
BUNDLE = FOLDER / "bundle.xz"
FLAG, HALVES = (False, True), ("float16", "bfloat16")
ROWS = {"rows": (1, 2, 37), "columns": (1, 33, 768, 1000, 4097, 16400), "dtype": HALVES}
ATTENTION = {
    "seq_q": (1, 8, 65, 129, 300),
    "seq_k": (1, 64, 129, 1000),
    "head_dim": (64, 128, 96, 40, 256),
    "value_dim": (0, 0, 64),
    "dtype": HALVES,
    "causal": FLAG,
    "alignment": ("top_left", "bottom_right"),
    "batch": (1, 3),
    "group": (1, 3, 8),
    "kv_heads": (1, 2),
    "window": (0, 50),
    "window_right": (0, 9),
    "softcap": FLAG,
    "sinks": FLAG,
    "starts": FLAG,
    "lengths": FLAG,
    "packed": (0, 0, 3),
}
LAYOUTS = ("row", "column")
EPILOGUES: dict[str, tuple[Any, ...]] = {
    "activation": ("none", "relu", "squared_relu", "silu", "gelu", "gelu_tanh"),
    "bias": FLAG,
    "gate": FLAG,
    "residual": FLAG,
    "out_dtype": (*HALVES, "float8_e4m3fn"),
    "out_scales": ("tensor", "row"),
}
EIGHT_BIT_QUERIES: dict[str, tuple[Any, ...]] = {
    "seq_q": (65, 129, 300),
    "seq_k": (16, 144, 1008),
    "head_dim": (64, 128, 96, 16, 256),
    "value_dim": (0, 0, 64),
    "dtype": ("bfloat16",),
    "causal": FLAG,
    "alignment": ("top_left", "bottom_right"),
    "batch": (1, 3),
    "group": (1, 3),
    "kv_heads": (1, 2),
    "window": (0, 0, 50),
    "sinks": FLAG,
    "lengths": FLAG,
    "lse": FLAG,
    "kv8": ("tensor", "head"),
    "q8": (True,),
}
"""Of attention with queries in 8 bits, which most of the values above do not go with: drawn in addition."""
LONG_QUERIES: dict[str, tuple[Any, ...]] = EIGHT_BIT_QUERIES | {
    "seq_q": (4500, 8192),
    "seq_k": (8192, 8208),
    "head_dim": (128, 96, 64),
    "value_dim": (0, 0, 64),
    "batch": (3, 5),
    "group": (3, 8),
    "kv_heads": (2,),
    "window": (0,),
}
"""Of many such queries, which are served by other programs. They are too large to run; odd sizes of their programs' classes run."""
UNTUNED: dict[str, dict[str, tuple[Any, ...]]] = {
    "attention": ATTENTION | {"lse": FLAG, "page": (0, 0, 64), "kv8": ("", "", "", "", "tensor", "head", "page")},
    "attention_backward": ATTENTION | {"deterministic": FLAG, "dlse": FLAG},
    "matmul": {
        "m": (1, 17, 129, 1000),
        "n": (1, 63, 257, 1024),
        "k": (1, 65, 512, 4096),
        "dtype": HALVES,
        "a_layout": LAYOUTS,
        "b_layout": LAYOUTS,
    },
    "matmul_epilogue": {
        "m": (1, 17, 129, 1000),
        "n": (1, 63, 257, 1024),
        "k": (1, 65, 512, 4096),
        "dtype": HALVES,
        "a_layout": LAYOUTS,
        "b_layout": LAYOUTS,
        **EPILOGUES,
    },
    "scaled_matmul": {
        "m": (1, 17, 129, 1000),
        "n": (16, 144, 1024),
        "k": (16, 272, 4096),
        "scales": ("row", "tensor", "block"),
        "dtype": ("float8_e4m3fn", "float8_e5m2"),
        "out_dtype": (*HALVES, "float32"),
        "fast_accum": FLAG,
        "bias": FLAG,
    },
    "scaled_matmul_epilogue": {
        "m": (1, 17, 129, 1000),
        "n": (16, 144, 1024),
        "k": (16, 272, 4096),
        "scales": ("row", "tensor", "block"),
        "dtype": ("float8_e4m3fn", "float8_e5m2"),
        "fast_accum": FLAG,
        **EPILOGUES,
        "out_dtype": (*HALVES, "float32", "float8_e4m3fn"),
    },
    "grouped_matmul": {
        "tokens": (1, 65, 1000),
        "experts": (1, 3, 40),
        "n": (1, 129, 1024),
        "k": (1, 65, 512),
        "dtype": HALVES,
        "b_layout": LAYOUTS,
    },
    "grouped_matmul_epilogue": {
        "tokens": (1, 65, 1000),
        "experts": (1, 3, 40),
        "n": (1, 129, 1024),
        "k": (1, 65, 512),
        "dtype": HALVES,
        "b_layout": LAYOUTS,
        **EPILOGUES,
    },
    "rms_norm": ROWS | {"residual": FLAG},
    "rms_norm_quantized": ROWS | {"residual": FLAG, "static": FLAG},
    "rms_norm_backward": ROWS | {"residual": FLAG, "columns": (1, 33, 768, 1000, 4097, 16400)},
    "softmax": ROWS,
    "softmax_backward": ROWS,
    "layer_norm": ROWS | {"weighted": FLAG, "biased": FLAG},
    "glu": ROWS | {"activation": ("silu", "gelu", "gelu_tanh")},
    "glu_quantized": ROWS | {"activation": ("silu", "gelu", "gelu_tanh"), "static": FLAG},
    "rope": {
        "batch": (1, 3),
        "seq": (1, 5, 300),
        "q_heads": (1, 6, 32),
        "k_heads": (1, 2, 8),
        "parts": (1, 2),
        "width": (2, 40, 64, 128),
        "each": FLAG,
        "dtype": HALVES,
        "angle_dtype": (*HALVES, "float32"),
    },
    "cross_entropy": {
        "rows": (1, 5, 300),
        "columns": (1, 2, 31, 256, 1000, 4097, 50257),
        "dtype": (*HALVES, "float32"),
        "label_dtype": ("int64", "int32"),
        "smoothed": FLAG,
    },
}
"""Kernel -> values of the fields of problems that are in no table; problems are drawn so that all pairs of values occur."""
UNTUNED["rope_in_place"] = UNTUNED["rope"]
MOST_DRAWN, MOST_OF_QUERIES, MOST_LONG = 48, 16, 18
"""Problems drawn of a kernel."""
TILED = {
    "rows": "TILE_ROWS",
    "m": "TILE_M",
    "n": "TILE_N",
    "k": "TILE_K",
    "tokens": "TILE_M",
    "seq": "TILE_SEQ",
    "seq_q": "tile_m",
    "seq_k": "tile_n",
}
"""Run-time size -> the knob that is its tile."""
COUNTED = {
    "window": (40, 1, 128, 7, 200),
    "window_right": (9, 1, 64, 3, 20),
    "packed": (3, 1, 2, 5, 4),
    "batch": (1, 2, 3, 2, 1),
    "kv_heads": (2, 1, 1, 3, 1),
    "experts": (3, 1, 5, 2, 7),
}
"""Run-time sizes that no tile takes part of -> their values. Where one is 0, the problem does without it."""
GROWING = ("batch", "rows", "tokens", "m")
"""The first of these that a kernel has makes more blocks."""
WAVE_BLOCKS = 140
"""Blocks that are more than run at once on 132 SMs, times those that an SM holds."""
MOST_ELEMENTS = 1 << 23
"""Elements of all arrays of a problem; and a quarter of the scores of attention, which a reference holds in float64."""


@dataclass(kw_only=True)
class Program:
    """A schedule for a problem class, and the problems of the class that it is run on."""

    schedule: Schedule
    problem: Problem
    """One of its class: the tuned one, or the first that was drawn."""
    key: str
    """What the machine code depends on."""
    alternatives: tuple[Schedule, ...] = ()
    """What is served where it does not build."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def kernel(self) -> KernelClass:
        return self.problem.declaration


@lru_cache
def compiler() -> str:
    """Version of the compiler on this machine."""
    from tiledsched.build.toolchain import compiler_at_hand

    return compiler_at_hand()


def class_of(p: Problem, s: Schedule) -> str:
    from tiledsched.core.launches import problem_class

    return problem_class(p.declaration, p, s, arch_spec(ARCH)).id


def program_of(p: Problem, s: Schedule, alternatives: tuple[Schedule, ...] = ()) -> Program:
    parts = compiler(), p.declaration.name, tile_hash(p.declaration.name), s.id, class_of(p, s)
    key = hashlib.sha256("/".join(parts).encode()).hexdigest()[:24]
    return Program(schedule=s, problem=p, key=key, alternatives=alternatives)


@lru_cache
def tile_hash(name: str) -> str:
    """Hash of a kernel's tile code as the compiler sees it: without comments, docstrings and layout. With it goes what is launched
    for the problems and schedules of its table.
    """
    home, found = Path(inspect.getfile(kernel_named(name))), dict[Path, str]()
    left = sorted(home.parent.glob("*.py"))
    while left:
        path = left.pop()
        code, imported = tile_code(path)
        if code and path not in found:
            found[path] = code
            left += imported
    texts = [*(found[path] for path in sorted(found)), *map(launched, shipped_entries(name))]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


@lru_cache
def shipped_entries(name: str) -> list[Entry]:
    """What the table of a kernel serves; a kernel that was not tuned has no table."""
    table = data_files.tuning_db() / "tables" / name / f"{ARCH}.json"
    return read_shipped_entries(table) if table.is_file() else []


def launched(entry: Entry) -> str:
    """The functions that the schedule of an entry launches, each with its grid and its constants."""
    kernel = entry.problem.declaration
    found = steps(kernel, entry.problem, space_for(ARCH, kernel).complete(entry.schedule), arch_spec(ARCH))
    return repr(
        [
            (each.function.__name__, each.grid, *(arg.value for arg in each.arguments if arg.kind == "constant"))
            for each in found
        ]
    )


@lru_cache
def tile_code(path: Path) -> tuple[str, list[Path]]:
    """The code of a module and the modules it takes names from, if it imports cuTile; else nothing."""
    body = (tree := ast.parse(path.read_text(encoding="utf-8"))).body
    if not any(isinstance(each, ast.Import) and each.names[0].name == "cuda.tile" for each in body):
        return "", []
    names = [each.module.replace(".", "/") for each in body if isinstance(each, ast.ImportFrom) and each.module]
    return code_of(tree), [module for each in names if (module := PACKAGE.parent / f"{each}.py").is_file()]


def code_of(node: Any) -> str:
    """A syntax tree as text, without docstrings and what the parsers of some versions of Python leave empty."""
    if isinstance(node, ast.AST):
        parts = (f"{name}={code_of(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({', '.join(parts)})"
    if isinstance(node, list):
        return f"[{', '.join(code_of(each) for each in node if not is_text(each))}]"
    return repr(node)


def is_text(node: Any) -> bool:
    """Whether a statement is a string, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def hashes() -> dict[str, str]:
    """By kernel, a hash of its tile code and of what its table of sm_90 serves, which changes where a run on a GPU says nothing any
    more. Other times of the same schedules change nothing.
    """
    found = {}
    for name in sorted(SHIPPED):
        served = sorted(f"{each.problem.id} {each.schedule.id}" for each in shipped_entries(name))
        found[name] = hashlib.sha256("\n".join([tile_hash(name), *served]).encode()).hexdigest()[:8]
    return found


def drawn(kernel: KernelClass) -> list[Problem]:
    """Problems of a kernel such that pairs of values of its fields occur together, where the kernel allows it."""
    rng = random.Random(kernel.name)
    found = drawn_of(kernel, UNTUNED.get(kernel.name, {}), MOST_DRAWN, rng)
    if kernel.name == "attention":
        found += drawn_of(kernel, EIGHT_BIT_QUERIES, MOST_OF_QUERIES, rng)
        found += drawn_of(kernel, LONG_QUERIES, MOST_LONG, rng)
    return found


def drawn_of(
    kernel: KernelClass, options: Mapping[str, tuple[Any, ...]], most: int, rng: random.Random
) -> list[Problem]:
    """At most so many such problems, of values that the options list."""
    found, covered = dict[Problem, None](), set[Any]()
    for _ in range(most):
        best: tuple[int, Problem, set[Any]] | None = None
        for _ in range(40):
            values = {name: rng.choice(choices) for name, choices in options.items()}
            try:
                problem = kernel.problem(**stated(values))
            except TiledschedError:
                continue
            new = set(itertools.combinations(values.items(), 2)) - covered
            if best is None or len(new) > best[0]:
                best = len(new), problem, new
        if best is None or not best[0]:
            break
        found[best[1]] = None
        covered |= best[2]
    return list(found)


def stated(values: dict[str, Any]) -> dict[str, Any]:
    """Values of the fields of a problem; heads come in groups, and angles for each sequence of a batch."""
    rest = {name: value for name, value in values.items() if name not in ("group", "each")}
    if "group" in values:
        rest["heads"] = values["group"] * values["kv_heads"]
    return rest | ({"tables": values["batch"]} if values.get("each") else {})


def programs(name: str) -> list[Program]:
    """The programs that a kernel's table serves: of the problems in it, and of problems that are drawn. The table holds what the
    kernel whose search space it has lends it, too.
    """
    from tiledsched.serve.lookup import LookupTable
    from tiledsched.store.spills import shipped_spills

    kernel = kernel_named(name)
    entries = shipped_entries(name)
    lenders = shipped_entries(kernel.space) if kernel.space != name else []
    table = LookupTable(
        [*entries, *lenders], kernel, compiler=compiler(), spills_of=lambda arch: shipped_spills(name, arch, compiler())
    )
    found: dict[str, Program] = {}
    for problem in dict.fromkeys((*drawn(kernel), *(entry.problem for entry in entries))):
        served = table.resolve(problem, ARCH)
        program = program_of(problem, served.schedule, served.alternatives)
        program = found.setdefault(program.key, program)
        if elements_of(problem) <= MOST_ELEMENTS:
            program.problems.append(problem)
    return list(found.values())


def elements_of(p: Problem) -> int:
    scores = p.batch * p.heads * p.seq_q * p.seq_k // 4 if "seq_k" in p.values else 0
    return max(scores, sum(math.prod(shape) for spec in p.declaration.arrays(p) for shape in spec.shapes))


def sizes_of(program: Program) -> list[Problem]:
    """The problems of a program's class with odd sizes: each run-time size is one, a tile, one fewer and one more, and two and a
    half tiles; and one problem has more blocks than run at once.
    """
    p, s, space = program.problem, program.schedule, space_for(ARCH, program.kernel)
    of, found = class_of(p, s), list[Problem]()
    axes = {name: values for name, values in COUNTED.items() if p.values.get(name)}
    for name, knob in TILED.items():
        if name in p.values:
            tile = s.number(knob)
            axes[name] = (tile + 1, 1, tile, max(1, tile - 1), 2 * tile + tile // 2 + 1)
    for turn in range(5):
        # Another step through the values for each size, so that the pairs of two sizes differ.
        wanted = {name: values[(turn * (1 + place % 4)) % 5] for place, (name, values) in enumerate(axes.items())}
        found.append(fitted(p, s, space, of, wanted))
    grows, few = next(name for name in GROWING if name in axes), found[0]
    more = fitted(few, s, space, of, {grows: 8 * few.values[grows]})
    grids = zip(*(program.kernel.grids(each, s, arch_spec(ARCH)) for each in (few, more)), strict=True)
    some, most = max((tuple(map(math.prod, each)) for each in grids), key=lambda each: each[1] - each[0])
    each = (more.values[grows] - few.values[grows]) / max(1, most - some)  # of the size, for one block more
    for held in (max(2, s.get("occupancy", 0)), 1):  # by an SM; the second where arrays of the first are too large
        wave = fitted(few, s, space, of, {grows: few.values[grows] + math.ceil(WAVE_BLOCKS * held * each)})
        if elements_of(wave) <= 2 * MOST_ELEMENTS:
            break
    fit = [each for each in dict.fromkeys((*found, wave)) if elements_of(each) <= MOST_ELEMENTS * (1 + (each == wave))]
    return fit or [min(found, key=elements_of)]


def fitted(p: Problem, s: Schedule, space: SearchSpace, of: str, wanted: Mapping[str, int]) -> Problem:
    """The problem with sizes that are wanted, or the next multiples of something, as far as it stays in its class and the schedule
    works for it.
    """
    for name, value in wanted.items():
        for multiple in (1, 8, 16, 64, 128, 256, 512):
            size = -(-value // multiple) * multiple
            values = {name: size}
            if name == "kv_heads":
                values["heads"] = size * p.group
            elif name == "batch" and p.values.get("tables", 1) != 1:
                values["tables"] = size
            try:
                made = p.replace(**values)
                if not space.unworkable(s, made) and class_of(made, s) == of:
                    p = made
                    break
            except (TiledschedError, ArithmeticError):
                continue
    return p


def kept(program: Program) -> Path:
    """The file of a program that was built before, of which the machine code follows, compressed."""
    return FOLDER / "programs" / f"{program.key}.xz"


def build(wanted: Sequence[Program], minutes: float) -> dict[str, str]:
    """Build programs that are not there yet, for at most so many minutes; where one does not build, the next choice is built. Gives
    what came of those that did not build, by schedule and problem.
    """
    from tiledsched.build.compiler import BuildTask
    from tiledsched.build.pool import BuildPool

    failures: dict[str, str] = {}
    ends, left = time.monotonic() + 60 * minutes, {each.key: each for each in wanted if not kept(each).exists()}
    kept(wanted[0]).parent.mkdir(parents=True, exist_ok=True)
    with BuildPool() as pool:
        while left and time.monotonic() < ends:
            tasks = {
                BuildTask(kernel=each.kernel.locator(), schedule=each.schedule, problem=each.problem, arch=ARCH): each
                for each in left.values()
            }
            print(f"{len(tasks)} programs to build", flush=True)
            for built in pool.build(tasks):
                program = left.pop(tasks[built.task].key)
                if built.artifact is not None:
                    kept(program).write_bytes(lzma.compress(built.artifact.cubin))
                else:
                    failures[f"{program.problem} {program.schedule.short()}"] = str(built.failure)
                    left |= {each.key: each for each in instead_of(program) if not kept(each).exists()}
                if time.monotonic() > ends:
                    break
    return failures


def instead_of(program: Program) -> list[Program]:
    """What is served where a program does not build."""
    return [program_of(program.problem, s, program.alternatives[1:]) for s in program.alternatives[:1]]


def write(path: Path, wanted: Sequence[Program]) -> dict[str, int]:
    """Write the bundle of the programs that are built; gives the number of programs and cases.

    The bundle is compressed: a line of JSON that tells what it is, and a pickle of the machine code by fingerprint and, for each
    problem, of how each of its programs is launched.
    """
    from tiledsched.build.cubin import read_artifact
    from tiledsched.measure.arrays import launch_of

    codes: dict[str, bytes] = {}
    cases: dict[Problem, dict[str, Any]] = {}
    left_out = 0
    for program in wanted:
        while not kept(program).exists() and program.alternatives:
            (program,) = instead_of(program)
        if not kept(program).exists():
            left_out += 1
            continue
        artifact = read_artifact(lzma.decompress(kept(program).read_bytes()), ARCH)
        codes[artifact.fingerprint] = artifact.cubin
        for problem in dict.fromkeys((*program.problems, *sizes_of(program))):
            launch = launch_of(program.kernel, problem, program.schedule, arch_spec(ARCH), artifact.fingerprint)
            cases.setdefault(problem, {}).setdefault(artifact.fingerprint, (program.schedule, launch))
    about = {"compiler": compiler(), "commit": commit(), "kernels": hashes(), "left_out": left_out}
    contents = {"codes": codes, "cases": [(problem, list(of.values())) for problem, of in cases.items()]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(json.dumps(about).encode() + b"\n" + pickle.dumps(contents)))
    counts = {"programs": len(codes), "cases": sum(map(len, cases.values())), "bytes": path.stat().st_size}
    return counts | {"left_out": left_out}


def commit() -> str:
    """The commit of this checkout; empty where there is none."""
    words = ["git", "rev-parse", "--short=8", "HEAD"]
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # no git
        return ""


def read_about(path: Path) -> dict[str, Any]:
    """What a bundle says of itself: compiler, commit, the hashes of kernels, and how many programs were not built."""
    found: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()).partition(b"\n")[0])
    return found


def read(path: Path) -> dict[str, Any]:
    """The machine code and the cases of a bundle, which this checkout's own `build` wrote."""
    found: dict[str, Any] = pickle.loads(lzma.decompress(path.read_bytes()).partition(b"\n")[2])
    return found


def make_bundle(path: Path, minutes: float) -> None:
    """Build what is missing, within so many minutes, and write the bundle."""
    # A program of each kernel in turn, in case that the time does not suffice for all.
    turns = itertools.zip_longest(*map(programs, SHIPPED))
    wanted = [each for turn in turns for each in turn if each is not None]
    for what, failure in build(wanted, minutes).items():
        print(f"not built: {what}: {failure}")
    print(write(path, wanted))
