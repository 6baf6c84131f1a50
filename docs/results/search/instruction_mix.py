"""Whether the machine code's instructions say which program is fastest, beyond what the static model and the knobs say.

python docs/results/search/instruction_mix.py build NVDISASM tuning_db/landscapes/attention/h200_burst_*d128_float16_*.json.xz
python docs/results/search/instruction_mix.py study tuning_db/landscapes/attention/h200_burst_*d128_float16_*.json.xz

`build` compiles the better programs of the landscapes again with the installed compiler, disassembles them with the nvdisasm
given (PyPI has it as nvidia-cuda-nvdisasm) and counts instructions by name into instruction_mix.json.xz. `study` corrects the
static model by ridge regression on those counts, on the knobs, or on both: fitted on the other landscapes with the same
mask, judged on the one left out.
"""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiledsched.build.compiler import BuildTask
from tiledsched.build.pool import BuildPool
from tiledsched.kernel import kernel_named
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule
from tiledsched.space_files import space_for
from tiledsched.studies.landscapes import read_landscape
from tiledsched.studies.model_agreement import spearman

ARCH = "sm_90"
COUNTS = Path(__file__).with_suffix(".json.xz")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
WORTH_A_LOOK = 1.6
"""Programs slower than this many times the best are left out."""
FEWEST_PROGRAMS = 20
"""Instructions in fewer programs than this are left out."""
RIDGE = 30.0
TILES = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8))
"""Rows, keys and warps that go together."""
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Program:
    """A recorded program and its instructions."""

    measured_us: float
    modelled_us: float
    schedule: Schedule
    counts: Counter[str]


def key(schedule: Schedule, problem: Problem) -> str:
    """What decides the machine code."""
    return f"{kernel_named('attention').problem_class(schedule, problem).id} {schedule.id}"


def read(path: Path) -> tuple[Problem, list[tuple[Schedule, float, float]]]:
    """The problem of a landscape, and of each program the schedule, measured and modelled microseconds."""
    found = read_landscape(path)
    times = zip(found.programs, found.measured_us.tolist(), found.modelled_us.tolist(), strict=True)
    return found.problem, [(one.schedule, *us) for one, *us in times if one.schedule["num_ctas"] == 1]


def build(disassembler: str, paths: Sequence[Path]) -> None:
    """Count the instructions of every program worth a look."""
    wanted: dict[str, BuildTask] = {}
    for path in paths:
        problem, programs = read(path)
        best = min(measured for _, measured, _ in programs)
        for schedule, measured, _ in programs:
            if measured <= WORTH_A_LOOK * best:
                wanted.setdefault(key(schedule, problem), BuildTask(kernel="attention", schedule=schedule, problem=problem,
                                                                    arch=ARCH, timeout_s=120.0))  # fmt: skip
    counts = {}
    with BuildPool() as pool, tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        for built in pool.build(wanted.values()):
            if built.artifact is not None:
                Path(file.name).write_bytes(built.artifact.cubin)
                text = subprocess.run(
                    [disassembler, "-c", file.name], capture_output=True, text=True, check=True
                ).stdout
                counts[key(built.task.schedule, built.task.problem)] = Counter(INSTRUCTION.findall(text))
    COUNTS.write_bytes(lzma.compress(json.dumps(counts, sort_keys=True).encode()))
    print(f"{len(counts)} of {len(wanted)} programs")


def of_instructions(programs: Sequence[Program], names: Sequence[str]) -> Array:
    """Counts on a logarithmic scale, and for each warp and element of a tile's scores."""
    rows = []
    for program in programs:
        number = program.schedule.number
        scores = number("tile_m") * number("tile_n") * number("q_subtiles") * number("kv_subtiles")
        per_warp = scores / (32 * max(4, number("num_worker_warps")))
        found = np.array([program.counts[name] for name in names], dtype=np.float64)
        rows.append(np.concatenate([np.log1p(found), found / per_warp]))
    return np.array(rows)


def of_knobs(programs: Sequence[Program]) -> Array:
    """One column for each value of each knob, and for each tile with its warps."""
    knobs = space_for(ARCH).knobs.values()
    return np.array([[*(float(program.schedule[knob.name] == choice) for knob in knobs for choice in knob.choices),
                      *(float(tile(program) == each) for each in TILES)] for program in programs])  # fmt: skip


def tile(program: Program) -> tuple[int, int, int]:
    """Rows, keys and warps."""
    return (
        program.schedule.number("tile_m"),
        program.schedule.number("tile_n"),
        program.schedule.number("num_worker_warps"),
    )


def corrected(held_out: Array, known: Array, residuals: Array) -> Array:
    """The correction, in logarithms, for the programs held out."""
    mean, scale = known.mean(0), known.std(0) + 1e-9
    known, held_out = (known - mean) / scale, (held_out - mean) / scale
    weights = np.linalg.solve(known.T @ known + RIDGE * np.eye(known.shape[1]), known.T @ residuals)
    return np.asarray(held_out @ weights, dtype=np.float64)


def study(paths: Sequence[Path]) -> None:
    """Print how well each correction orders the landscapes it was not fitted on."""
    counts = {name: Counter(found) for name, found in json.loads(lzma.decompress(COUNTS.read_bytes())).items()}
    used = Counter(name for found in counts.values() for name in found)
    names = sorted(name for name, programs in used.items() if programs > FEWEST_PROGRAMS)
    landscapes: list[tuple[bool, list[Program]]] = []
    for path in paths:
        problem, programs = read(path)
        landscapes.append((problem.causal, [Program(measured, modelled, schedule, counts[key(schedule, problem)])
                                            for schedule, measured, modelled in programs
                                            if key(schedule, problem) in counts]))  # fmt: skip
    print(
        f"{len(landscapes)} landscapes, {sum(len(each) for _, each in landscapes)} programs, {len(names)} instructions"
    )
    print("| corrected by | rank correlation | spread of log(modelled / measured) | regret of the first | of the best of ten "
          "| place of the first within 1%: median | most |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|")
    for label, kinds in (("nothing", ""), ("instructions", "i"), ("knobs", "k"), ("both", "ik")):
        scores = []
        for index, (causal, programs) in enumerate(landscapes):
            measured = np.log([program.measured_us for program in programs])
            order = np.log([program.modelled_us for program in programs])
            if kinds:
                others = [each for i, (mask, each) in enumerate(landscapes) if i != index and mask == causal]
                residuals = [np.log([one.measured_us / one.modelled_us for one in each]) for each in others]
                known = [one for each in others for one in each]
                held_out, fitted = (np.hstack([of_instructions(some, names)] * ("i" in kinds) + [of_knobs(some)] * ("k" in kinds))
                                    for some in (programs, known))  # fmt: skip
                order = order + corrected(held_out, fitted, np.concatenate([each - each.mean() for each in residuals]))
            loss = np.exp(measured[np.argsort(order, kind="stable")] - measured.min()) - 1.0
            scores.append((spearman(order, measured), np.std(order - measured), loss[0], loss[:10].min(),
                           1 + int(np.argmax(loss <= 0.01))))  # fmt: skip
        rank, spread, first, ten, _ = np.mean(scores, axis=0)
        places = [place for *_, place in scores]
        print(
            f"| {label} | {rank:.3f} | {spread:.3f} | {first:.1%} | {ten:.2%} | {np.median(places):g} | {max(places)} |"
        )


if __name__ == "__main__":
    if sys.argv[1] == "build":
        build(sys.argv[2], [Path(name) for name in sys.argv[3:]])
    else:
        study([Path(name) for name in sys.argv[2:]])
