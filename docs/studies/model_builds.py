"""How many schedules have to be built for the model to find its best: `python -m docs.studies.model_builds`.

Without a GPU `tune` builds the schedules that the model likes best by what they are expected to need, and ranks their
programs by what they do need. This builds all of some spaces (half an hour on two cores; what is in the database is not
built again) and asks how far down the first order the first of the second stands, and what is lost by building fewer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from tiledsched.build.artifacts import ArtifactStore
from tiledsched.build.pool import BuildPool
from tiledsched.build.toolchain import installed_toolchain
from tiledsched.core.config import load_settings
from tiledsched.core.device import arch_spec
from tiledsched.core.problem import Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.space import accuracy_class
from tiledsched.core.space_files import space_for
from tiledsched.report.document import Table, to_markdown
from tiledsched.store.db import TuningDB
from tiledsched.tuning.programs import Builder
from tiledsched.tuning.tuner import expected_order

COUNTS = (8, 16, 32, 64)
"""Numbers of builds whose loss is printed."""
ATTENTION = [{"seq_len": 1024, "head_dim": 64, "causal": False}, {"seq_len": 4096, "head_dim": 64, "causal": False}]
"""The problems that `make tune` tunes."""
MATMUL = [{"m": m, "n": 6144, "k": 4096, "dtype": "bfloat16"} for m in (16, 512, 4096)]
RMS_NORM = [{"rows": rows, "columns": columns} for rows, columns in ((65536, 2048), (32768, 4096), (16384, 8192))]
SPACES = [
    *((arch, *what) for arch in ("sm_121", "sm_90") for what in (("matmul", MATMUL), ("rms_norm", RMS_NORM))),
    ("sm_121", "attention", ATTENTION),
]
"""(arch, kernel, problems)."""


def judge(builder: Builder, problem: Problem) -> tuple[str, ...]:
    """The row of one problem."""
    kernel, spec = builder.kernel, arch_spec(builder.arch)
    space = space_for(builder.arch, kernel)
    pinned = accuracy_class(space, "fp32") | space.modelled_pins()
    default = space.default(problem, pinned=accuracy_class(space, "fp32"))
    schedules = list(dict.fromkeys([default, *space.schedules(problem, pinned=pinned)]))
    order = expected_order(schedules, problem, spec, first=[default])
    builder.build(order, problem, progress=lambda done, record: _say(f"{problem} {done}") if done % 50 == 0 else None)
    programs = builder.programs(order, problem, spec)
    us = {
        schedule: min(kernel.cost.model(problem, each, program.facts, spec) for each in program.schedules)
        for program in programs
        for schedule in program.schedules
    }
    least = min(us.values())
    places = [place for place, schedule in enumerate(order, start=1) if us.get(schedule) == least]
    near = [place for place, schedule in enumerate(order, start=1) if us.get(schedule, 2 * least) <= 1.01 * least]
    losses = (min(us[each] for each in order[:count] if each in us) / least - 1 for count in COUNTS)
    return (
        builder.arch,
        f"{kernel.name} {problem}",
        str(len(order)),
        str(len(programs)),
        str(places[0]),
        str(near[0]),
        *(f"{loss:.1%}" for loss in losses),
    )


def rows(kernels: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A row for each problem."""
    settings = load_settings({})
    with TuningDB.open(settings.db) as db, BuildPool() as pool:
        for arch, name, problems in SPACES:
            if name in kernels or not kernels:
                kernel = load_kernel(name)
                builder = Builder(db, ArtifactStore(), kernel, arch, installed_toolchain(), pool)
                make = getattr(kernel, "standard", kernel.problem)
                for values in problems:
                    yield judge(builder, make(**values))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


HEAD = (
    "arch",
    "problem",
    "schedules",
    "programs",
    "best is no.",
    "within 1% is no.",
    *(f"loss of first {n}" for n in COUNTS),
)

if __name__ == "__main__":
    print(to_markdown([Table(head=HEAD, rows=tuple(rows(sys.argv[1:])))]), end="")
